"""The cost of recent and first tokens in full precision: attention and the store of a decode step.

    python benchmarks/windows.py [--shapes 8,32/8,128,32768 ...] [--formats int4 ...] [--residual 128] [--sinks 64]

A step is measured as compiled graphs run it: a static cache, a bool mask whose visible range is known, and a position
in the middle of a block. The baseline is the same step on the same packed tokens without tokens in full precision. If
scales are per channel, a cache without exact tokens cannot be written, so the baseline of its store is
``int4_per_token_head``. Every result is first compared with the plain-PyTorch specification.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
from recording import Chart, Recorder, argument, parse_arguments

from kvcompile.benching.measuring import Timing, num_sets, time_graph
from kvcompile.benching.workloads import DEVICE, DTYPE, Caches, Shape, keeps_tokens, parse_formats
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.site import FormatPair

SHAPES = [Shape.parse(text) for text in ("8,32/8,128,32768", "1,32/8,128,131072")]
FORMATS = ["int8_per_token_head", "int4", "int4_per_token_head", "turboquant_4bit_nc", "turboquant_3bit_nc"]
HIDDEN = 21
"""Masked tokens at the end of the cache, so that the step ends in the middle of a block."""


class WithoutWindows(Caches):
    """Caches without their exact blocks: only the packed tokens remain."""

    @property
    def layouts(self) -> tuple[PackedLayout, PackedLayout]:  # type: ignore[override]
        key, value = (dataclasses.replace(layout, residual=None) for layout in super().layouts)
        return key, value


def windows_of(pair: FormatPair, arguments: argparse.Namespace) -> list[FormatPair]:
    """The format pairs to measure: with the exact tokens that the format needs, and with the requested exact tokens."""
    wanted = dataclasses.replace(pair, residual_length=arguments.residual, sink_tokens=arguments.sinks)
    return [pair, wanted] if keeps_tokens(pair) else [wanted]


def label(pair: FormatPair) -> str:
    recent, sinks = pair.residual("key", DTYPE).recent_blocks * 64, pair.residual("key", DTYPE).sink_blocks * 64
    return f"{recent} recent, {sinks} first" if sinks else f"{recent} recent"


def time_attention(recorder: Recorder, shape: Shape, name: str, pair: FormatPair) -> None:
    """Add two rows: attention without and with exact blocks."""
    caches, without = Caches(shape, pair), WithoutWindows(shape, pair)
    visible = shape.context - HIDDEN
    nbytes = caches.nbytes(visible)
    mask = (torch.arange(shape.context, device=DEVICE) < visible).repeat(shape.batch, 1, 1, 1)
    ranges = torch.ops.kvcompile.visible_range(mask, 1, shape.context)
    data = caches.random(num_sets(nbytes))
    headers = [layout.header_blocks for layout in caches.layouts]
    stripped = [(keys[headers[0] :], values[headers[1] :]) for keys, values in data]
    alone: Timing | None = None
    for case, what, sets in (("none", without, stripped), (label(pair), caches, data)):
        with recorder.row(case="attention", shape=str(shape), format=name, exact=case) as row:
            query = shape.query()
            row["relative_error"] = what.check_attention(query, *sets[0], mask)
            inputs = [(shape.query(), *one, mask, None, ranges) for one in sets]
            timing = time_graph(what.attention, inputs)
            row |= recorder.timed(timing, nbytes, None if alone is None else ("no tokens in full precision", alone))
            alone = timing


def time_store(recorder: Recorder, shape: Shape, name: str, pair: FormatPair, baseline: Timing | None) -> Timing | None:
    """Add a row for the store of one token of keys and values. Returns its time."""
    caches = Caches(shape, pair)
    timing: Timing | None = None
    with recorder.row(
        case="store", shape=str(shape), format=name, exact=label(pair) if keeps_tokens(pair) else "none"
    ) as row:
        size = shape.batch, shape.num_kv_heads
        data = [
            torch.zeros(layout.shape(shape.context, *size), dtype=torch.uint8, device=DEVICE)
            for layout in caches.layouts
        ]
        inputs = []
        for _ in range(64):
            x = [
                torch.randn(shape.batch, 1, shape.num_kv_heads, shape.head_dim, dtype=DTYPE, device=DEVICE)
                for _ in data
            ]
            position = torch.tensor([shape.context - HIDDEN], device=DEVICE)
            inputs.append(
                (*data, *(one.transpose(1, 2) for one in x), position, None, *(i.spec for i in caches.layouts))
            )
        timing = time_graph(torch.ops.kvcompile.store_pair, inputs)
        row |= recorder.timed(timing, None, None if baseline is None else ("no tokens in full precision", baseline))
    return timing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", type=argument(Shape.parse), default=SHAPES)
    parser.add_argument(
        "--formats", nargs="*", type=argument(parse_formats), default=[parse_formats(f) for f in FORMATS]
    )
    parser.add_argument("--residual", type=int, default=128, help="recent tokens (default: %(default)s)")
    parser.add_argument("--sinks", type=int, default=64, help="first tokens (default: %(default)s)")
    arguments = parse_arguments(parser)
    recorder = Recorder(arguments, Chart("shape", ("case", "format", "exact"), ("speedup",)))
    with torch.no_grad():
        for shape in arguments.shapes:
            for name, pair in arguments.formats:
                plain = parse_formats("int4_per_token_head")[1] if keeps_tokens(pair) else pair
                baseline = time_store(recorder, shape, name if plain is pair else "int4_per_token_head", plain, None)
                for windowed in windows_of(pair, arguments):
                    time_attention(recorder, shape, name, windowed)
                    time_store(recorder, shape, name, windowed, baseline)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
