"""Decode attention on packed caches against PyTorch's fastest attention in bfloat16, on a GPU or a CPU.

On a CUDA device the operator ``kvcompile::attention`` runs its Triton kernel. On a CPU Inductor compiles the
specification, as it does in compiled graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.benching.errors import BenchError
from kvcompile.benching.measuring import Timing, num_sets, read_ceiling, time_graph, time_in_turns
from kvcompile.benching.workloads import (
    DEVICE,
    DTYPE,
    Caches,
    Shape,
    check,
    decode_sdpa_calls,
    relative_error,
    runnable,
    time_sdpa,
)
from kvcompile.errors import one_line
from kvcompile.kernels.spec.attention import attend
from kvcompile.passes.site import FormatPair

PLAIN = "bf16 SDPA"
"""The name of PyTorch's attention in the rows."""

Inputs = list[tuple[Any, ...]]

OnStep = Callable[[str], None]
"""Called with a short description of the step that begins."""


@dataclass(frozen=True)
class PackedDecode:
    """A decode step on caches of one format pair, checked and ready to be timed.

    Attributes:
        run: the attention.
        inputs: sets of arguments; successive calls take successive sets.
        nbytes: bytes of the packed cache that one call reads.
        relative_error: the relative L2 error of the result against the specification.
    """

    run: Callable[..., Tensor]
    inputs: Inputs
    nbytes: int
    relative_error: float

    @classmethod
    def of(cls, shape: Shape, pair: FormatPair, q_len: int = 1) -> PackedDecode:
        """A decode step on caches that are full of random tokens.

        Raises:
            BenchError: a format cannot hold vectors of this head_dim.
            ArithmeticError: the result is wrong.
        """
        caches = Caches(shape, pair)
        for layout in caches.layouts:
            if (reason := layout.unsupported(DTYPE)) is not None:
                raise BenchError(f"{layout.format_name}: {reason}")
        nbytes = caches.nbytes(shape.context)
        inputs: Inputs = [(shape.query(q_len), *data) for data in caches.random(num_sets(nbytes))]
        if DEVICE.type == "cuda":
            return cls(caches.attention, inputs, nbytes, caches.check_attention(*inputs[0]))

        def decode(query: Tensor, k_data: Tensor, v_data: Tensor) -> Tensor:
            return attend(query, k_data, v_data, *caches.layouts, kv_len=shape.context)

        # make_fx traces it as compiled graphs inline it, without guards.
        run = torch._inductor.compile(make_fx(decode)(*inputs[0]), list(inputs[0]))
        error = relative_error(run(*inputs[0]), decode(*inputs[0]))
        return cls(run, inputs, nbytes, check(error, f"attention on {pair} for {shape}"))


def plain_inputs(shape: Shape, q_len: int = 1) -> Inputs:
    """Sets of arguments of PyTorch's attention; successive calls take successive sets.

    Raises:
        BenchError: they do not fit into the memory.
    """
    try:
        return [(shape.query(q_len), *shape.key_and_value()) for _ in range(num_sets(shape.plain_bytes))]
    except (RuntimeError, MemoryError) as error:
        raise BenchError(f"context {shape.context}: no memory for plain keys and values: {one_line(error)}") from None


@dataclass(frozen=True)
class DecodeTime:
    """The time of one decode attention.

    Attributes:
        shape: the sizes of the step.
        policy: a preset or format, or PLAIN.
        timing: the time of a call; None if the measurement failed.
        nbytes: bytes of keys and values that are read.
        speedup: the time of PyTorch's attention divided by this time.
        of_read_ceiling: the bandwidth as a fraction of the bandwidth of a plain read; None on a CPU.
        relative_error: relative L2 error of the result against the specification; None for PyTorch's attention.
        note: the backend of PyTorch's attention, or the reason why no CUDA graph was recorded.
        error: why the measurement failed; empty if it did not.
    """

    shape: Shape
    policy: str
    timing: Timing | None = None
    nbytes: int | None = None
    speedup: float | None = None
    of_read_ceiling: float | None = None
    relative_error: float | None = None
    note: str = ""
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        timing = self.timing
        return {
            "policy": self.policy,
            "batch": self.shape.batch,
            "num_heads": self.shape.num_heads,
            "num_kv_heads": self.shape.num_kv_heads,
            "head_dim": self.shape.head_dim,
            "context": self.shape.context,
            "microseconds": timing.microseconds if timing is not None else None,
            "spread": timing.spread if timing is not None else None,
            "method": timing.method if timing is not None else None,
            "nbytes": self.nbytes,
            "speedup": self.speedup,
            "of_read_ceiling": self.of_read_ceiling,
            "relative_error": self.relative_error,
            "note": self.note,
            "error": self.error,
        }


@torch.no_grad()
def decode_times(
    shape: Shape, formats: Sequence[tuple[str, FormatPair]], on_step: OnStep = lambda doing: None
) -> Iterator[DecodeTime]:
    """The times of PyTorch's attention and then of every format, for one shape. A failure is a row with its error.

    ``on_step`` is called before each of ``len(formats) + 1`` steps.

    Raises:
        BenchError: PyTorch has no attention for this shape.
    """
    yield from (_on_cuda if DEVICE.type == "cuda" else _on_cpu)(shape, formats, on_step)


def _on_cuda(shape: Shape, formats: Sequence[tuple[str, FormatPair]], on_step: OnStep) -> Iterator[DecodeTime]:
    """Measure one attention after the other, so that each has the memory to itself."""
    on_step(f"timing {PLAIN}")
    name, plain = next(iter(time_sdpa(decode_sdpa_calls(), plain_inputs(shape)).items()))
    yield _plain_row(shape, name, plain)
    for policy, pair in formats:
        on_step(f"timing {policy}")
        yield _time_on_cuda(shape, policy, pair, plain)


def _time_on_cuda(shape: Shape, policy: str, pair: FormatPair, plain: Timing) -> DecodeTime:
    try:
        case = PackedDecode.of(shape, pair)
        return _row(shape, policy, time_graph(case.run, case.inputs), plain, case)
    except Exception as error:  # a failure becomes a row, and the other formats are still measured
        return _failed(shape, policy, error)


def _on_cpu(shape: Shape, formats: Sequence[tuple[str, FormatPair]], on_step: OnStep) -> Iterator[DecodeTime]:
    """Measure all attentions in turns, so that other load on the machine affects all of them alike."""
    inputs = plain_inputs(shape)
    calls = runnable(decode_sdpa_calls(), inputs[0])
    packed: dict[str, PackedDecode] = {}
    failed: dict[str, DecodeTime] = {}
    for policy, pair in formats:
        on_step(f"compiling {policy}")
        try:
            packed[policy] = PackedDecode.of(shape, pair)
        except Exception as error:  # as in _time_on_cuda
            failed[policy] = _failed(shape, policy, error)
    on_step("timing, in turns")
    turns = [(call, inputs) for call in calls.values()] + [(case.run, case.inputs) for case in packed.values()]
    timings = _in_turns(turns)
    name, plain = min(zip(calls, timings, strict=False), key=lambda item: item[1].seconds)
    yield _plain_row(shape, name, plain)
    by_policy = dict(zip(packed, timings[len(calls) :], strict=True))
    for policy, _ in formats:
        if policy in failed:
            yield failed[policy]
        else:
            yield _row(shape, policy, by_policy[policy], plain, packed[policy])


def _in_turns(turns: Sequence[tuple[Callable[..., object], Inputs]]) -> list[Timing]:
    """The time of one call of each attention; the inputs take turns from round to round."""
    rounds = 0

    def next_round(index: int) -> None:
        nonlocal rounds
        rounds += index == 0

    def call(run: Callable[..., object], inputs: Inputs) -> None:
        run(*inputs[rounds % len(inputs)])

    return time_in_turns([functools.partial(call, *turn) for turn in turns], before=next_round)


def _failed(shape: Shape, policy: str, error: Exception) -> DecodeTime:
    lines = str(error).strip().splitlines()
    return DecodeTime(shape, policy, error=f"{type(error).__name__}: {lines[0] if lines else 'no message'}")


def _plain_row(shape: Shape, name: str, timing: Timing) -> DecodeTime:
    note = "; ".join(filter(None, (name, timing.note)))
    share = _of_read_ceiling(shape.plain_bytes, timing)
    return DecodeTime(shape, PLAIN, timing, shape.plain_bytes, 1.0, share, note=note)


def _row(shape: Shape, policy: str, timing: Timing, plain: Timing, case: PackedDecode) -> DecodeTime:
    return DecodeTime(
        shape,
        policy,
        timing,
        case.nbytes,
        plain.seconds / timing.seconds,
        _of_read_ceiling(case.nbytes, timing),
        case.relative_error,
        timing.note,
    )


def _of_read_ceiling(nbytes: int, timing: Timing) -> float | None:
    return nbytes / timing.seconds / read_ceiling() if DEVICE.type == "cuda" else None
