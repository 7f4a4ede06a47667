"""What launching any Triton kernel takes: compiled versions that are found fast, and what is known of a device."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.codec import INTERPRETED

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
def facts_of(device: torch.device) -> tuple[int, int, bool]:
    """Major compute capability, streaming multiprocessors, whether inline PTX can run. The interpreter has two SMs."""
    if INTERPRETED:
        return 0, 2, False
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count, torch.version.hip is None


def early_start(device: torch.device) -> dict[str, Any]:
    """The launch options of a kernel that may start before the one before it has ended, and waits for that itself;
    empty before Hopper (programmatic dependent launch, which CUDA graphs keep)."""
    capability, _, has_ptx = facts_of(device)
    return {"launch_pdl": True} if has_ptx and capability >= 9 else {}


def precision(has_ptx: bool) -> str:
    """How products of float32 are computed: in three parts on NVIDIA's tensor cores, or as they are."""
    return "tf32x3" if has_ptx else "ieee"
