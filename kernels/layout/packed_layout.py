"""The places of the bytes in a packed cache.

A packed cache is one uint8 tensor ``data`` of shape [num_blocks, batch, num_kv_heads, block_bytes]. A block holds
BLOCK_TOKENS consecutive tokens of one head, section after section (codes, scale, zero), and is contiguous. The block
dimension is outermost: a longer buffer has the same strides, and a prefix of it is the shorter cache.

Codes of keys lie row-major, [BLOCK_TOKENS][width]; codes of values lie column-major, [width][BLOCK_TOKENS]. Both
products of attention (K q and V^T p) then read their packed operand with a contiguous reduction dimension. Scales and
zero points lie row-major, or once for all tokens of the block if the section is shared.

A cache with a :class:`Residual` also keeps some blocks of tokens exactly, in the dtype of the cache. They lie in a
header of ``header_blocks`` blocks before the blocks of tokens. The header has ``num_entries`` entries; each holds the
BLOCK_TOKENS tokens of one block and a tag, which names the block. The header is a run of rows of ``head_dim`` elements
in the residual's dtype. Row ``r`` lies in block ``r // rows_per_block``, at byte ``r % rows_per_block * row_bytes``.
Row 0 holds the tags, int32: ``1 +`` the number of the block that the entry holds, or 0 for an empty entry. The tokens
of entry ``e`` are the BLOCK_TOKENS rows from ``1 + e * BLOCK_TOKENS`` on, for keys and values alike. All-zero bytes are
the cache of zeros here too, and a prefix is still the shorter cache. :mod:`kvcompile.kernels.spec.residual`
specifies the use of the header.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.formats import get_format, of_heads
from kvcompile.kernels.formats.base import BLOCK_TOKENS, HEAD_DIM, Format
from kvcompile.kernels.formats.bit_planes import Section
from kvcompile.kernels.lang.gpus import why_unsupported
from kvcompile.kernels.layout.dtypes import dtype_name

TAG_BYTES = torch.int32.itemsize

FEW_TOKENS = 16
"""The most tokens of a sequence that count as few, see :func:`are_few`."""

MIN_GROWING_BLOCKS = 2
"""The least number of blocks of a growing cache: Dynamo specialises on the sizes 0 and 1."""

Role = Literal["key", "value"]

CACHE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""The dtypes that a packed cache can show. Compiled graphs pack caches of fewer dtypes."""

_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
_SPEC = re.compile(r"(?P<format>[^\[\]]+)(\[recent=(?P<recent>\d+),sinks=(?P<sinks>\d+),(?P<dtype>\w+)\])?")


@dataclass(frozen=True)
class Residual:
    """The tokens of a packed cache that are also kept exactly, in the dtype of the cache.

    Attributes:
        sink_blocks: number of blocks, from the first block on, that are always kept exactly.
        recent_blocks: number of blocks, among those written last, that are kept exactly.
        dtype: the dtype of the cache: float32, float16 or bfloat16.

    Raises:
        ValueError: the numbers of blocks are negative or both 0, or the dtype is not one of the three.
    """

    sink_blocks: int
    recent_blocks: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if min(self.sink_blocks, self.recent_blocks) < 0 or self.num_entries == 0:
            raise ValueError(
                f"a residual needs at least one block, but has {self.sink_blocks} first and {self.recent_blocks} recent"
            )
        if self.dtype not in _DTYPES.values():
            raise ValueError(f"the dtype of a residual must be one of {', '.join(_DTYPES)}, but is {self.dtype}")

    @property
    def num_entries(self) -> int:
        """The number of blocks that are kept exactly, each in an entry of the header."""
        return self.sink_blocks + self.recent_blocks

    @property
    def description(self) -> str:
        """The numbers of recent and first tokens that are kept exactly, for people: ``65 to 128 recent, 64 first``.

        The newest block may hold a single token.
        """
        recent, first = (blocks * BLOCK_TOKENS for blocks in (self.recent_blocks, self.sink_blocks))
        parts = [f"{recent - BLOCK_TOKENS + 1} to {recent} recent"] if recent else []
        return ", ".join([*parts, f"{first} first"] if first else parts)

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype)
        return f"[recent={self.recent_blocks},sinks={self.sink_blocks},{dtype}]"


@dataclass(frozen=True)
class PackedLayout:
    """The layout of one packed cache tensor.

    Attributes:
        format_name: a name in the format registry.
        role: ``key`` or ``value``.
        head_dim: channels of a vector.
        residual: tokens that are also kept exactly; None without such tokens.
    """

    format_name: str
    role: Role
    head_dim: int
    residual: Residual | None = None

    @classmethod
    @functools.cache
    def parse(cls, spec: str, role: Role, head_dim: int) -> PackedLayout:
        """The layout whose :attr:`spec` is ``spec``.

        Args:
            spec: the name of a format, optionally followed by a residual:
                ``int4_per_channel[recent=1,sinks=0,float16]``.
            role: ``key`` or ``value``.
            head_dim: channels of a vector.

        Raises:
            ValueError: ``spec`` or ``role`` is not valid, or the format is unknown.
        """
        match = _SPEC.fullmatch(spec)
        if match is None or (match["dtype"] is not None and match["dtype"] not in _DTYPES):
            form = f"FORMAT[recent=BLOCKS,sinks=BLOCKS,DTYPE] with DTYPE one of {', '.join(_DTYPES)}"
            raise ValueError(f"{spec!r} is neither the name of a cache format nor {form}")
        if role not in get_args(Role):
            raise ValueError(f"{role!r} is not a role of a cache; roles: {', '.join(get_args(Role))}")
        residual = None
        if match["dtype"] is not None:
            residual = Residual(int(match["sinks"]), int(match["recent"]), _DTYPES[match["dtype"]])
        return cls(get_format(match["format"]).name, role, head_dim, residual)

    @property
    def spec(self) -> str:
        """Format and residual in one text, as operators take it: ``int4_per_channel[recent=1,sinks=0,bfloat16]``."""
        return f"{self.format_name}{self.residual or ''}"

    def of_heads(self, first: int, count: int) -> PackedLayout:
        """The layout of ``count`` KV heads of a cache, from ``first`` on; only calibrated formats get another one."""
        name = of_heads(self.format_name, first, count)
        return self if name == self.format_name else replace(self, format_name=name)

    @property
    def description(self) -> str:
        """Format and residual for people, with counts of tokens: ``int4_per_channel (1 to 64 recent)``."""
        name = self.format_name.partition("@")[0]
        return name if self.residual is None else f"{name} ({self.residual.description})"

    @property
    def why_not_split(self) -> str | None:
        """Why context-parallel ranks cannot split the tokens of a cache with this layout; None if they can."""
        if self.residual is not None:
            return f"{self.description} keeps tokens in full precision"
        return f"{self.description} is calibrated" if self.format.is_calibrated else None

    @property
    def residual_bytes(self) -> int:
        """Bytes of the header per sequence and head."""
        return self.header_blocks * self.block_bytes

    @property
    def format(self) -> Format:
        return get_format(self.format_name)

    def unsupported(self, dtype: torch.dtype) -> str | None:
        """The reason why a cache of ``dtype`` cannot have this layout; None if it can."""
        if dtype not in CACHE_DTYPES:
            return f"a cache holds floats of 16, 32 or 64 bits, not {dtype_name(dtype)}"
        reason = self.format.unsupported(self.head_dim, self.role)
        if reason is not None:
            return reason
        if self.format.granularity == "channel" and (self.residual is None or not self.residual.recent_blocks):
            return "scales per channel need a residual with at least one block of recent tokens"
        if self.residual is None:
            return None
        if self.residual.dtype != dtype:
            return f"the residual is {self.residual.dtype}, but the cache is {dtype}: both need the same dtype"
        if TAG_BYTES * self.residual.num_entries > self.row_bytes:
            most = self.row_bytes // TAG_BYTES * BLOCK_TOKENS
            return f"at head_dim {self.head_dim} a residual can have at most {most} first and recent tokens"
        return None

    def unsupported_on(self, device: torch.device) -> str | None:
        """The reason why kernels cannot read this layout on ``device``; None if they can."""
        return why_unsupported(device)

    @property
    def takes_new_tokens(self) -> bool:
        """Whether attention can be exact for new tokens (:mod:`kvcompile.kernels.spec.new_tokens`).

        It cannot for calibrated formats, whose stored basis may lack channels, nor for latents, which are always read
        packed.
        """
        return self.format.has_levels and not self.format.is_calibrated

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        return self.format.sections(self.head_dim)

    @functools.cached_property
    def section_offsets(self) -> dict[str, int]:
        """The byte offset of each section within a block, by name."""
        offsets, offset = {}, 0
        for section in self.sections:
            offsets[section.name] = offset
            offset += _bytes_in_block(section)
        return offsets

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token and head, metadata included. Shared metadata takes a whole number of bytes per token."""
        return self.block_bytes // BLOCK_TOKENS

    @functools.cached_property
    def block_bytes(self) -> int:
        return sum(map(_bytes_in_block, self.sections))

    def column_major(self, section: Section) -> bool:
        return self.role == "value" and section.is_codes

    @property
    def row_bytes(self) -> int:
        """Bytes of an exact token, a row of the header."""
        return self.head_dim * self.residual.dtype.itemsize if self.residual is not None else 0

    @property
    def rows_per_block(self) -> int:
        """Rows of the header in one block."""
        return self.block_bytes // self.row_bytes

    @functools.cached_property
    def header_blocks(self) -> int:
        """Blocks of the header, which lie before the blocks of tokens; 0 without a residual."""
        if self.residual is None:
            return 0
        return -(-(1 + self.residual.num_entries * BLOCK_TOKENS) // self.rows_per_block)

    def blocks(self, num_tokens: int) -> int:
        """Blocks of a cache with room for ``num_tokens`` tokens, header included; sizes may be symbolic."""
        return self.header_blocks + num_blocks(num_tokens)

    def growing_blocks(self, num_tokens: int) -> int:
        """Blocks that a growing cache of ``num_tokens`` tokens shows, header included; sizes may be symbolic."""
        return self.header_blocks + growing_blocks(num_tokens)

    def token_blocks(self, data: Tensor) -> int:
        """Blocks of tokens in ``data``, without the header."""
        return data.shape[0] - self.header_blocks

    def shape(self, num_tokens: int, batch: int, num_kv_heads: int) -> tuple[int, int, int, int]:
        """The shape of ``data`` for a cache with room for ``num_tokens`` tokens."""
        return (self.blocks(num_tokens), batch, num_kv_heads, self.block_bytes)

    def nbytes(self) -> sympy.Expr:
        """The bytes of ``data`` as an expression in ``num_tokens``, ``batch`` and ``num_kv_heads``."""
        num_tokens, batch, heads = sympy.symbols("num_tokens batch num_kv_heads", integer=True, positive=True)
        per_token = self.format.bytes_per_token().subs(HEAD_DIM, self.head_dim)
        blocks = self.header_blocks + sympy.ceiling(num_tokens / BLOCK_TOKENS)
        return batch * heads * BLOCK_TOKENS * blocks * per_token

    def tags(self, data: Tensor) -> Tensor:
        """A view of the tags in the header, int32 [batch, num_kv_heads, num_entries]."""
        assert self.residual is not None
        if self.residual.dtype.itemsize == TAG_BYTES:
            # Generated code for CPUs makes this view of the bytes once, for tags and rows.
            return _viewed(_viewed(data, self.residual.dtype)[0, ..., : self.residual.num_entries], torch.int32)
        return _viewed(data, torch.int32)[0, ..., : self.residual.num_entries]

    def rows(self, data: Tensor) -> Tensor:
        """The tokens of all entries, [batch, num_kv_heads, num_entries, BLOCK_TOKENS, head_dim] in the residual's
        dtype.

        The result is a copy, because an entry may begin in one block and end in the next.
        """
        assert self.residual is not None
        header = _viewed(data, self.residual.dtype)[: self.header_blocks, ..., : self.rows_per_block * self.head_dim]
        rows = header.unflatten(-1, (self.rows_per_block, self.head_dim)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return rows[:, :, 1 : 1 + self.residual.num_entries * BLOCK_TOKENS].unflatten(2, (-1, BLOCK_TOKENS))

    def split(self, data: Tensor) -> dict[str, Tensor]:
        """Typed views of the sections in the blocks of tokens of ``data``, by name.

        A view is [num_blocks, batch, num_kv_heads, BLOCK_TOKENS, width], or [num_blocks, batch, num_kv_heads, 1, width]
        for a section that a block shares.
        """
        sections = {}
        # One view for each dtype: in generated code for CPUs a view of other dtype is a call of PyTorch.
        views = {data.dtype: data[self.header_blocks :]}
        for section in self.sections:
            if section.dtype not in views:
                views[section.dtype] = _viewed(data, section.dtype)[self.header_blocks :]
            typed = views[section.dtype]
            start = self.section_offsets[section.name] // section.dtype.itemsize
            rows = 1 if section.shared else BLOCK_TOKENS
            flat = typed[..., start : start + section.width * rows]
            if self.column_major(section):
                sections[section.name] = flat.unflatten(-1, (section.width, rows)).transpose(-1, -2)
            else:
                sections[section.name] = flat.unflatten(-1, (rows, section.width))
        return sections

    def token_bytes(self, sections: dict[str, Tensor]) -> Tensor:
        """The bytes of tokens, uint8 [..., n, bytes_per_token], from their sections [..., n, width], in section order.

        The bytes of few tokens are the bitwise or of padded int32 tensors, which Inductor fuses into one kernel. Each
        part of a concatenation would get a buffer. For many tokens, copying bytes is cheaper than computing on four
        times their size.
        """
        tensors = [sections[section.name].to(section.dtype) for section in self.sections]
        if not are_few(tensors[0].shape[:-1]):
            return torch.cat([_bytes_of(x) for x in tensors], dim=-1)
        columns, first = [], 0
        for x, section in zip(tensors, self.sections, strict=True):
            columns.append(F.pad(_byte_values(x), (first, self.bytes_per_token - first - section.nbytes)))
            first += section.nbytes
        return functools.reduce(torch.bitwise_or, columns).to(torch.uint8)

    def block_byte_values(self, sections: dict[str, Tensor]) -> list[Tensor]:
        """Inverse of :meth:`split`: int32 [..., nbytes] from [..., BLOCK_TOKENS, width], for each section."""
        columns = []
        for section in self.sections:
            values = sections[section.name].to(section.dtype)
            values = values.transpose(-1, -2) if self.column_major(section) else values
            columns.append(_byte_values(values).flatten(-2))
        return columns

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry: its tokens and its tag."""
        return BLOCK_TOKENS * self.row_bytes + TAG_BYTES

    @property
    def written_entry_bytes(self) -> int:
        """Bytes that a write to an entry takes: its tokens, then its tag repeated until it is as long as a row.

        The number must be a multiple of ``row_bytes``. Inductor splits a CPU loop that divides its index into runs of
        the divisor, here ``row_bytes``, and drops the remainder (``try_loop_split``, torch 2.11 to 2.13).
        """
        return (BLOCK_TOKENS + 1) * self.row_bytes

    def entry_place(self, entry: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
        """Block and offset in ``data`` of byte ``byte`` of a write to an entry; all are int64 and broadcast."""
        row, rest = self.first_row(entry) + byte // self.row_bytes, byte % self.row_bytes
        in_rows = byte < BLOCK_TOKENS * self.row_bytes
        block = torch.where(in_rows, row // self.rows_per_block, 0)
        offset = torch.where(
            in_rows, row % self.rows_per_block * self.row_bytes + rest, entry * TAG_BYTES + rest % TAG_BYTES
        )
        return block, offset

    def first_row(self, entry: Tensor) -> Tensor:
        """The row of the header with the first token of each entry, int64 [...]."""
        return 1 + entry * BLOCK_TOKENS

    def entry_blocks(self, entry: Tensor) -> Tensor:
        """The blocks of the header in which tokens of an entry lie, after block 0, which has the tags.

        Args:
            entry: int64 [..., 1].

        Returns:
            int64 [..., m]; a block may occur twice.
        """
        most = 2 + (BLOCK_TOKENS - 2) // self.rows_per_block
        block = torch.arange(min(1 + most, self.header_blocks), device=entry.device)
        if 1 + most >= self.header_blocks:
            return block.expand(*entry.shape[:-1], -1)
        first = self.first_row(entry) // self.rows_per_block
        return torch.where(block == 0, 0, (first + block - 1).clamp(1, self.header_blocks - 1))

    def with_tag(self, row: Tensor, entry: Tensor, tags: Tensor) -> Tensor:
        """Row 0 of a header, bytes as int32 [batch, num_kv_heads, row_bytes], with a new tag of one entry.

        Args:
            row: the row.
            entry: the entry, int64 [batch or 1, 1, 1].
            tags: the tag, int64 [batch, num_kv_heads, 1].
        """
        byte = torch.arange(self.row_bytes, dtype=torch.int32, device=row.device)
        tag = tags.int() >> 8 * (byte & TAG_BYTES - 1) & 0xFF
        return torch.where(byte & -TAG_BYTES == TAG_BYTES * entry.int(), tag, row)

    def entry_byte_values(self, rows: Tensor, tags: Tensor) -> list[Tensor]:
        """The bytes of a write to entries, as a list of int32 [..., nbytes].

        Args:
            rows: tokens, [..., BLOCK_TOKENS, head_dim] in the residual's dtype.
            tags: int64 [...].
        """
        tag = tags.int()[..., None].expand(*tags.shape, self.row_bytes // TAG_BYTES)
        return [_byte_values(rows).flatten(-2), _byte_values(tag)]

    def byte_offsets(self, row: Tensor) -> Tensor:
        """Offsets in a block of the :meth:`token_bytes` of tokens: int64 [..., n, bytes_per_token] from rows [..., n].

        Inductor inlines the choices between sections into the store, and keeps a concatenation in memory. Offsets of
        few tokens are choices, which take no memory and no further kernel. Offsets of many tokens are concatenated, so
        that all heads read offsets that are computed once.
        """
        few, row = are_few(row.shape), row[..., None]
        if not few:
            columns = [
                self._offsets_in_block(section, torch.arange(section.nbytes, device=row.device), row)
                for section in self.sections
            ]
            return torch.cat(columns, dim=-1)
        byte = torch.arange(self.bytes_per_token, device=row.device)
        offsets, first = byte, self.bytes_per_token
        for section in reversed(self.sections):
            first -= section.nbytes
            index = byte - first
            offsets = torch.where(index < section.nbytes, self._offsets_in_block(section, index, row), offsets)
        return offsets

    def _offsets_in_block(self, section: Section, byte: Tensor, row: Tensor) -> Tensor:
        """Offsets in a block of the bytes ``byte`` of a section, for the tokens of ``row``; both int64, and broadcast.

        Without divisions by the size of an item Inductor's CPU loops are not split, see :attr:`written_entry_bytes`.
        """
        if self.column_major(section):
            itemsize = section.dtype.itemsize
            within = (byte & -itemsize) * BLOCK_TOKENS + row * itemsize + (byte & itemsize - 1)
        else:
            within = row * section.nbytes + byte
        return self.section_offsets[section.name] + within


def are_few(shape: torch.Size) -> bool:
    """Whether tokens [..., n] are few, as in decode steps: code computes their bytes and offsets where it stores them.

    The choice changes no byte. It serves the code that Inductor generates for CPUs: with many tokens, arithmetic that
    each byte of each head repeats takes longer than reading bytes and offsets that are ready. A symbolic ``n`` counts
    as many.
    """
    n = shape[-1] if shape else 1
    return isinstance(n, int) and n <= FEW_TOKENS


def num_blocks(num_tokens: int) -> int:
    """The number of blocks that hold ``num_tokens`` tokens; sizes may be symbolic."""
    return (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS


def growing_blocks(num_tokens: int) -> int:
    """Blocks that a growing cache of ``num_tokens`` tokens shows, without a header; sizes may be symbolic."""
    return torch.sym_max(num_blocks(num_tokens), MIN_GROWING_BLOCKS)


def _bytes_in_block(section: Section) -> int:
    return section.nbytes * (1 if section.shared else BLOCK_TOKENS)


def _viewed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """``data.view(dtype)``, also where a dimension of size 1 has a stride that the sizes of the dtypes do not divide.

    Inductor gives such strides to buffers of its own, and ``view`` of PyTorch 2.11 refuses them.
    """
    ones = [dim for dim, size in enumerate(data.shape[:-1]) if isinstance(size, int) and size == 1]
    viewed = data.squeeze(ones).view(dtype)
    for dim in ones:
        viewed = viewed.unsqueeze(dim)
    return viewed


def _bytes_of(x: Tensor) -> Tensor:
    """:func:`_byte_values` as uint8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else _byte_values(x).to(torch.uint8)


def _byte_values(x: Tensor) -> Tensor:
    """The little-endian bytes of ``x`` [..., width] as int32 [..., width * itemsize].

    They are computed by arithmetic on the bits, which Inductor fuses. ``view(torch.uint8)`` would be a kernel of its
    own, and Inductor of torch 2.11 computes wrong strides for it.
    """
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8).int()
    bits = x.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize]).int()
    shifts = 8 * torch.arange(x.dtype.itemsize, dtype=torch.int32, device=x.device)
    return ((bits.unsqueeze(-1) >> shifts) & 0xFF).flatten(-2)
