"""Launching Triton kernels: a fast lookup of compiled versions, and the properties of a device that launches need."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.lang.triton import INTERPRETED

# ``debug`` compiles the assertions of a kernel. It would also check every integer sum for overflow, unless told not to.
ASSERTING = {"debug": True, "sanitize_overflow": False}


_COMPILING_ONLY = ContextVar("compiling_only", default=False)


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """A block in which launches of this thread only compile their kernels. Their tensors may be fake tensors."""
    token = _COMPILING_ONLY.set(True)
    try:
        yield
    finally:
        _COMPILING_ONLY.reset(token)


class _Argument:
    """The description of a fake tensor for which Triton compiles: its dtype, and an aligned address."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


class Launcher:
    """Launches one Triton kernel, and remembers its compiled versions.

    Triton looks up the compiled version at every launch, in about 15 us of Python. The key here is shorter. Kernels
    list every integer argument except strides in ``do_not_specialize``; then a version depends only on the constants,
    the dtypes and alignment of the tensors, and which strides are 1, divisible by 16 or wider than int32.

    Threads that need the same version at the same time compile it once.

    Args:
        kernel: a function made by :func:`kvcompile.kernels.lang.triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, Any] = {}
        self._locks: dict[tuple, threading.Lock] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        strides: tuple[tuple[int, ...], ...],
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        """Run the kernel, whose parameters are ``tensors``, ``strides``, ``numbers`` and ``constants``, in this order.

        Args:
            grid: numbers of programs.
            tensors: all on one device, on which the kernel runs.
            strides: tuples of int.
            numbers: int and float arguments, which the kernel must not specialize on.
            constants: compile-time arguments, hashable.
            options: Triton's launch options, such as ``num_warps``; equal for equal ``constants``.
        """
        device, compiles_only = tensors[0].device, _COMPILING_ONLY.get()
        key = (
            device,
            *[(tensor.dtype, compiles_only or tensor.data_ptr() % 16 == 0) for tensor in tensors],
            *[_stride_classes(stride) for stride in strides],
            constants,
        )
        others = (*strides, *numbers, *constants)
        with _current(device):
            compiled = self.compiled.get(key)
            if compiled is not None:
                if not compiles_only:
                    compiled[grid](*tensors, *others)
                return
            with self._locks.setdefault(key, threading.Lock()):
                if compiles_only:
                    described = [_Argument(tensor.dtype) for tensor in tensors]
                    self.compiled[key] = self.kernel.warmup(*described, *others, grid=grid, **options)
                elif (compiled := self.compiled.get(key)) is not None:  # another thread has just compiled it
                    compiled[grid](*tensors, *others)
                else:
                    self.compiled[key] = self.kernel[grid](*tensors, *others, **options)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``device`` is the current device, on which Triton launches."""
    if INTERPRETED or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.lru_cache(maxsize=4096)
def _stride_classes(strides: tuple[int, ...]) -> tuple[tuple[bool, bool, bool], ...]:
    """The properties of each stride that Triton compiles for: whether it is 1, divisible by 16, wider than int32."""
    return tuple((stride == 1, stride % 16 == 0, stride >= 2**31) for stride in strides)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def capability_of(device: torch.device) -> int:
    """The major compute capability, which decides on inline PTX; 0 on AMD and in the interpreter, which run no PTX."""
    if INTERPRETED or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_properties(device).major


@functools.cache
def num_sms_of(device: torch.device) -> int:
    """The number of streaming multiprocessors; 2 in the interpreter."""
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """The most bytes of shared memory that a program may have; as much as on Hopper in the interpreter."""
    if INTERPRETED:
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block


@functools.cache
def why_unsupported(device: torch.device) -> str | None:
    """Why kernels do not run on a device; None if they do, or if the device is not in this machine."""
    if device.type != "cuda" or INTERPRETED or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    if properties.major >= 8:
        return None
    return f"{properties.name} has compute capability {properties.major}.{properties.minor}, and kernels need 8.0"


def early_start(device: torch.device) -> dict[str, Any]:
    """Launch options that let a kernel start before the previous one has ended (programmatic dependent launch).

    The kernel itself must wait for the results of the previous one. CUDA graphs keep the option. Empty before Hopper.
    """
    return {"launch_pdl": True} if capability_of(device) >= 9 else {}


def precision(device: torch.device) -> str:
    """The ``input_precision`` of float32 products: three tf32 products on NVIDIA's tensor cores, else full float32."""
    return "tf32x3" if capability_of(device) else "ieee"


def exact_precision(device: torch.device, *, float32: bool) -> str:
    """The ``input_precision`` of float32 products whose operands came from half precision, unless ``float32``."""
    full = precision(device)
    return "tf32" if full == "tf32x3" and not float32 else full


def blocks_per_program(rotated: bool, num_blocks: int, pairs: int, device: torch.device) -> int:
    """How many blocks of tokens one program stores or dequantizes, one after the other.

    A program that makes a rotation matrix first (``rotated``) takes up to 16 blocks, as long as the device stays busy.
    Others take one, or more where the second dimension of the grid would exceed its limit of 65535 programs.

    Args:
        rotated: whether the format is rotated.
        num_blocks: blocks of a pair.
        pairs: KV heads of all sequences.
        device: on which the kernel runs.
    """
    at_once = num_blocks * pairs // (8 * num_sms_of(device)) if rotated else 1
    return max(1, min(16, at_once), ceil_div(num_blocks, 65535))
