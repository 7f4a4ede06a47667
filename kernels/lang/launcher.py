"""What launching any Triton kernel takes: compiled versions that are found fast, and what is known of a device."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.lang.triton import INTERPRETED

# Triton leaves assertions out of kernels without ``debug``, which would also check every integer sum for overflow.
ASSERTING = {"debug": True, "sanitize_overflow": False}


class Launcher:
    """Launches one Triton kernel, and remembers its compiled versions.

    Triton looks for the compiled version anew at every launch, with some 15 us of Python. The key here is shorter: the
    kernels name every integer that is no stride as ``do_not_specialize``, so that a version depends only on constants,
    on the dtypes and the alignment of tensors, and on which strides are 1 or divisible by 16.
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
        """Run the kernel; its parameters are ``tensors``, ``strides``, ``numbers`` and ``constants``, in this order."""
        device = tensors[0].device
        key = (
            device,
            *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors],
            *[_stride_classes(stride) for stride in strides],
            constants,
        )
        arguments = (*tensors, *strides, *numbers, *constants)
        # Triton launches on the current device: make it the one of the tensors.
        with contextlib.nullcontext() if INTERPRETED else torch.cuda.device(device):
            compiled = self.compiled.get(key)
            if compiled is None:
                self.compiled[key] = self.kernel[grid](*arguments, **options)
            else:
                compiled[grid](*arguments)


@functools.lru_cache(maxsize=4096)
def _stride_classes(strides: tuple[int, ...]) -> tuple[tuple[bool, bool, bool], ...]:
    """What Triton specializes a kernel for, of every stride: whether it is 1, divisible by 16, and wider than int32."""
    return tuple((stride == 1, stride % 16 == 0, stride >= 2**31) for stride in strides)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def capability_of(device: torch.device) -> int:
    """The major compute capability, and so whose inline PTX can run; 0 where none can: on AMD, in the interpreter."""
    if INTERPRETED or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_properties(device).major


@functools.cache
def num_sms_of(device: torch.device) -> int:
    """Streaming multiprocessors; two in the interpreter."""
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def early_start(device: torch.device) -> dict[str, Any]:
    """The launch options of a kernel that may start before the one before it has ended, and waits for that itself;
    empty before Hopper (programmatic dependent launch, which CUDA graphs keep)."""
    return {"launch_pdl": True} if capability_of(device) >= 9 else {}


def precision(device: torch.device) -> str:
    """How products of float32 are computed: in three parts on NVIDIA's tensor cores, or as they are."""
    return "tf32x3" if capability_of(device) else "ieee"


def blocks_per_program(rotated: bool, num_blocks: int, pairs: int, device: torch.device) -> int:
    """Blocks of a pair (a KV head of a sequence) that a program stores or dequantizes one after the other.

    Several if it makes a rotation matrix first (``rotated``); and a grid has at most 65535 programs in its second
    dimension.
    """
    at_once = num_blocks * pairs // (8 * num_sms_of(device)) if rotated else 1
    return max(1, min(16, at_once), ceil_div(num_blocks, 65535))
