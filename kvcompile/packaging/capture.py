"""Capture the rewritten graph of a step and its input tensors before anything runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kvcompile.backend import ConfiguredBackend
from kvcompile.call.adoption import AdoptionError
from kvcompile.compat.backends import ensure_registered, error_of_backend
from kvcompile.compilation.graph_compiler import compile_graph
from kvcompile.errors import KVCompileError, PackageError
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.packaging.launches import inline_operators, operators_in_python
from kvcompile.packaging.signature import InputKind, StepInput, TensorType
from kvcompile.passes.calling import InputAction, Rewritten
from kvcompile.passes.graph.aten import replace_views_by_reshapes
from kvcompile.passes.graph.names import in_words
from kvcompile.passes.packing import Packing
from kvcompile.passes.rewrite.caches import is_mutated
from kvcompile.policy.policy import PolicySpec


@dataclass(frozen=True)
class Captured:
    """A rewritten graph and its inputs.

    Attributes:
        graph: takes ``tensors``.
        tensors: the tensors of one call, in the order of the graph's inputs.
        inputs: the description of each tensor; None for a constant, which the package holds.
        layouts: the layouts of the caches, by the names of their inputs.
    """

    graph: GraphModule
    tensors: tuple[Tensor, ...]
    inputs: tuple[StepInput | None, ...]
    layouts: dict[str, PackedLayout]


class _Stop(BaseException):
    """Raised to leave the compiled call before its first operation."""


class _CapturingBackend(ConfiguredBackend):
    """Packs a graph as ``kvquant`` does. A call of the compiled code only records the graph and its tensors.

    Attributes:
        packing: the packing of the graph of the last call; None before a call.
        tensors: the tensors of that call.
    """

    def __init__(self, policy: PolicySpec) -> None:
        super().__init__(options={"policy": policy, "on_unsupported": "error"})
        self.packing: Packing | None = None
        self.tensors: list[Any] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        ensure_registered(self, f"package {self!r}")
        return compile_graph(gm, example_inputs, self.options, self._stopping_code)

    def _stopping_code(self, packing: Packing | None) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            self.packing, self.tensors = packing, list(args)
            raise _Stop

        def stop(*_: Any) -> Any:
            raise _Stop

        return stop if packing is None else run

    def forget(self) -> None:
        """Drop the graph, because Dynamo's registry keeps this backend alive."""
        self.packing, self.tensors = None, []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CapturingBackend) and self.options == other.options

    __hash__ = ConfiguredBackend.__hash__


def capture(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], policy: PolicySpec) -> Captured:
    """The rewritten graph of ``model(*args, **kwargs)``. The call ends before it computes or changes anything.

    Copies of plain caches are packed, as the first call of a compiled model packs the caches themselves.

    Raises:
        UnsupportedSiteError: attention on a cache cannot be packed.
        PackageError: there is no attention on a cache, or a package cannot hold the step.
    """
    backend = _CapturingBackend(policy)
    compiled = torch.compile(_fresh_function(model), backend=backend, fullgraph=True, dynamic=False)
    try:
        with torch.no_grad():
            compiled(**_by_name(model, args, kwargs))
    except _Stop:
        pass
    except AdoptionError as error:
        raise PackageError(f"the step cannot be packaged: {error}") from error
    except Exception as error:
        own = error_of_backend(error)
        if isinstance(own, KVCompileError):
            raise own from None
        raise
    packing, tensors = backend.packing, backend.tensors
    backend.forget()
    if packing is None:
        raise PackageError("the step has no attention on a KV cache; torch.export packages such a step")
    assert packing.rewritten is not None, "only rewritten graphs get code"
    _check(packing.rewritten, tensors)
    if tensors[0].is_cuda:
        inline_operators(packing.gm, packing.rewritten)
    if operators := operators_in_python(packing.gm):
        raise PackageError(f"the step calls {operators[0]}, whose implementation is Python; torch.compile runs it")
    constants = _constants_of(model)
    inputs = tuple(_input(packing, place, tensor, constants) for place, tensor in enumerate(tensors))
    found = {action.index: action.layout for action in packing.rewritten.inputs}
    layouts = {one.name: found[place] for place, one in enumerate(inputs) if one is not None and place in found}
    replace_views_by_reshapes(packing.gm)
    return Captured(packing.gm, tuple(tensors), inputs, layouts)


def _fresh_function(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``model``, with a new code object.

    Dynamo stores compiled code on the code object. With its own code object, a captured step is not reused, and does
    not count toward the recompile limit of the model.
    """

    def step(**kwargs: Any) -> Any:
        return model(**kwargs)

    return FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)


def _by_name(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by their names, which become the names of the package's inputs."""
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise PackageError(f"the arguments do not fit the model: {error}") from None
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise PackageError(
                f"the model takes {name!r} by position only; wrap it in a module whose forward names its arguments"
            )
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def _check(rewritten: Rewritten, args: Sequence[Any]) -> None:
    """Raise PackageError if a call of the graph needs work that the caller of a package cannot do."""
    moving = next((action.kind for action in rewritten.inputs if action.kind not in ("static", "read-only")), None)
    if rewritten.outputs or moving is not None:
        raise PackageError(
            f"the step makes new caches ({moving or 'returned'}); package a step with caches of a fixed size, such as "
            "kvcompile.static_cache or buffers of the model"
        )
    if any(action.layout.format.is_calibrated for action in rewritten.inputs):
        raise PackageError(
            "the step has a cache in a calibrated format, whose products with matrices run in Python; choose another "
            "policy"
        )
    if rewritten.stacks:
        raise PackageError("the step takes several caches in one tensor; package a step with a tensor for each cache")
    for number in args:
        if not isinstance(number, Tensor):
            raise PackageError(f"the step takes the number {number!r} as an argument; pass a tensor")
        if number.device.type not in ("cpu", "cuda") or (number.is_cuda and torch.version.hip is not None):
            raise PackageError(f"the step runs on {number.device}; packages run on CPUs and on NVIDIA GPUs")
        if number.device != args[0].device:
            raise PackageError(f"the step takes tensors on {args[0].device} and on {number.device}; use one device")


def _constants_of(model: Callable[..., Any]) -> set[int] | None:
    """The addresses of the plain parameters and buffers of a module, or of the module whose method ``model`` is.

    None for another function: a package of it has no constants.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(module, nn.Module):
        return None
    tensors = (*module.parameters(), *module.buffers())
    return {one.data_ptr() for one in tensors if type(one) in (Tensor, nn.Parameter)}


_PREFIX = re.compile(r"^(?:kwargs\['(\w+)'\]|model\.__self__\.|model\.)")


def _input(packing: Packing, place: int, tensor: Tensor, constants: set[int] | None) -> StepInput | None:
    """The description of an input; None for a constant of the package."""
    assert packing.rewritten is not None
    full_name = in_words(packing.inputs[place].source) or packing.inputs[place].source
    name, is_argument = _PREFIX.sub(r"\1", full_name), full_name.startswith("kwargs[")
    action = next((action for action in packing.rewritten.inputs if action.index == place), None)
    if action is not None:
        return _cache(name, tensor, action, may_be_constant=constants is not None and not is_argument)
    kind: InputKind = "state" if is_mutated(packing.placeholders[place]) else "argument"
    if kind == "argument" and constants is not None and tensor.data_ptr() in constants:
        return None
    if kind == "argument" and constants is None and not is_argument:
        raise PackageError(f"the step reads {name}, which is not an argument; package the module that holds it")
    if kind == "state" and tensor.any():
        raise PackageError(f"{name} {_NOT_ZERO}")
    return StepInput(name, kind, TensorType.of(tensor))


_NOT_ZERO = "is not zero: a packaged step begins with zeros; package it with a fresh cache"


def _cache(name: str, data: Tensor, action: InputAction, *, may_be_constant: bool) -> StepInput | None:
    """The description of a cache with packed ``data``; None if it becomes a constant."""
    layout = action.layout
    if not _is_empty(data, layout):
        is_read_only = action.kind == "read-only"
        if is_read_only and may_be_constant:
            return None
        or_constant = ", or make it a constant: a buffer of the packaged module" if is_read_only else ""
        raise PackageError(f"{name} {_NOT_ZERO}{or_constant}")
    num_tokens = layout.token_blocks(data) * BLOCK_TOKENS
    return StepInput(name, "cache", TensorType.of(data), layout.format_name, layout.role, layout.head_dim, num_tokens)


def _is_empty(data: Tensor, layout: PackedLayout) -> bool:
    """Whether a packed cache holds zeros only. In some formats the scale of a vector of zeros is not a zero byte."""
    return not data.any() or not dequantized(data, layout).any()


def dequantized(data: Tensor, layout: PackedLayout) -> Tensor:
    """All vectors of a packed cache, float32 [batch, num_kv_heads, num_tokens, head_dim]."""
    num_tokens = layout.token_blocks(data) * BLOCK_TOKENS
    found = torch.ops.kvcompile.dequantize(data, num_tokens, torch.float32, layout.spec, layout.role, layout.head_dim)
    assert isinstance(found, Tensor)
    return found
