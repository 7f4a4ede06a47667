"""Shared by the tests of the DeepSeek-V4 K cache: tokens that are hard to quantize, and requests on shuffled pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.formats.ds_mla_rows import HEAD_DIM, TOKEN_BYTES

NOWHERE = -1_000_000
"""The value of block table entries that must not be read."""

POISON = 0xA5


def random_tokens(num_tokens: int, seed: int = 0) -> Tensor:
    """Tokens, bfloat16 [num_tokens, HEAD_DIM]: magnitudes differ between blocks, and some rows are hard to quantize."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(num_tokens, HEAD_DIM, generator=generator)
    k *= torch.exp2(torch.randint(-20, 20, (num_tokens, HEAD_DIM // 64), generator=generator)).repeat_interleave(64, 1)
    hard = [
        lambda row: row.zero_(),
        lambda row: row.fill_(-0.0),
        lambda row: row.fill_(2.0**-133),  # subnormal in bfloat16
        lambda row: row.copy_(torch.linspace(-1.0, 1.0, HEAD_DIM) * 3.38e38),  # up to the largest bfloat16
        lambda row: row.copy_(torch.arange(HEAD_DIM) % 64 * 2.0**-9),  # ties between e4m3 numbers
        lambda row: row.copy_(448.0 * torch.exp2((torch.arange(HEAD_DIM) // 64).float())),  # blocks at 448 * 2**n
    ]
    for row, change in zip(k[1::2], hard, strict=False):
        change(row)
    return k.to(torch.bfloat16)


def empty_cache(num_blocks: int, block_size: int) -> Tensor:
    """A cache full of POISON, uint8 [num_blocks, block_size, TOKEN_BYTES]."""
    return torch.full((num_blocks, block_size, TOKEN_BYTES), POISON, dtype=torch.uint8)


def random_cache(num_blocks: int, block_size: int, seed: int = 0) -> Tensor:
    """A cache of arbitrary bytes, uint8 [num_blocks, block_size, TOKEN_BYTES]: every code and every scale occurs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_blocks, block_size, TOKEN_BYTES), dtype=torch.uint8, generator=generator)


@dataclass(frozen=True)
class Requests:
    """Requests that gather from a paged cache.

    Attributes:
        seq_lens: int32 [num_reqs].
        gather_lens: int32 [num_reqs], or None.
        block_table: int32 [num_reqs, max_blocks_per_seq], distinct pages in random order. Entries without a token of
            the sequence, and entries that are not gathered, are NOWHERE.
        block_size: the number of tokens in a page.
        num_blocks: the number of pages in the cache.
    """

    seq_lens: Tensor
    gather_lens: Tensor | None
    block_table: Tensor
    block_size: int
    num_blocks: int

    @classmethod
    def on_shuffled_pages(
        cls, seq_lens: list[int], gather_lens: list[int] | None, block_size: int, seed: int = 0
    ) -> Requests:
        """Requests on random pages of a cache with two spare pages."""
        pages = [-(-seq_len // block_size) for seq_len in seq_lens]
        num_blocks = sum(pages) + 2
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        block_table = torch.full((len(seq_lens), max(pages, default=0) + 1), NOWHERE)
        for req, (seq_len, count) in enumerate(zip(seq_lens, pages, strict=True)):
            first = 0 if gather_lens is None else (seq_len - gather_lens[req]) // block_size
            start = sum(pages[:req])
            block_table[req, first:count] = shuffled[start + first : start + count]
        lens = [None if lens is None else torch.tensor(lens, dtype=torch.int32) for lens in (seq_lens, gather_lens)]
        return cls(lens[0], lens[1], block_table.int(), block_size, num_blocks)

    def gathered(self) -> list[int]:
        """The number of tokens that each request gathers."""
        return (self.seq_lens if self.gather_lens is None else self.gather_lens).tolist()

    def slots(self) -> list[Tensor]:
        """Slots of the tokens that each request gathers, int64."""
        slots = []
        for req, (seq_len, gather_len) in enumerate(zip(self.seq_lens.tolist(), self.gathered(), strict=True)):
            position = torch.arange(seq_len - gather_len, seq_len)
            page = self.block_table[req].long()[position // self.block_size]
            slots.append(page * self.block_size + position % self.block_size)
        return slots

    def to(self, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor, int]:
        """The arguments of the gather from ``seq_lens`` to ``block_size``."""
        gather_lens = None if self.gather_lens is None else self.gather_lens.to(device)
        return self.seq_lens.to(device), gather_lens, self.block_table.to(device), self.block_size


def poisoned_output(requests: Requests, offset: int, spare_rows: int = 3) -> Tensor:
    """Output memory, bfloat16 [num_reqs + 1, rows, HEAD_DIM], full of a number that no test stores.

    It has ``spare_rows`` rows beyond the gather.
    """
    rows = offset + max(requests.gathered(), default=0) + spare_rows
    return torch.full((len(requests.seq_lens) + 1, rows, HEAD_DIM), -1.2345e-7, dtype=torch.bfloat16)


def assert_same_bfloat16(actual: Tensor, expected: Tensor) -> None:
    """The bits of ``x`` with one pattern for every NaN."""
    assert actual.dtype == expected.dtype == torch.bfloat16
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits, expected_bits = actual.view(torch.int16), expected.view(torch.int16)
    assert torch.equal(bits.masked_fill(nan, 0), expected_bits.masked_fill(nan, 0))
