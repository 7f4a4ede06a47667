"""Eager operations on packed caches, compared with the read ceiling.

    python benchmarks/eager.py [--shape 4,32/8,128,32768] [--new-tokens 4096] [--formats int4 turboquant_4bit ...]

Eager code packs a plain cache, writes tokens, reorders sequences and dequantizes. For keys and values of every format,
this measures the time of each operation and the memory that it takes besides its operands and its result. Bytes count
what must be read and written: plain vectors, packed tokens, or both. Every result is first compared with the
plain-PyTorch specification on the first and the last sequence.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from recording import Chart, Recorder, argument, parse_arguments
from torch import Tensor

from kvcompile.benching.measuring import time_steps
from kvcompile.benching.random_bases import with_random_bases
from kvcompile.benching.workloads import DEVICE, DTYPE, Shape, check, default_formats, parse_formats, relative_error
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.packing import pack_tokens, read_tokens
from kvcompile.packed.tensor import PackedTensor


def specified(x: Tensor, layout: PackedLayout) -> Tensor:
    """``x``, [batch, num_kv_heads, tokens, head_dim], packed and decoded by the plain-PyTorch specification."""
    return read_tokens(pack_tokens(layout, x), layout, x.shape[2])


def temporaries(run: Callable[[], Any]) -> int:
    """Bytes that ``run`` allocates at its peak, without what its result keeps."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak - kept


def operations(
    shape: Shape, layout: PackedLayout, new_tokens: int
) -> dict[str, tuple[Callable[[], Any], int, Callable[[Any], float]]]:
    """For each operation: the call, the bytes that it must read and write, and a check of its result."""
    size = (shape.batch, shape.num_kv_heads, shape.context, shape.head_dim)
    plain = torch.randn(size, dtype=DTYPE, device=DEVICE)
    packed = PackedTensor.from_dense(plain, layout)
    new = torch.randn(*size[:2], new_tokens, shape.head_dim, dtype=DTYPE, device=DEVICE)
    positions = torch.arange(shape.context - new_tokens, shape.context, device=DEVICE)
    order = torch.arange(shape.batch - 1, -1, -1, device=DEVICE)
    plain_nbytes, packed_nbytes = plain.nbytes, packed.packed.nbytes
    ends = [0, shape.batch - 1]  # the sequences that are checked
    expected = specified(plain[ends], layout)

    def check_tokens(what: str, tokens: Tensor, reference: Tensor) -> float:
        return check(relative_error(tokens.float(), reference.float()), what)

    def check_packed(result: PackedTensor) -> float:
        return check_tokens("packing", result.dequantize()[ends], expected)

    def check_written(result: PackedTensor) -> float:
        after = plain[ends].clone()
        after[:, :, positions] = new[ends]
        packed_again = (x[:, :, positions] for x in (result.dequantize()[ends], specified(after, layout)))
        return check_tokens("index_copy_", *packed_again)

    def check_dequantized(result: Tensor) -> float:
        return check_tokens("dequantize", result[ends], expected)

    def check_reordered(result: PackedTensor) -> float:
        return check_tokens("index_select", result.dequantize()[ends], expected.flip(0))

    written = PackedTensor.from_dense(plain, layout)
    share = new_tokens / shape.context
    return {
        "pack a plain cache": (
            functools.partial(PackedTensor.from_dense, plain, layout), plain_nbytes + packed_nbytes, check_packed,
        ),
        f"index_copy_ of {new_tokens} tokens": (
            lambda: written.index_copy_(2, positions, new), new.nbytes + int(share * packed_nbytes), check_written,
        ),
        "dequantize": (packed.dequantize, plain_nbytes + packed_nbytes, check_dequantized),
        "index_select of sequences": (lambda: packed.index_select(0, order), 2 * packed_nbytes, check_reordered),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=argument(Shape.parse), default=Shape.parse("4,32/8,128,32768"))
    parser.add_argument("--new-tokens", type=int, default=4096, help="tokens that one write has")
    parser.add_argument("--formats", nargs="+", type=argument(parse_formats), default=default_formats())
    args = parse_arguments(parser)
    recorder = Recorder(args, Chart("case", ("format", "part"), ("of_read_ceiling",)))
    for name, pair in args.formats:
        pair = with_random_bases(pair, args.shape.num_kv_heads, args.shape.head_dim)
        for role in ("key", "value"):
            layout = pair.layout(role, args.shape.head_dim, DTYPE)
            for case, (run, nbytes, check_result) in operations(args.shape, layout, args.new_tokens).items():
                with recorder.row(case=case, shape=str(args.shape), format=name, part=role) as row:
                    row["relative_error"] = check_result(run())
                    row["temporary_megabytes"] = temporaries(run) / 1e6
                    row |= recorder.timed(time_steps(run, lambda: None), nbytes)
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
