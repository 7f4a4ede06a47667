"""Package a decode step or a prompt step with packed caches, as code that runs without Python."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from kvcompile.compat.inductor import aoti_compile_and_package
from kvcompile.errors import PackageError, check_callable
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.packaging.capture import Captured, capture, dequantized
from kvcompile.packaging.launches import operators_in_python, pass_masks_as_they_are, tracing_launches
from kvcompile.packaging.load import PackagedStep, load_package
from kvcompile.packaging.signature import Signature, TensorType
from kvcompile.policy.policy import PolicySpec

MAX_ERROR = 1e-2
"""The largest allowed relative error of the outputs of a package in float32, which sums in another order."""

MAX_ROUNDING_ERROR = 0.1
"""The same in half precision, and the largest allowed relative error of the vectors in caches. A difference in the
last bits of a vector may change a code by one. At 4 bits or less, this is a tenth of the vector's largest number."""


def package(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: PolicySpec = None,
    path: str | os.PathLike[str],
) -> PackagedStep:
    """Compile one step of ``model`` ahead of time, with packed caches as plain byte tensors that the caller owns.

    The package is AOTInductor's: a ``.pt2`` file that holds code and weights. It runs in C++
    (``AOTIModelPackageLoader``) and in Python, in a process that imports neither kvcompile nor the model. Its metadata
    describe all inputs (:mod:`kvcompile.packaging.signature`, docs/packages.md).

    A package serves only the shapes of ``args`` and ``kwargs``. A step of another length needs its own package.
    Packages that were made with equal caches can share them, such as a package for the prompt and a package for decode
    steps.

    Args:
        model: a module, a method of a module, or a function that reads only its arguments, on a CPU or an NVIDIA GPU.
            Its caches have a fixed size: buffers of the module, or arguments, such as :func:`kvcompile.static_cache`.
            They must be empty, and stay as they are. A cache of the module that the step only reads may have content;
            it is then a constant of the package.
        args: the arguments of one step by position.
        kwargs: the arguments of one step by name.
        policy: preset name, path, dict or Policy; the default policy if it is None.
        path: the file to write, ending in ``.pt2``. A file of this name is replaced once the package has been checked.

    Returns:
        The package, loaded from the file and checked: two of its steps from empty caches equal two steps of the graph.

    Raises:
        PolicyError: the policy is wrong.
        OptionsError: ``model`` is a class, or neither a module nor a function.
        UnsupportedSiteError: some attention on a cache cannot be packed.
        PackageError: a package cannot hold the step, or the compiled code differs from the graph.
    """
    check_callable(model, "package")
    target = Path(path)
    if target.suffix != ".pt2":
        raise PackageError(f"{target.name!r} is not a valid name of a package; AOTInductor needs the suffix .pt2")
    if not target.parent.is_dir():
        raise PackageError(f"{target.parent} is not a folder; make it first")
    step = _Step(capture(model, args, kwargs or {}, policy))
    tensors = step.own_inputs()
    with torch.no_grad():
        expected = step(*(one.clone() for one in tensors))
        outputs = tuple(TensorType.of(output) for output in expected)
        signature = Signature(step.signature, outputs, device=tensors[0].device.type)
        exported = _export(step, tensors)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            aoti_compile_and_package(exported, str(made), signature.metadata())
            result = load_package(made)
            _check(step, result)
            made.replace(target)
    result.path = target
    return result


def _export(step: _Step, tensors: list[Tensor]) -> ExportedProgram:
    """The step as operators that AOTInductor compiles; on a GPU with launches in place of operators of kvcompile."""
    if not tensors[0].is_cuda:
        return torch.export.export(step, tuple(tensors), strict=False)
    with tracing_launches():
        exported = torch.export.export(step, tuple(tensors), strict=False)
    assert not operators_in_python(exported.graph_module)
    pass_masks_as_they_are(exported.graph_module)
    return exported


class _Step(nn.Module):
    """The captured graph with the constants of the model. It takes all other inputs, and returns a tuple."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.graph = captured.graph
        self.layouts = captured.layouts
        self.signature = tuple(one for one in captured.inputs if one is not None)
        self._tensors = captured.tensors
        self._names: list[str | None] = []
        for place, (tensor, one) in enumerate(zip(captured.tensors, captured.inputs, strict=True)):
            self._names.append(None if one is not None else f"constant_{place}")
            if one is None:
                self.register_buffer(f"constant_{place}", tensor.detach())

    @property
    def is_in_half_precision(self) -> bool:
        return any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in self._tensors)

    def own_inputs(self) -> list[Tensor]:
        """The tensors of the captured call that are not constants, made contiguous."""
        return [tensor.contiguous() for tensor, name in zip(self._tensors, self._names, strict=True) if name is None]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = iter(inputs)
        return tuple(self.graph(*(next(given) if name is None else getattr(self, name) for name in self._names)))


def _check(step: _Step, made: PackagedStep) -> None:
    """Run two steps of the package and of the graph, from empty caches, with the arguments of the captured call.

    If the lengths of the caches are state, the second step begins where the first has ended, or at the start if the
    caches have no room for it.

    Raises:
        PackageError: an output, a cache or another state differs.
    """
    own = {one.name: tensor for one, tensor in zip(step.signature, step.own_inputs(), strict=True)}
    arguments = {one.name: own[one.name] for one in made.signature.of_kind("argument")}
    caches = made.new_caches()
    expected = {name: tensor.clone() for name, tensor in caches.items()}
    max_error = MAX_ROUNDING_ERROR if step.is_in_half_precision else MAX_ERROR
    for _ in range(2):
        wanted = step(*({**arguments, **expected}[one.name] for one in step.signature))
        outputs = made(arguments, caches)
        for place, (output, right) in enumerate(zip(outputs, wanted, strict=True)):
            error = _relative_error(output, right)
            if not error <= max_error:
                raise PackageError(
                    f"output {place} of the package differs from the graph's by {error:.1e}; report this as a fault of "
                    "kvcompile"
                )
        for name, state in caches.items():
            if not _is_near(state, expected[name], step.layouts.get(name)):
                raise PackageError(
                    f"the package and the graph store different numbers in {name}; report this as a fault of kvcompile"
                )
        _begin_again_if_full(step, [caches, expected])


def _begin_again_if_full(step: _Step, states: list[dict[str, Tensor]]) -> None:
    """Set the lengths of caches to zero if the caches have no room for as many tokens again."""
    own = states[0]
    sizes = (layout.token_blocks(own[name]) * BLOCK_TOKENS for name, layout in step.layouts.items())
    capacity = min(sizes, default=0)
    lengths = [name for name in own if name not in step.layouts]
    if any(2 * own[name].max().item() > capacity for name in lengths):
        for state in states:
            for name in lengths:
                state[name].zero_()


def _is_near(state: Tensor, right: Tensor, layout: PackedLayout | None) -> bool:
    """Whether states are equal, and the vectors of caches nearly equal."""
    if layout is None:
        return torch.equal(state, right)
    return _relative_error(dequantized(state, layout), dequantized(right, layout)) <= MAX_ROUNDING_ERROR


def _relative_error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30))
