"""The DeepSeek-V4 K cache operators, compared with a copy from device memory to device memory.

    python benchmarks/deepseek_v4.py [--gathers 1x32000 1x262144 8x32768] [--inserts 8192 65536] [--block-size 64]

The program measures ``dequantize_and_gather_k_cache`` of all tokens of requests on shuffled pages, and
``quantize_and_insert_k_cache`` of tokens into shuffled pages. For each token, a gather reads 448 codes, 7 scales, 128
bytes of rotary embedding and 4 bytes of the block table, and writes 1024 bytes. For each token, an insertion reads 1024
bytes and a slot of 8 bytes, and writes 584 bytes. The baseline is a copy that reads and writes as many bytes. Every
result is first compared with the plain-PyTorch specification, bit for bit.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import ClassVar

import torch
from recording import Chart, Recorder, parse_arguments
from torch import Tensor

from kvcompile.benching.measuring import Timing, num_sets, time_graph
from kvcompile.benching.workloads import DEVICE
from kvcompile.kernels.deepseek_v4 import ops as deepseek_v4_ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.formats import ds_mla_rows as spec


@dataclass(frozen=True)
class Insert:
    """Tokens that are inserted into a cache with as many pages as they need.

    Attributes:
        num_tokens: number of tokens.
        block_size: tokens of a page.
        op: name of the operator.
        changed: index of the argument that the operator changes.
    """

    num_tokens: int
    block_size: int
    op: ClassVar[str] = "quantize_and_insert_k_cache"
    changed: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens"

    @property
    def nbytes(self) -> int:
        """Bytes that must be read and written."""
        return self.num_tokens * (2 * spec.HEAD_DIM + 8 + spec.TOKEN_BYTES)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """The arguments of the operator: random tokens and an empty cache."""
        num_blocks = -(-self.num_tokens // self.block_size)
        position = torch.arange(self.num_tokens, device=DEVICE)
        page = torch.randperm(num_blocks, device=DEVICE)[position // self.block_size]
        k = torch.randn(self.num_tokens, spec.HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        k_cache = torch.zeros(num_blocks, self.block_size, spec.TOKEN_BYTES, dtype=torch.uint8, device=DEVICE)
        return k, k_cache, page * self.block_size + position % self.block_size, self.block_size


@dataclass(frozen=True)
class Gather:
    """Requests of equal length whose tokens are all gathered; attributes as in :class:`Insert`."""

    num_reqs: int
    num_tokens: int
    block_size: int
    op: ClassVar[str] = "dequantize_and_gather_k_cache"
    changed: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"{self.num_reqs} x {self.num_tokens} tokens"

    @property
    def nbytes(self) -> int:
        """Bytes that must be read and written."""
        read = spec.NOPE_DIM + spec.NUM_SCALES + 2 * spec.ROPE_DIM + 4
        return self.num_reqs * self.num_tokens * (read + 2 * spec.HEAD_DIM)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, None, Tensor, int, int]:
        """The arguments of the operator: a cache full of random tokens and an empty output."""
        pages = -(-self.num_tokens // self.block_size)
        inserted = Insert(self.num_reqs * pages * self.block_size, self.block_size).arguments()
        torch.ops.kvcompile.quantize_and_insert_k_cache(*inserted)
        block_table = torch.randperm(self.num_reqs * pages, dtype=torch.int32, device=DEVICE)
        seq_lens = torch.full((self.num_reqs,), self.num_tokens, dtype=torch.int32, device=DEVICE)
        out = torch.zeros(self.num_reqs, self.num_tokens, spec.HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        return out, inserted[1], seq_lens, None, block_table.view(self.num_reqs, pages), self.block_size, 0


def check_bits(workload: Insert | Gather, arguments: tuple) -> None:
    """Run the operator and the specification, and compare the tensors that they change.

    Raises:
        ArithmeticError: a bit differs.
    """
    actual = arguments[workload.changed]
    expected = torch.zeros_like(actual)
    getattr(torch.ops.kvcompile, workload.op)(*arguments)
    getattr(spec, workload.op)(*arguments[: workload.changed], expected, *arguments[workload.changed + 1 :])
    wrong = (actual.view(torch.uint8) != expected.view(torch.uint8)).sum().item()
    if wrong:
        raise ArithmeticError(f"{workload.op} is wrong: {wrong} bytes differ from the specification")


def time_workload(recorder: Recorder, workload: Insert | Gather) -> None:
    """Add a row for a workload."""
    with recorder.row(case=type(workload).__name__.lower(), shape=str(workload)) as row:
        inputs = [workload.arguments() for _ in range(num_sets(workload.nbytes))]
        check_bits(workload, inputs[0])
        copy = Timing(workload.nbytes / recorder.results.ceilings["copy"], 0.0, "graph")
        timing = time_graph(getattr(torch.ops.kvcompile, workload.op), inputs)
        row |= recorder.timed(timing, workload.nbytes, ("copy ceiling", copy))


def parse_requests(text: str) -> tuple[int, int]:
    """Parse ``REQUESTSxTOKENS``, such as ``8x32768``: the number of requests, and the tokens of each."""
    num_reqs, _, num_tokens = text.partition("x")
    if not (num_reqs.isdecimal() and num_tokens.isdecimal() and int(num_reqs) and int(num_tokens)):
        raise argparse.ArgumentTypeError(f"{text!r} is not REQUESTSxTOKENS (example: 8x32768)")
    return int(num_reqs), int(num_tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gathers", nargs="*", type=parse_requests, default=[(1, 32000), (1, 262144), (8, 32768)])
    parser.add_argument("--inserts", nargs="*", type=int, default=[8192, 65536])
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a page (default: %(default)s)")
    args = parse_arguments(parser)
    recorder = Recorder(args, Chart("case", ("shape",), ("speedup",)))
    for num_reqs, num_tokens in args.gathers:
        time_workload(recorder, Gather(num_reqs, num_tokens, args.block_size))
    for num_tokens in args.inserts:
        time_workload(recorder, Insert(num_tokens, args.block_size))
    return recorder.finish()


if __name__ == "__main__":
    raise SystemExit(main())
