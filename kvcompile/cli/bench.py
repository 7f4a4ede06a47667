"""``kvcompile bench``: the speed of attention on packed caches on this machine."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompile.cli.output import (
    INTERRUPTED,
    NEGATIVE,
    JsonOption,
    examples,
    items,
    print_interrupted,
    print_json,
    print_wrapped,
)
from kvcompile.cli.progress import progress_bar
from kvcompile.tables import table

if TYPE_CHECKING:
    from kvcompile.benching.decode_attention import DecodeTime

EXAMPLES = examples(
    "bench",
    "bench --policies int8_per_token_head,int4_per_token_head --contexts 32k,128k",
    "bench --heads 8/2 --head-dim 64 --contexts 1k --json",
)

CPU_POLICIES = "int8_per_token_head,int4_per_token_head"
CONTEXTS = "8k,32k,128k"
CPU_CONTEXTS = "1k,4k"
MOST = 10**9
"""Sequences, or channels of a head."""

Policies = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Presets and formats.  [default: on a GPU all presets that have kernels there; on a CPU "
        "int8_per_token_head,int4_per_token_head]",
    ),
]
Contexts = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Tokens in the cache; k is 1024.  [default: 8k,32k,128k on a GPU, 1k,4k on a CPU]"
    ),
]
Batch = Annotated[int, typer.Option(metavar="N", min=1, help="Sequences.")]
Heads = Annotated[str, typer.Option(metavar="HEADS/KV", help="Query heads and KV heads.")]
HeadDim = Annotated[int, typer.Option(metavar="N", min=1, help="Channels of a head.")]

LEGEND = (
    "Attention of one new token per sequence on a full cache.  us: median time.  spread: distance between the "
    "quartiles of the time, relative to the median; smaller differences are noise.  MB: keys and values that are read, "
    "scales included.  speedup: over PyTorch's fastest attention in bfloat16 on the same tokens.  error: relative L2, "
    "against the specification on the same packed data.  of ceiling: bandwidth relative to a plain read (GPU only)."
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(bench)


def bench(
    policies: Policies = None,
    contexts: Contexts = None,
    batch: Batch = 1,
    heads: Heads = "32/8",
    head_dim: HeadDim = 128,
    as_json: JsonOption = False,
) -> None:
    """Time decode attention on packed caches against PyTorch's fastest in bfloat16, on the GPU if there is one."""
    from kvcompile.benching.decode_attention import decode_times
    from kvcompile.benching.errors import BenchError
    from kvcompile.benching.machine import describe_device, versions
    from kvcompile.benching.workloads import DEVICE, Shape, default_formats, parse_formats
    from kvcompile.planning.units import parse_context

    on_cpu = DEVICE.type == "cpu"
    if policies is None and on_cpu:
        policies = CPU_POLICIES
    if contexts is None:
        contexts = CPU_CONTEXTS if on_cpu else CONTEXTS
    names = None if policies is None else items(policies, "--policies", "presets or formats")
    formats = [parse_formats(name) for name in names] if names is not None else default_formats()
    sizes = [parse_context(item, "--contexts") for item in items(contexts, "--contexts", "numbers of tokens")]
    for option, number in (("--batch", batch), ("--head-dim", head_dim)):
        if number > MOST:
            raise BenchError(f"{option} {number}: give at most {MOST}")
    try:
        shapes = [Shape.parse(f"{batch},{heads},{head_dim},{size}") for size in sizes]
    except BenchError:
        raise BenchError(f"--heads: {heads!r}: give HEADS/KV, where KV divides HEADS, such as 32/8") from None
    rows: list[DecodeTime] = []
    total = len(shapes) * (1 + len(formats))
    interrupted = False
    try:
        with progress_bar() as on_progress:
            steps = itertools.count()
            for shape in shapes:

                def on_step(doing: str, context: int = shape.context) -> None:
                    on_progress(f"{context} tokens: {doing}", next(steps), total)

                for row in decode_times(shape, formats, on_step):
                    rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    device = describe_device(DEVICE)
    if as_json:
        print_json({"device": device, "versions": versions(), "rows": [row.to_dict() for row in rows]})
    else:
        _print(device, rows)
    if interrupted:
        print_interrupted(f"{len(rows)} of {total} rows were measured")
        raise typer.Exit(INTERRUPTED)
    if any(row.error for row in rows):
        raise typer.Exit(NEGATIVE)


def _print(device: dict[str, Any], rows: list[DecodeTime]) -> None:
    threads = f", {device['threads']} threads" if "threads" in device else ""
    print_wrapped(f"{device['name']}{threads}", indent=2)
    header = ["policy", "context", "us", "spread", "MB", "speedup", "error", "of ceiling"]
    cells = [_cells(row) for row in rows]
    if not any(row[-1] for row in cells):  # a CPU has no read ceiling
        header, cells = header[:-1], [row[:-1] for row in cells]
    print(f"\n{table(header, cells)}\n")
    print_wrapped(LEGEND, indent=2)
    for row in rows:
        if row.note:
            print_wrapped(f"note: {row.policy}, context {row.shape.context}: {row.note}", indent=6)
        if row.error:
            print_wrapped(f"failed: {row.policy}, context {row.shape.context}: {row.error}", indent=8)


def _cells(row: DecodeTime) -> list[str]:
    if row.timing is None or row.nbytes is None:
        return [row.policy, str(row.shape.context), "failed", "", "", "", "", ""]
    return [
        row.policy,
        str(row.shape.context),
        f"{row.timing.microseconds:.1f}",
        f"{row.timing.spread:.1%}",
        f"{row.nbytes / 1e6:,.1f}",
        f"{row.speedup:.2f}",
        "" if row.relative_error is None else f"{row.relative_error:.1e}",
        "" if row.of_read_ceiling is None else f"{row.of_read_ceiling:.2f}",
    ]
