"""Launching Triton kernels: a fast lookup of compiled versions, and the properties of a device that launches need."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcompile.compat.triton_names import compiled_version, gdc_wait
from kvcompile.kernels.lang.triton import INTERPRETED

# ``debug`` compiles the assertions of a kernel. It would also check every integer sum for overflow, unless told not to.
ASSERTING = {"debug": True, "sanitize_overflow": False}


class Launch(NamedTuple):
    """A launch of a compiled kernel.

    Attributes:
        compiled: Triton's compiled kernel.
        grid: numbers of programs.
        tensors: the tensors, which are the first parameters. They may be fake tensors.
        aligned: for each tensor, whether the kernel relies on an address that is divisible by 16.
        others: the other parameters: tuples of strides, numbers, and constants.
        writes: the names of the parameters whose tensors the kernel writes.
    """

    compiled: Any
    grid: tuple[int, int, int]
    tensors: tuple[Tensor, ...]
    aligned: tuple[bool, ...]
    others: tuple[Any, ...]
    writes: tuple[str, ...]


_INSTEAD: ContextVar[Callable[[Launch], None] | None] = ContextVar("instead_of_launching", default=None)


@contextlib.contextmanager
def instead_of_launching(act: Callable[[Launch], None]) -> Iterator[None]:
    """Inside the ``with`` block, launches of this thread compile kernels, and call ``act`` instead of the kernels."""
    token = _INSTEAD.set(act)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def launches_nothing() -> bool:
    """Whether this thread is in a block of :func:`instead_of_launching`."""
    return _INSTEAD.get() is not None


def compiling_only() -> contextlib.AbstractContextManager[None]:
    """Inside the ``with`` block, launches of this thread only compile their kernels. Their tensors may be fake."""
    return instead_of_launching(lambda launch: None)


class _Argument:
    """The description of a fake tensor for which Triton compiles: its dtype, and an address with its alignment."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = _address_of(tensor) % 16

    def data_ptr(self) -> int:
        return self._address


PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""The types of tensors that have an address in memory, in contrast to fake tensors and other subclasses."""


def _address_of(tensor: Tensor) -> int:
    """The address of a tensor. The address of a fake tensor is its offset in its storage, which is aligned."""
    if type(tensor) in PLAIN_TENSORS:
        return tensor.data_ptr()
    return int(tensor.storage_offset()) * tensor.element_size()


class Launcher:
    """Launches one Triton kernel, and remembers its compiled versions.

    Triton looks up the compiled version at every launch, in about 15 us of Python. The key here is shorter. Kernels
    list every integer argument except strides in ``do_not_specialize``. A version then depends only on the constants,
    the dtypes and alignment of the tensors, and which strides are 1, divisible by 16 or wider than int32.

    Threads that need the same version at the same time compile it once.

    Args:
        kernel: a function made by :func:`kvcompile.kernels.lang.triton.jit`.
        writes: the names of the parameters whose tensors it writes.
    """

    def __init__(self, kernel: Any, writes: tuple[str, ...] = ()) -> None:
        self.kernel = kernel
        self.writes = writes
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
        device, act = tensors[0].device, _INSTEAD.get()
        aligned = [_address_of(tensor) % 16 == 0 for tensor in tensors]
        dtypes = [tensor.dtype for tensor in tensors]
        key = (device, *dtypes, *aligned, *[_stride_classes(stride) for stride in strides], constants)
        others = (*strides, *numbers, *constants)
        with _current(device):
            compiled = self.compiled.get(key)
            if act is not None:
                compiled = compiled or self._compile(key, grid, tensors, others, options)
                act(Launch(compiled, grid, tensors, tuple(aligned), others, self.writes))
            elif compiled is not None:
                compiled[grid](*tensors, *others)
            else:
                self._compile_and_launch(key, grid, tensors, others, options)

    def _compile_and_launch(
        self, key: tuple, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], others: tuple[Any, ...], options: Any
    ) -> None:
        with self._locks.setdefault(key, threading.Lock()):
            compiled = self.compiled.get(key)
            if compiled is not None:  # another thread has just compiled it
                compiled[grid](*tensors, *others)
            else:
                self.compiled[key] = self.kernel[grid](*tensors, *others, **options)

    def _compile(
        self, key: tuple, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], others: tuple[Any, ...], options: Any
    ) -> Any:
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self.compiled:
                described = [_Argument(tensor) for tensor in tensors]
                self.compiled[key] = compiled_version(self.kernel, (*described, *others), grid, options)
            return self.compiled[key]


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


class Multiprocessor(NamedTuple):
    """The resources that the programs on a multiprocessor share.

    Attributes:
        of_program: the most bytes of shared memory that one program may have.
        shared_memory: bytes of shared memory, for all programs together.
        registers: 32-bit registers.
        registers_of_thread: the most registers that one thread may have, a multiple of 8.
        warp_size: threads of a warp.
        bandwidth: its share of the memory bandwidth in bytes per second, by the vendor's figures; 0 if unknown.
    """

    of_program: int
    shared_memory: int
    registers: int = 1 << 16
    registers_of_thread: int = 256
    warp_size: int = 32
    bandwidth: float = 0.0


@functools.cache
def multiprocessor_of(device: torch.device) -> Multiprocessor:
    """The sizes of a multiprocessor; as on Hopper in the interpreter."""
    if INTERPRETED:
        return Multiprocessor(227 << 10, 228 << 10)
    properties = torch.cuda.get_device_properties(device)
    of_program = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    # Undocumented: the memory clock in kHz, with two transfers per clock, and the bits of a transfer.
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return Multiprocessor(
        of_program,
        properties.shared_memory_per_multiprocessor,
        getattr(properties, "regs_per_multiprocessor", 1 << 16),  # undocumented; 65536 since compute capability 3.7
        256 if torch.version.hip is None else 512,
        properties.warp_size,
        2 * clock * 1000 * width / 8 / properties.multi_processor_count,
    )


@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether a device has instructions that convert fp8 of the kind e4m3."""
    if capability_of(device) == 0:
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) >= (8, 9)


def early_start(device: torch.device) -> dict[str, Any]:
    """Launch options that let a kernel start before the previous one has ended (programmatic dependent launch).

    The kernel itself must wait for the results of the previous one. CUDA graphs keep the option. The options are empty
    before Hopper.
    """
    return {"launch_pdl": True} if capability_of(device) >= 9 and gdc_wait is not None else {}


def precision(device: torch.device) -> str:
    """The ``input_precision`` of float32 products: three tf32 products on NVIDIA's tensor cores, else full float32."""
    return "tf32x3" if capability_of(device) else "ieee"


def exact_precision(device: torch.device, *, float32: bool) -> str:
    """The ``input_precision`` of float32 products whose operands came from half precision: one tf32 product.

    With ``float32`` the operands came from float32, and the result is :func:`precision`.
    """
    full = precision(device)
    return "tf32" if full == "tf32x3" and not float32 else full


def blocks_per_program(rotated: bool, num_blocks: int, pairs: int, device: torch.device) -> int:
    """How many blocks of tokens one program stores or dequantizes, one after the other.

    A program that makes a rotation matrix first (``rotated``) takes up to 4 blocks, as long as the device stays busy.
    Other programs take one, or more where the second dimension of the grid would exceed its limit of 65535 programs.

    Args:
        rotated: whether the format is rotated.
        num_blocks: blocks of a pair.
        pairs: KV heads of all sequences.
        device: on which the kernel runs.
    """
    at_once = num_blocks * pairs // (8 * num_sms_of(device)) if rotated else 1
    return max(1, min(4, at_once), ceil_div(num_blocks, 65535))
