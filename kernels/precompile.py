"""Compile the Triton kernels of operators in other threads, before the operators run for the first time.

Triton takes seconds to compile an attention kernel, mostly outside of Python. Inductor takes seconds to generate the
code of a step. Both at the same time take as long as the longer one. A launch that comes too early waits for the
thread, see :class:`kvcompile.kernels.lang.launcher.Launcher`.
"""

from __future__ import annotations

import functools
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcompile.compat.tracing import FakeTensorMode
from kvcompile.kernels.lang.launcher import compiling_only
from kvcompile.kernels.lang.triton import INTERPRETED, triton
from kvcompile.kernels.ops import IMPLEMENTATIONS

log = logging.getLogger(__name__)

MAX_THREADS = 4


class TensorLike(NamedTuple):
    """The properties of a tensor that its kernels depend on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLike | None:
        """The description of ``tensor``; None if a size or stride is symbolic."""
        if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride())):
            return None
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def fake(self) -> Tensor:
        """A tensor without memory; call it in a fake mode."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


Call = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""An operator and its arguments, in which :class:`TensorLike` stands for tensors; hashable."""


def precompile(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[None] | None:
    """Start to compile the kernels that ``op(*args, **kwargs)`` will launch.

    Args:
        op: any operator overload.
        args, kwargs: its arguments; tensors may be fake.

    Returns:
        The compilation, or None if there is nothing to do: ``op`` launches no kernel, its arguments are not on a GPU,
        or a size is symbolic.
    """
    values = (*args, *kwargs.values())
    tensors = [value for value in values if isinstance(value, Tensor)]
    if op not in IMPLEMENTATIONS or triton is None or INTERPRETED or not tensors:
        return None
    if not tensors[0].is_cuda or any(isinstance(value, torch.SymInt) for value in values):
        return None
    described = [TensorLike.of(value) if isinstance(value, Tensor) else value for value in values]
    if any(isinstance(value, Tensor) and like is None for value, like in zip(values, described, strict=True)):
        return None
    return _start((op, tuple(described[: len(args)]), tuple(zip(kwargs, described[len(args) :], strict=True))))


@functools.lru_cache(maxsize=1024)
def _start(call: Call) -> Future[None]:
    return _pool().submit(_compile, call)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 1))
    return ThreadPoolExecutor(threads, thread_name_prefix="kvcompile-precompile")


def _compile(call: Call) -> None:
    op, args, kwargs = call
    try:
        with FakeTensorMode(), torch.no_grad(), compiling_only():
            IMPLEMENTATIONS[op](*map(_fake, args), **{name: _fake(value) for name, value in kwargs})
    except Exception:  # the launch itself will fail in the same way, where the user sees it
        log.debug("%s could not be compiled ahead of its first launch", op, exc_info=True)


def _fake(value: Any) -> Any:
    return value.fake() if isinstance(value, TensorLike) else value
