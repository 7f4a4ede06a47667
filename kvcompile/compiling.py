"""``compile``: one line that compiles a model and prepares its ``generate()``; ``uncompile`` undoes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn

from kvcompile.backend import kvquant
from kvcompile.compat.modules import drop_compiled_call
from kvcompile.errors import OptionsError, check_callable, check_made, shown
from kvcompile.generation.generate import Generation, generative_models
from kvcompile.policy.policy import OnUnsupported, PolicySpec

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


@overload
def compile(
    model: Compiled,
    *,
    policy: PolicySpec = None,
    on_unsupported: OnUnsupported | None = None,
    verify: bool | None = None,
    merge_projections: bool | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **inductor_options: Any,
) -> Compiled: ...


@overload
def compile(
    *,
    policy: PolicySpec = None,
    on_unsupported: OnUnsupported | None = None,
    verify: bool | None = None,
    merge_projections: bool | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **inductor_options: Any,
) -> Callable[[Compiled], Compiled]: ...


def compile(
    model: Any = None,
    *,
    policy: PolicySpec = None,
    on_unsupported: OnUnsupported | None = None,
    verify: bool | None = None,
    merge_projections: bool | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **inductor_options: Any,
) -> Any:
    """Compile a model or function with packed KV caches, and prepare the ``generate()`` of a Transformers model.

    A module is compiled in place, as by ``model.compile(backend=kvquant(...))``, and returned. A function is unchanged,
    and a compiled function is returned. Without ``model``, a decorator is returned. If a model has a ``generate()`` of
    its own, such as a PEFT model or BLIP-2, the Transformers decoders that it contains are compiled, too.

    Afterwards ``generate()`` of a Transformers decoder, also in a pipeline, uses a cache that is packed from the start.
    No plain cache is allocated, and the next request reuses the memory. Eager code reads the prompt. Decode steps are
    compiled, on CPUs too; on GPUs they are CUDA graphs unless ``mode`` is given. ``generate()`` uses a cache that the
    caller passes, and gives it more room if it is packed and needs more.

    Args:
        model: a module or function; None for a decorator.
        policy: any argument of :meth:`Policy.load`.
        on_unsupported: the reaction to attention that cannot be packed: ``error``, ``warn`` or ``ignore``. By default
            the policy decides.
        verify: True compares every rewritten graph with its original when it is compiled, and compiles attention that
            differs with plain Inductor (docs/verify.md).
        merge_projections: True computes the projections of queries, keys and values as one product, and those of gate
            and up, in decode steps. The first step moves their weights into one tensor (docs/generate.md).
        mode: a ``torch.compile`` mode.
        dynamic: see ``torch.compile``.
        fullgraph: see ``torch.compile``.
        inductor_options: Inductor configuration keys, which override the settings of the mode. Pass names with dots in
            a dict, such as ``options={"triton.cudagraphs": True}``.

    Returns:
        ``model`` itself if it is a module; otherwise the compiled function.

    Raises:
        PolicyError: the policy is wrong.
        OptionsError: an unknown or mistyped option or mode; or ``model`` is a class, or neither a module nor a
            function.
    """
    for name, value, known in (("dynamic", dynamic, (None, True, False)), ("fullgraph", fullgraph, (True, False))):
        if not any(value is one for one in known):
            raise OptionsError(f"option {name}: expected {' or '.join(map(str, known))}, got {shown(value)}")
    backend = kvquant(
        policy=policy, on_unsupported=on_unsupported, verify=verify, merge_projections=merge_projections, mode=mode,
        **inductor_options,
    )  # fmt: skip
    compiled = partial(_compile, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    return compiled if model is None else compiled(model)


def _compile(model: Any, **how: Any) -> Any:
    check_callable(model, "compile")
    if not isinstance(model, nn.Module):
        return torch.compile(model, **how)
    generative = generative_models(model)
    if generative and how["backend"].options.shard is not None:
        raise OptionsError(
            "option context_parallel: generate() reads prompts in eager code, which ranks cannot split; compile the "
            "calls with torch.compile(model, backend=kvcompile.kvquant(context_parallel=...))"
        )
    uncompile(model)
    if not generative:
        model.compile(**how)
    outer = None
    for decoder in generative:
        generation = Generation(decoder, outer=outer, **how)
        outer = generation if decoder is model else outer
    return model


def uncompile(model: nn.Module) -> nn.Module:
    """Undo :func:`compile` of a module, in place: calls run eagerly, and Transformers alone runs ``generate()``.

    Caches that were passed to the model stay packed. The memory that was kept for the next request is freed.

    Args:
        model: a module, compiled or not.

    Returns:
        ``model``.

    Raises:
        OptionsError: ``model`` is no module. A function is not changed by :func:`compile`, which returns another one.
    """
    check_made(model, "uncompile")
    if not isinstance(model, nn.Module):
        raise OptionsError(
            f"uncompile: expected a module, got {type(model).__name__}; to run a function in eager code, call the "
            "function that was given to compile"
        )
    for compiled in {*generative_models(model), model}:
        generation = Generation.of(compiled)
        if generation is not None:
            generation.remove()
        drop_compiled_call(compiled)
    return model
