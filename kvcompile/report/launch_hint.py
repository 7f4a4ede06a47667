"""The hint that decode steps on a GPU run without CUDA graphs, given once in a process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

from kvcompile.passes.packing import Packing
from kvcompile.passes.rewrite.make_replayable import can_replay
from kvcompile.report import report

HINT = (
    "decode steps run without CUDA graphs, so launching their kernels may take longer than running them; compile with "
    'mode="reduce-overhead" or options={"triton.cudagraphs": True}, and clone() outputs that you keep'
)


_IS_QUIET = ContextVar("launch_hint_is_quiet", default=False)


@contextlib.contextmanager
def no_launch_hint() -> Iterator[None]:
    """Inside the ``with`` block, the hint is not given, because the caller has decided about CUDA graphs."""
    token = _IS_QUIET.set(True)
    try:
        yield
    finally:
        _IS_QUIET.reset(token)


def hint_at_cuda_graphs() -> None:
    """Give the hint for a recordable step, outside of :func:`no_launch_hint`."""
    if not _IS_QUIET.get():
        _give()


def is_recordable_step(packing: Packing) -> bool:
    """Whether ``packing`` is a decode step that a CUDA graph could replay, and Inductor is not asked to record it."""
    return not packing.cudagraphs and _is_decode_step(packing) and could_be_recorded(packing)


def _is_decode_step(packing: Packing) -> bool:
    """Whether every packed attention has one query position."""
    markers = [candidate.attention.marker for candidate in packing.accepted if candidate.attention is not None]
    return bool(markers) and all(marker.meta["val"].shape[-2] == 1 for marker in markers)


def could_be_recorded(packing: Packing) -> bool:
    """Whether the rewritten graph runs on a GPU and can be replayed."""
    rewritten = packing.rewritten
    return rewritten is not None and rewritten.on_cuda and can_replay(packing.gm, rewritten)


@functools.cache
def _give() -> None:
    report.note(HINT)
