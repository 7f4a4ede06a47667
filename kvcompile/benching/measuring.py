"""Times of calls, and the memory bandwidths that serve as their ceilings.

On a CUDA device a call is timed as a node of a CUDA graph, so its launch costs as much as in a compiled decode step.
Its inputs take turns, so it reads memory and not the L2 cache. The ceilings are measured in the same way in the same
run. On a CPU a call is timed by wall clock.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.benching.errors import NoCudaError
from kvcompile.kernels.lang.triton import jit, tl

INPUT_L2_CACHES = 16
"""Total size of the inputs that take turns, as a multiple of the L2 cache, so that few reads hit the cache."""

INPUT_BYTES_ON_CPU = 1 << 28
"""Total bytes of the inputs that take turns on a CPU."""

MAX_SETS = 512
MAX_CALLS = 4096
MIN_REPLAY_SECONDS = 2e-3
"""A replay lasts at least this long, so that the time of its own launch is negligible."""


@dataclass(frozen=True)
class Timing:
    """The time of one call.

    Attributes:
        seconds: the median.
        spread: distance between the first and the third quartile, as a fraction of the median. A smaller difference
            between two timings is noise.
        method: ``graph`` for calls in a CUDA graph; ``events`` for calls that were launched one by one; ``wall clock``
            on a CPU.
        note: why no CUDA graph was recorded; otherwise empty.
    """

    seconds: float
    spread: float
    method: str
    note: str = ""

    @property
    def microseconds(self) -> float:
        return 1e6 * self.seconds

    @classmethod
    def of(cls, seconds: Sequence[float], method: str, note: str = "") -> Timing:
        """The timing of two or more calls that took ``seconds``."""
        first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, (third - first) / median, method, note)


def require_cuda(what: str) -> None:
    """Raise NoCudaError, which names ``what``, unless there is a CUDA device."""
    if not torch.cuda.is_available():
        raise NoCudaError(f"{what} needs a CUDA device, and PyTorch finds none: run it on a machine with a GPU")


def num_sets(bytes_per_call: float) -> int:
    """The number of input sets for a call that touches ``bytes_per_call``: 2 to MAX_SETS, or 2 to 8 on a CPU."""
    if not torch.cuda.is_available():
        return min(8, max(2, math.ceil(INPUT_BYTES_ON_CPU / bytes_per_call)))
    wanted = INPUT_L2_CACHES * torch.cuda.get_device_properties().L2_cache_size
    return min(MAX_SETS, max(2, math.ceil(wanted / bytes_per_call)))


def time_in_turns(
    calls: Sequence[Callable[[], object]],
    *,
    warmup: int = 3,
    repeats: int = 20,
    before: Callable[[int], object] = lambda index: None,
) -> list[Timing]:
    """The wall-clock time of each of ``calls`` on a CPU.

    The calls take turns, so that other load on the machine affects all of them alike.

    Args:
        calls: functions that finish their work before they return.
        warmup: rounds that are not timed.
        repeats: rounds that are timed, at least 2.
        before: runs before each call with the call's index, and is not timed.
    """
    rounds = []
    for _ in range(warmup + repeats):
        seconds = []
        for index, call in enumerate(calls):
            before(index)
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        rounds.append(seconds)
    return [Timing.of(seconds, "wall clock") for seconds in zip(*rounds[warmup:], strict=True)]


def time_graph(
    fn: Callable[..., object], inputs: Sequence[tuple[Any, ...]] = ((),), *, warmup: int = 3, repeats: int = 20
) -> Timing:
    """The time of one call of ``fn``, on a CUDA device.

    The calls ``fn(*inputs[0])``, ``fn(*inputs[1])``, ... are recorded into a CUDA graph, in enough rounds to last
    MIN_REPLAY_SECONDS, and the graph is replayed. Calls that cannot be recorded are launched one by one, and the result
    says so; each time then includes a launch.

    Args:
        fn: launches work on the current stream. Its result is dropped.
        inputs: arguments of each call, one tuple for each set, see :func:`num_sets`.
        warmup: replays that are not timed.
        repeats: replays that are timed, at least 2; the result is their median, divided by the number of calls.

    Raises:
        NoCudaError: there is no CUDA device.
    """
    require_cuda("time_graph")
    calls = [functools.partial(fn, *arguments) for arguments in inputs]
    _run_aside(calls)  # compiles kernels, allocates workspaces
    method, note, run = "graph", "", None
    try:
        run = _record(calls)
        seconds = statistics.median(_seconds(run, 1, 3))
        rounds = min(math.ceil(MIN_REPLAY_SECONDS / seconds), max(1, MAX_CALLS // len(calls)))
        if rounds > 1:
            run = _record(calls * rounds)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        method, note = "events", f"not recorded: {str(error).splitlines()[0]}"
        rounds = math.ceil(32 / len(calls))
        run = functools.partial(_run_all, calls * rounds)
    seconds_per_replay = _seconds(run, warmup, repeats)
    return Timing.of([seconds / (rounds * len(calls)) for seconds in seconds_per_replay], method, note)


def _run_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _run_aside(calls: Sequence[Callable[[], object]]) -> None:
    """Run every call once on a side stream, as the recording will."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run_all(calls)
    torch.cuda.synchronize()


def _record(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    # A failed recording leaves its own stream current; the outer context restores the stream.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _run_all(calls)
    return graph.replay


def _seconds(
    run: Callable[[], object], warmup: int, repeats: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Seconds between events around each ``run``; the host does not wait in between."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(warmup + repeats)]
    for start, end in pairs:
        before()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs[warmup:]]


def time_steps(
    step: Callable[[], object], before: Callable[[], object], *, warmup: int = 5, repeats: int = 20
) -> Timing:
    """The time of one ``step`` of a loop that keeps a CUDA device busy, as the steps of a compiled model do.

    Args:
        step: launches work on the current stream. Its result is dropped.
        before: runs before each step and is not timed.
        warmup: steps that are not timed.
        repeats: steps that are timed, at least 2; the result is their median.

    Raises:
        NoCudaError: there is no CUDA device.
    """
    require_cuda("time_steps")
    return Timing.of(_seconds(step, warmup, repeats, before), "events")


READ_CONFIGS = [*itertools.product((2, 4, 8, 16), (4, 8))]
"""Configurations of the read kernel: (16-byte loads in flight in every thread, warps)."""


@jit
def read_kernel(source_ptr, out_ptr, impossible, LOADS: tl.constexpr, WIDTH: tl.constexpr):
    """Read LOADS * WIDTH int32 per program, 16 bytes per load and thread, all loads in flight before the first use.

    WIDTH has 4 * 32 numbers per warp, so the maximum is taken within a thread. The kernel stores the maximum only if it
    equals ``impossible``. That never happens, but the compiler cannot know it and must keep all loads.
    """
    column = tl.arange(0, WIDTH)
    start = tl.program_id(0).to(tl.int64) * (LOADS * WIDTH)
    numbers = tl.load(source_ptr + start + tl.arange(0, LOADS)[:, None] * WIDTH + column[None, :])
    maximum = tl.max(numbers, 0)
    tl.store(out_ptr + column, maximum, mask=maximum == impossible)


def _large_buffer() -> torch.Tensor:
    """Random non-negative int32: INPUT_L2_CACHES times the L2 cache, at least 1 GiB, and a multiple of 1 MiB."""
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    mebibytes = max(1024, math.ceil(INPUT_L2_CACHES * l2_bytes / 2**20))
    return torch.randint(0, 2**31 - 1, (mebibytes * 2**18,), dtype=torch.int32, device="cuda")


@functools.cache
def read_ceiling() -> float:
    """Bytes per second of the fastest plain read of a buffer much larger than the L2 cache; measured once per process.

    Raises:
        NoCudaError: there is no CUDA device.
    """
    require_cuda("read_ceiling")
    source = _large_buffer()
    out = source.new_empty(8 * 128)

    def read(loads: int, num_warps: int) -> None:
        width = 128 * num_warps
        read_kernel[(source.numel() // (loads * width),)](source, out, -1, loads, width, num_warps=num_warps)

    return max(source.nbytes / time_graph(read, [config]).seconds for config in READ_CONFIGS)


@functools.cache
def copy_ceiling() -> float:
    """Bytes per second, read and written, of a copy much larger than the L2 cache; measured once per process.

    Raises:
        NoCudaError: there is no CUDA device.
    """
    require_cuda("copy_ceiling")
    source = _large_buffer()
    destination = torch.empty_like(source)
    # copy_ may use a copy engine, which is slower than a kernel.
    copies = (destination.copy_, lambda x: torch.bitwise_not(x, out=destination))
    return 2 * source.nbytes / min(time_graph(copy, [(source,)]).seconds for copy in copies)
