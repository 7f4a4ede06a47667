"""Decode attention on packed caches, compared with the read ceiling and PyTorch's fastest attention in bfloat16.

    python benchmarks/decode.py [--shapes 8,32/8,128,32768 ...] [--formats int4_per_token_head ...] [--q-len 1]
                                [--programs-per-sm 2 4 8 ...]

For every shape and format, this measures the time of ``kvcompile::attention`` on a full cache of encoded random data.
The baseline is the fastest of the cuDNN, flash and memory-efficient backends of ``scaled_dot_product_attention``,
without a mask, on an unexpanded cache. For every format without a residual, it then measures the cost of masks: a
mostly empty static cache with a bool mask, compared with an unmasked cache of only the visible tokens. Every result is
first compared with the plain-PyTorch specification. ``--programs-per-sm`` adds rows for numbers of programs per
multiprocessor that :mod:`kvcompile.kernels.attention.tuned` does not have.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch
from recording import Chart, Recorder, argument, parse_arguments
from torch import Tensor

from kvcompile.benching.decode_attention import PackedDecode, plain_inputs
from kvcompile.benching.measuring import Timing, num_sets, time_graph
from kvcompile.benching.workloads import (
    DEVICE,
    Caches,
    Shape,
    decode_sdpa_calls,
    default_formats,
    keeps_tokens,
    parse_formats,
    time_sdpa,
)
from kvcompile.kernels import launch, ops
from kvcompile.kernels.attention.divisions import Division, division_of
from kvcompile.kernels.attention.tuned import AttentionConfig
from kvcompile.passes.site import FormatPair

SHAPES = [Shape.parse(text) for text in ("8,32/8,128,32768", "1,32/8,128,131072", "8,32/8,128,1024")]
MASKED_SHAPES = [Shape.parse(text) for text in ("1,32/8,128,131072", "8,32/8,128,131072")]


def time_baseline(recorder: Recorder, shape: Shape, q_len: int) -> tuple[str, Timing] | None:
    """Add a row for the fastest backend of ``scaled_dot_product_attention``, with all times in its note.

    Returns its name and time.
    """
    timings: dict[str, Timing] = {}
    with recorder.row(case="SDPA", shape=str(shape), format="plain", q_len=q_len) as row:
        timings = time_sdpa(decode_sdpa_calls(), plain_inputs(shape, q_len))
        row |= recorder.timed(next(iter(timings.values())), shape.plain_bytes)
        row["note"] = "; ".join(
            f"{name} {timing.microseconds:.1f} us ({timing.method})" for name, timing in timings.items()
        )
    return next(iter(timings.items()), None)


@contextlib.contextmanager
def programs_per_sm(count: int) -> Iterator[None]:
    """Inside the ``with`` block, decode kernels have ``count`` programs per multiprocessor in all configurations."""

    def division(config: AttentionConfig, *arguments: int) -> Division:
        return division_of(dataclasses.replace(config, programs_per_sm=count), *arguments)

    # Recipes of earlier calls have the grid of another number.
    recipes = mock.patch.object(ops.REPEATED["attention"], "_recipes", {})
    with mock.patch.object(launch, "division_of", division), recipes:
        yield


def time_format(
    recorder: Recorder,
    shape: Shape,
    name: str,
    pair: FormatPair,
    q_len: int,
    baseline: tuple[str, Timing] | None,
    others: list[int],
) -> None:
    """Add a row for a full cache of one format, and a row for each number of programs in ``others``."""
    with recorder.row(case="kvcompile", shape=str(shape), format=name, q_len=q_len) as row:
        step = PackedDecode.of(shape, pair, q_len)
        row["relative_error"] = step.relative_error
        row |= recorder.timed(time_graph(step.run, step.inputs), step.nbytes, baseline)
    if "error" in row:
        return
    for count in others:
        case = f"kvcompile, {count} programs per multiprocessor"
        with recorder.row(case=case, shape=str(shape), format=name, q_len=q_len) as row, programs_per_sm(count):
            row |= recorder.timed(time_graph(step.run, step.inputs), step.nbytes, baseline)


def time_mask(recorder: Recorder, shape: Shape, visible: int, name: str, pair: FormatPair) -> None:
    """Add a row for a cache of ``visible`` tokens, and a row for a static cache in which as many tokens are visible.

    The static caches are windows of one buffer. They overlap only where no token is visible.
    """
    caches, few = Caches(shape, pair), Caches(dataclasses.replace(shape, context=visible), pair)
    nbytes = caches.nbytes(visible)
    count = num_sets(nbytes)
    with recorder.row(case=f"{visible} tokens", shape=str(shape), format=name) as row:
        inputs = [(shape.query(), *data) for data in few.random(count)]
        row["relative_error"] = few.check_attention(*inputs[0])
        alone = time_graph(few.attention, inputs)
        row |= recorder.timed(alone, nbytes)
        del inputs
    if "error" in row:
        return
    with recorder.row(case=f"{visible} visible tokens of {shape.context}", shape=str(shape), format=name) as row:
        static = caches.random(count, step=visible)
        mask = _prefix_mask(shape, visible)
        masked = [(shape.query(), *data, mask) for data in static]
        row["relative_error"] = caches.check_attention(*masked[0])
        ranges = torch.ops.kvcompile.visible_range(mask, 1, shape.context)
        masked = [(*arguments, None, ranges) for arguments in masked]
        row |= recorder.timed(time_graph(caches.attention, masked), nbytes, ("without mask", alone))


def time_range(recorder: Recorder, shape: Shape, visible: int) -> None:
    """Add a row for the ranges of the mask, which a step computes once for all its layers."""
    with recorder.row(case=f"range of {visible} visible tokens, once a step", shape=str(shape), format="mask") as row:
        masks = [(_prefix_mask(shape, visible), 1, shape.context) for _ in range(num_sets(shape.batch * shape.context))]
        row |= recorder.timed(time_graph(torch.ops.kvcompile.visible_range, masks), shape.batch * shape.context)


def _prefix_mask(shape: Shape, visible: int) -> Tensor:
    """The mask of a decode step in a static cache, bool [batch, 1, 1, shape.context]."""
    return (torch.arange(shape.context, device=DEVICE) < visible).repeat(shape.batch, 1, 1, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", type=argument(Shape.parse), default=SHAPES)
    parser.add_argument("--formats", nargs="*", type=argument(parse_formats), default=default_formats())
    parser.add_argument("--q-len", type=int, default=1, help="query positions (default: %(default)s)")
    parser.add_argument("--programs-per-sm", nargs="*", type=int, default=[], help="further numbers of programs")
    parser.add_argument("--masked-shapes", nargs="*", type=argument(Shape.parse), default=MASKED_SHAPES)
    parser.add_argument("--visible", type=int, default=1000, help="tokens that masks leave visible (%(default)s)")
    arguments = parse_arguments(parser)
    recorder = Recorder(arguments, Chart("shape", ("case", "format"), ("of_read_ceiling", "speedup")))
    with torch.no_grad():
        for shape in arguments.shapes:
            baseline = time_baseline(recorder, shape, arguments.q_len)
            for name, pair in arguments.formats:
                time_format(recorder, shape, name, pair, arguments.q_len, baseline, arguments.programs_per_sm)
        for shape in arguments.masked_shapes:
            time_range(recorder, shape, arguments.visible)
            for name, pair in arguments.formats:
                if keeps_tokens(pair):
                    continue  # caches with a residual cannot overlap
                time_mask(recorder, shape, arguments.visible, name, pair)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
