"""Storing tokens to a packed cache, compared with the read ceiling.

    python benchmarks/store.py [--context 32768] [--batches 1 8] [--formats int4_per_token_head ...]

For keys and values of every format, this measures the time of ``kvcompile::store`` for a prefill of ``--context``
tokens, and for one token. Vectors have the strides of projections: [batch, tokens, heads, head_dim], transposed. Bytes
count the vectors that are read and the packed tokens that are written. Every result is first compared with the
plain-PyTorch specification.
"""

from __future__ import annotations

import argparse

import torch
from recording import Chart, Recorder, argument, parse_arguments
from torch import Tensor

from kvcompile.benching.measuring import num_sets, time_graph
from kvcompile.benching.random_bases import with_random_bases
from kvcompile.benching.workloads import DEVICE, DTYPE, check, fully_packed_formats, parse_fully_packed, relative_error
from kvcompile.errors import plural
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.spec.packing import pack_tokens, read_tokens


def strided_vectors(batch: int, num_kv_heads: int, num_tokens: int, head_dim: int) -> Tensor:
    """Random vectors with the strides of a projection, [batch, num_kv_heads, num_tokens, head_dim]."""
    return torch.randn(batch, num_tokens, num_kv_heads, head_dim, dtype=DTYPE, device=DEVICE).transpose(1, 2)


def store(layout: PackedLayout, data: Tensor, x: Tensor, positions: Tensor) -> None:
    """The store that is timed; nothing else here calls the operator."""
    torch.ops.kvcompile.store(data, x, positions, None, layout.format_name, layout.role)


def check_store(layout: PackedLayout, data: Tensor, x: Tensor, positions: Tensor) -> float:
    """Relative error of the stored tokens compared with the specification, in the first and the last head.

    Raises:
        ArithmeticError: the error is too large.
    """
    data.fill_(0xFF)  # unwritten bytes decode to NaN or to a wrong number
    store(layout, data, x, positions)
    errors = []
    for index in (0, -1):
        written, vectors = data[:, index][:, index], x[index, index]
        tokens = read_tokens(written[:, None, None], layout, data.shape[0] * BLOCK_TOKENS)[0, 0, positions]
        packed = pack_tokens(layout, vectors[None, None])
        errors.append(relative_error(tokens, read_tokens(packed, layout, len(positions))[0, 0]))
    return check(max(errors), f"store of {layout}")


def store_inputs(layout: PackedLayout, args: argparse.Namespace, batch: int, num_tokens: int, count: int) -> list:
    """``count`` sets of inputs of :func:`store`, each with its own cache.

    Sets of single tokens share one cache, and each token goes to the end of another block.
    """
    size = layout.shape(args.context, batch, args.num_kv_heads)
    caches = 1 if num_tokens == 1 else count
    data = torch.empty((caches, *size), dtype=torch.uint8, device=DEVICE)
    sets = []
    for i in range(count):
        positions = torch.arange(num_tokens, device=DEVICE)
        if num_tokens == 1:
            positions += (i % size[0] + 1) * BLOCK_TOKENS - 1
        x = strided_vectors(batch, args.num_kv_heads, num_tokens, layout.head_dim)
        sets.append((layout, data[i % caches], x, positions))
    return sets


def time_store(
    recorder: Recorder, args: argparse.Namespace, name: str, layout: PackedLayout, batch: int, num_tokens: int
) -> None:
    """A row for storing ``num_tokens`` tokens of every sequence."""
    shape = f"({batch}, {args.num_kv_heads}, {layout.head_dim}, {args.context})"
    case = f"store of {plural(num_tokens, 'token')}"
    with recorder.row(case=case, shape=shape, format=name, part=layout.role) as row:
        vectors = batch * args.num_kv_heads * num_tokens
        nbytes = vectors * (layout.head_dim * DTYPE.itemsize + layout.bytes_per_token)
        inputs = store_inputs(layout, args, batch, num_tokens, num_sets(nbytes))
        row["relative_error"] = check_store(*inputs[0])
        row |= recorder.timed(time_graph(store, inputs), nbytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prefill, and slots of the cache")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--formats", nargs="+", type=argument(parse_fully_packed), default=fully_packed_formats())
    args = parse_arguments(parser)
    recorder = Recorder(args, Chart("case", ("shape", "format", "part"), ("of_read_ceiling",)))
    for num_tokens in (args.context, 1):
        for batch in args.batches:
            for name, pair in args.formats:
                pair = with_random_bases(pair, args.num_kv_heads, args.head_dim)
                for format_name, role in ((pair.key, "key"), (pair.value, "value")):
                    time_store(recorder, args, name, PackedLayout(format_name, role, args.head_dim), batch, num_tokens)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
