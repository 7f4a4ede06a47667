"""Load a packaged step and call it from Python, without the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvcompile.compat.inductor import aoti_load_metadata, aoti_load_package
from kvcompile.errors import PackageError, cut, did_you_mean, one_line
from kvcompile.packaging.launches import load_operator
from kvcompile.packaging.signature import Signature, StepInput, TensorType

_FAILURES = ("out of bounds", "API call failed")
"""Texts in the error of a package whose index is out of bounds. PyTorch 2.11 has the second, which hides the cause."""


class PackagedStep:
    """A step of a model from a package.

    Attributes:
        path: the file.
        signature: its inputs and outputs.
    """

    def __init__(self, path: Path, loaded: Any, signature: Signature) -> None:
        self.path = path
        self.signature = signature
        self._loaded = loaded

    @property
    def cache_nbytes(self) -> int:
        """The bytes of all packed caches."""
        return sum(one.type.nbytes for one in self.signature.of_kind("cache"))

    def new_caches(self) -> dict[str, Tensor]:
        """Empty caches and other state of the step, by name: zeros that the caller passes to every step."""
        return {one.name: one.type.zeros(self.signature.device) for one in self.signature.of_kind("cache", "state")}

    def __call__(self, arguments: Mapping[str, Tensor], caches: Mapping[str, Tensor]) -> list[Tensor]:
        """Run the step. It changes ``caches`` in place.

        Args:
            arguments: the arguments of this step by name, with the dtypes and shapes of the signature.
            caches: the result of :meth:`new_caches` of this package, or of another package with equal caches.

        Returns:
            The outputs, such as the logits.

        Raises:
            PackageError: a tensor is missing, unknown, or has another dtype, shape or device; or the code failed,
                usually because of a position past the end of a cache. AOTInductor also prints a trace then.
        """
        given = {**caches, **arguments}
        known = {one.name for one in self.signature.inputs}
        for name in given:
            if name not in known:
                raise PackageError(f"{self.path.name} has no input {name!r}{did_you_mean(name, known)}")
        inputs = [self._checked(one, given.get(one.name)) for one in self.signature.inputs]
        try:
            return list(self._loaded(*inputs))
        except RuntimeError as error:
            if not any(text in str(error) for text in _FAILURES):
                raise
            raise PackageError(self._explained(error)) from None  # the error has a trace of the C++ stack

    def _explained(self, error: RuntimeError) -> str:
        sizes = sorted({one.num_tokens for one in self.signature.of_kind("cache")})
        cause, _, _ = str(error).partition("\n")
        hold = f", which hold {' or '.join(map(str, sizes))} tokens" if sizes else ""
        return f"{self.path.name} failed: {cut(cause)}; the usual cause is a position past the end of its caches{hold}"

    def _checked(self, one: StepInput, tensor: Tensor | None) -> Tensor:
        """``tensor``, after a check of its type. The compiled code does not check it."""
        if tensor is None:
            how = "arguments" if one.kind == "argument" else "caches, as new_caches() makes it"
            raise PackageError(f"{self.path.name} needs the {one.kind} {one.name!r}; pass it in {how}")
        found, device = TensorType.of(tensor), self.signature.device
        if found != one.type or tensor.device.type != device or not tensor.is_contiguous():
            strided = "" if tensor.is_contiguous() else "strided "
            raise PackageError(
                f"{self.path.name} takes {one.name!r} as contiguous {one.type.dtype} {list(one.type.shape)} on "
                f"{device}, not as {strided}{found.dtype} {list(found.shape)} on {tensor.device}"
            )
        return tensor

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.signature.of_kind("argument"))
        return f"PackagedStep({str(self.path)!r}: {names}; {len(self.signature.of_kind('cache'))} caches)"


def load_package(path: str | os.PathLike[str]) -> PackagedStep:
    """Load the package that :func:`kvcompile.package` wrote. A package holds machine code: load only files you trust.

    Args:
        path: the ``.pt2`` file.

    Returns:
        The step without caches, which :meth:`PackagedStep.new_caches` makes.

    Raises:
        PackageError: the file is missing, or is not a package of kvcompile.
    """
    file = Path(path)
    if not file.is_file():
        raise PackageError(f"{file} is not a file; kvcompile.package writes one")
    signature = Signature.read(_loaded(aoti_load_metadata, file))
    if signature.device == "cuda":
        load_operator()
    return PackagedStep(file, _loaded(aoti_load_package, file), signature)


def _loaded(load: Callable[[str], Any], file: Path) -> Any:
    try:
        return load(str(file))
    except Exception as error:
        raise PackageError(f"{file} is not a package of AOTInductor: {one_line(error)}; package it again") from error
