"""Where the bytes of a packed cache lie.

A packed cache is one uint8 tensor ``data`` of shape [num_blocks, batch, num_kv_heads, block_bytes]. A block holds
BLOCK_TOKENS consecutive tokens of one head, section after section (codes, scale, zero), and is contiguous. The block
dimension is outermost, so that a longer buffer has the same strides and a prefix of it is the shorter cache.

Codes of a key lie row-major, [BLOCK_TOKENS][width]; codes of a value lie column-major, [width][BLOCK_TOKENS]. With that
both products of attention (K q and V^T p) read their packed operand with the reduction dimension contiguous. Scales and
zero points lie row-major, or once for all tokens of the block if the section is shared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import sympy
import torch
from torch import Tensor

from kvcompile.kernels.bit_planes import Section
from kvcompile.kernels.formats import get_format
from kvcompile.kernels.formats.base import BLOCK_TOKENS, HEAD_DIM, Format

MIN_GROWING_BLOCKS = 2
"""Least blocks of a cache that grows: Dynamo specialises on sizes 0 and 1."""

Role = Literal["key", "value"]


@dataclass(frozen=True)
class PackedLayout:
    """The layout of one packed cache tensor.

    Attributes:
        format_name: a name in the format registry.
        role: ``key`` or ``value``.
        head_dim: channels of a vector.
    """

    format_name: str
    role: Role
    head_dim: int

    @property
    def format(self) -> Format:
        return get_format(self.format_name)

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        return self.format.sections(self.head_dim)

    @functools.cached_property
    def section_offsets(self) -> dict[str, int]:
        """Byte offset of every section within a block."""
        offsets, offset = {}, 0
        for section in self.sections:
            offsets[section.name] = offset
            offset += _bytes_in_block(section)
        return offsets

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token and head, metadata included; shared metadata is a whole number of bytes per token."""
        return self.block_bytes // BLOCK_TOKENS

    @functools.cached_property
    def block_bytes(self) -> int:
        return sum(map(_bytes_in_block, self.sections))

    def column_major(self, section: Section) -> bool:
        return self.role == "value" and section.is_codes

    def shape(self, num_tokens: int, batch: int, num_kv_heads: int) -> tuple[int, int, int, int]:
        """Shape of ``data`` for a cache of ``num_tokens`` slots."""
        return (num_blocks(num_tokens), batch, num_kv_heads, self.block_bytes)

    def nbytes(self) -> sympy.Expr:
        """Bytes of ``data`` as an expression in ``num_tokens``, ``batch`` and ``num_kv_heads``."""
        num_tokens, batch, heads = sympy.symbols("num_tokens batch num_kv_heads", integer=True, positive=True)
        per_token = self.format.bytes_per_token().subs(HEAD_DIM, self.head_dim)
        return batch * heads * BLOCK_TOKENS * sympy.ceiling(num_tokens / BLOCK_TOKENS) * per_token

    def split(self, data: Tensor) -> dict[str, Tensor]:
        """Typed views of ``data``, one a section, each [num_blocks, batch, num_kv_heads, BLOCK_TOKENS, width].

        Shared sections are [num_blocks, batch, num_kv_heads, 1, width].
        """
        parts = {}
        for section in self.sections:
            typed = data if section.dtype == torch.uint8 else data.view(section.dtype)
            start = self.section_offsets[section.name] // section.dtype.itemsize
            rows = 1 if section.shared else BLOCK_TOKENS
            flat = typed[..., start : start + section.width * rows]
            if self.column_major(section):
                parts[section.name] = flat.unflatten(-1, (section.width, rows)).transpose(-1, -2)
            else:
                parts[section.name] = flat.unflatten(-1, (rows, section.width))
        return parts

    def token_bytes(self, parts: dict[str, Tensor]) -> Tensor:
        """Sections [..., width] of tokens -> their bytes, uint8 [..., bytes_per_token], in section order."""
        return torch.cat([_bytes_of(parts[section.name].to(section.dtype)) for section in self.sections], dim=-1)

    def byte_offsets(self, token_in_block: Tensor) -> Tensor:
        """Where the bytes of :meth:`token_bytes` lie in a block: int64 [...] -> int64 [..., bytes_per_token]."""
        token = token_in_block[..., None]
        columns = []
        for section in self.sections:
            start, width = self.section_offsets[section.name], section.nbytes
            index = torch.arange(width, device=token.device)
            itemsize = section.dtype.itemsize
            if self.column_major(section):
                within = (index // itemsize * BLOCK_TOKENS + token) * itemsize + index % itemsize
            else:
                within = token * width + index
            columns.append(start + within)
        return torch.cat(columns, dim=-1)


def num_blocks(num_tokens: int) -> int:
    """Blocks that hold ``num_tokens`` tokens; also for symbolic sizes."""
    return (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS


def growing_blocks(num_tokens: int) -> int:
    """Blocks of ``num_tokens`` tokens that a cache which grows shows; also for symbolic sizes."""
    return torch.sym_max(num_blocks(num_tokens), MIN_GROWING_BLOCKS)


def _bytes_in_block(section: Section) -> int:
    return section.nbytes * (1 if section.shared else BLOCK_TOKENS)


def _bytes_of(x: Tensor) -> Tensor:
    """Little-endian bytes of ``x`` [..., width]: uint8 [..., width * itemsize].

    By arithmetic on the bits, which Inductor fuses; ``view(torch.uint8)`` is a kernel of its own, and Inductor of torch
    2.11 computes wrong strides for it.
    """
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    bits = x.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize]).int()
    shifts = 8 * torch.arange(x.dtype.itemsize, device=x.device)
    return ((bits.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8).flatten(-2)
