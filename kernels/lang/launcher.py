"""Launching Triton kernels: a fast lookup of compiled versions, and the properties of a device that launches need."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.lang.triton import INTERPRETED

# ``debug`` compiles the assertions of a kernel. It would also check every integer sum for overflow, unless told not to.
ASSERTING = {"debug": True, "sanitize_overflow": False}


class Launcher:
    """Launches one Triton kernel, and remembers its compiled versions.

    Triton looks up the compiled version at every launch, in about 15 us of Python. The key here is shorter. Kernels
    list every integer argument except strides in ``do_not_specialize``; then a version depends only on the constants,
    the dtypes and alignment of the tensors, and which strides are 1, divisible by 16 or wider than int32.

    Args:
        kernel: a function made by :func:`kvcompile.kernels.lang.triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, Any] = {}

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
        device = tensors[0].device
        key = (
            device,
            *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors],
            *[_stride_classes(stride) for stride in strides],
            constants,
        )
        arguments = (*tensors, *strides, *numbers, *constants)
        # Triton launches on the current device: make it the device of the tensors.
        with contextlib.nullcontext() if INTERPRETED else torch.cuda.device(device):
            compiled = self.compiled.get(key)
            if compiled is None:
                self.compiled[key] = self.kernel[grid](*arguments, **options)
            else:
                compiled[grid](*arguments)


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
