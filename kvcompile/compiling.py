"""``compile``: one line that compiles a model and prepares its ``generate()``; ``uncompile`` undoes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn

from kvcompile.backend import kvquant
from kvcompile.generation import Generation, is_generative
from kvcompile.policy.policy import OnUnsupported, PolicySpec

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


@overload
def compile(
    model: Compiled,
    *,
    policy: PolicySpec = None,
    on_unsupported: OnUnsupported | None = None,
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
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **inductor_options: Any,
) -> Any:
    """Compile a model or function so that its KV cache is packed; prepare ``generate()`` of a Transformers model.

    A module is compiled in place, as ``model.compile(backend=kvquant(...))`` does it, and returned. A function is left
    as it is, and the compiled one returned. Without ``model``, a decorator is returned.

    After it, ``generate()`` of a decoder of Transformers, and a pipeline with it, take a cache that is packed from the
    start, so that a plain one never exists; the next request uses its memory again. The prompt is read by eager code,
    as without compilation, and decode steps are compiled, on CPUs too; on GPUs they are CUDA graphs unless ``mode`` is
    given. A cache that the caller passes is used as it is, with more room if it is packed and needs it.

    Args:
        model: a module or function; None for a decorator.
        policy: what :meth:`Policy.load` takes.
        on_unsupported: what happens to attention that cannot be packed: ``error``, ``warn`` or ``ignore``; by default
            what the policy says.
        mode: a ``torch.compile`` mode.
        dynamic: see ``torch.compile``.
        fullgraph: see ``torch.compile``.
        inductor_options: Inductor configuration keys, which override the settings of the mode; names with dots in a
            dict, as ``options={"triton.cudagraphs": True}``.

    Returns:
        ``model`` itself if it is a module, else the compiled function.

    Raises:
        PolicyError: the policy is wrong.
        OptionsError: an unknown or mistyped option or mode.
    """
    backend = kvquant(policy=policy, on_unsupported=on_unsupported, mode=mode, **inductor_options)
    compiled = partial(_compile, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    return compiled if model is None else compiled(model)


def _compile(model: Any, **how: Any) -> Any:
    if not isinstance(model, nn.Module):
        return torch.compile(model, **how)
    uncompile(model)
    if is_generative(model):
        Generation(model, **how)
    else:
        model.compile(**how)
    return model


def uncompile(model: nn.Module) -> nn.Module:
    """Undo :func:`compile` of a module, in place: calls run eagerly, ``generate()`` is that of Transformers.

    Caches that the model was called with stay packed. The memory that was kept for the next request is freed.

    Args:
        model: a module, compiled or not.

    Returns:
        ``model``.
    """
    generation = Generation.of(model)
    if generation is not None:
        generation.remove()
    model._compiled_call_impl = None
    return model
