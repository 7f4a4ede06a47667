"""The compile-time description of a packed cache, the parameter that lets one kernel serve every format."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcompile.compat.triton_names import PREFERS_WARPGROUPS
from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.bit_planes import HIGH_SECTIONS, WordPacking
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.lang.triton import INTERPRETED, tl, triton
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Role


@dataclass(frozen=True)
class ExactBlocks:
    """The compile-time description of a :class:`~kvcompile.kernels.layout.packed_layout.Residual`.

    Attributes:
        dtype: Triton dtype of exact tokens.
        sink_blocks: number of first blocks, each with a separate entry.
        recent_blocks: number of entries that all other blocks share.
        num_entries: number of all entries.
        padded_entries: ``num_entries`` rounded up to a power of two.
        header_blocks: blocks of the header, which lie before the blocks of tokens.
        rows_per_block: rows of the header in a block; a row holds one token.
        row_bytes: bytes of a row.
        lines_per_row: cache lines of 128 bytes that a row takes, rounded up to a power of two.
    """

    dtype: Any
    sink_blocks: int
    recent_blocks: int
    num_entries: int
    padded_entries: int
    header_blocks: int
    rows_per_block: int
    row_bytes: int
    lines_per_row: int


@dataclass(frozen=True, eq=False, repr=False)
class PackedOperand:
    """The compile-time description of one packed cache tensor: all that a kernel knows about it before it runs.

    :func:`packed_operand` makes the instances, one for each list of its arguments. They compare by identity.

    Attributes:
        name: identifies the description; all other attributes follow from it.
        dtype: Triton dtype of the operands of products, in which levels are multiplied: float16, bfloat16 or float32.
        head_dim: channels of a vector.
        padded_head_dim: ``head_dim`` rounded up to a power of two.
        num_planes: planes of channels, see :mod:`kvcompile.kernels.formats.bit_planes`.
        low_bits: bits of a code in the section ``codes``; 0 for words.
        word_fields: for planes that make words, the first bit and the bits of each plane in a word; otherwise empty.
        word_sections: for words, a tuple (bits of a word, bytes per vector, byte offset in a block) for each section.
        code_dtype: Triton dtype of the section ``codes``.
        width: elements of the section ``codes`` per vector.
        padded_width: ``width`` rounded up to a power of two, at least 16, the least depth of a tensor core product.
        num_high: number of high sections.
        high_planes: for each high section, the number of planes that have a bit in it.
        has_equal_planes: whether all planes have equally many bits per channel; False for words.
        high_widths: for each high section, its bytes per vector.
        high_offsets: for each high section, its byte offset in a block.
        alternation: columns after which the two pieces of a plane take turns in a tile; 0 if planes are loaded as a
            whole. See :func:`_in_pieces`.
        column_major: whether codes lie [width][BLOCK_TOKENS] (values) or [BLOCK_TOKENS][width] (keys).
        rotated: whether the stored basis is rotated.
        rotation_seed: seed of the random signs of the rotation; 0 without signs.
        granularity: which channels share a scale: ``token``, ``group`` or ``channel``, or ``plane`` for words.
        num_scales: scales of a token, or of a block if scales are per channel.
        group_size: channels of a group.
        has_scale: whether there are scales.
        scale_offset: byte offset of the scales in a block.
        scale_dtype: Triton dtype of the scales; None without scales.
        has_zero: whether there are zero points.
        zero_offset: byte offset of the zero points in a block.
        zero_dtype: Triton dtype of the zero points; None without zero points.
        takes_static_scale: whether vectors have a static scale, which is an argument of kernels and not a constant.
        block_tokens: tokens of a block.
        block_bytes: bytes of a block.
        gain: the ratio of a level in the specification to the same level in the codec.
        gains: for each plane, the ratio of a level in the specification to the number that
            :func:`kvcompile.kernels.tiles.levels.unpack` makes.
        codec: the codec of the format.
        ptx: the major compute capability whose inline PTX can run, or 0.
        unpack_ptx: the codec's PTX texts for that capability; None without them, for products in float32, and if
            columns that share a register need different shifts.
        planes_above: for nested numbers (:mod:`kvcompile.kernels.formats.codes_ptx`), for each plane the plane above it
            in a byte, whose codes its numbers contain; otherwise None for each plane.
        multiplies_integers: whether queries may be in digits, which use the codec's ``integers_ptx``.
        query_exponent: ``e`` if queries are scaled so that the largest channel is in ``[2**(e - 1), 2**e)``; keys only.
        residual: exact blocks beside the packed blocks; None without a residual.
        by_reference: whether kernels get references, see :mod:`kvcompile.kernels.layout.references`.
    """

    name: str
    dtype: Any
    head_dim: int
    padded_head_dim: int
    num_planes: int
    low_bits: int
    word_fields: tuple[tuple[int, int], ...]
    word_sections: tuple[tuple[int, int, int], ...]
    code_dtype: Any
    width: int
    padded_width: int
    num_high: int
    high_planes: tuple[int, ...]
    has_equal_planes: bool
    high_widths: tuple[int, ...]
    high_offsets: tuple[int, ...]
    alternation: int
    column_major: bool
    rotated: bool
    rotation_seed: int
    granularity: str
    num_scales: int
    group_size: int
    has_scale: bool
    scale_offset: int
    scale_dtype: Any
    has_zero: bool
    zero_offset: int
    zero_dtype: Any
    takes_static_scale: bool
    block_tokens: int
    block_bytes: int
    gain: float
    gains: tuple[float, ...]
    codec: Codec
    ptx: int
    unpack_ptx: tuple[str, ...] | None
    planes_above: tuple[int | None, ...]
    multiplies_integers: bool
    query_exponent: int
    residual: ExactBlocks | None
    by_reference: bool

    @property
    def header_blocks(self) -> int:
        """Blocks of the header, which lie before the blocks of tokens; 0 without a residual."""
        return 0 if self.residual is None else self.residual.header_blocks

    @property
    def num_entries(self) -> int:
        """Entries of the header, which hold exact blocks; 0 without a residual."""
        return 0 if self.residual is None else self.residual.num_entries

    @property
    def largest_gain(self) -> float:
        """The largest of ``gains``."""
        return max(self.gains)

    @property
    def relative_gains(self) -> tuple[float, ...]:
        """The ``gains`` divided by ``largest_gain``."""
        return tuple(gain / self.largest_gain for gain in self.gains)

    @property
    def num_parts(self) -> int:
        """Runs of channels as long as a plane. If words have fewer planes than this, the last runs are not stored."""
        return self.head_dim // self.width

    @property
    def padded_parts(self) -> int:
        """``num_parts`` rounded up to a power of two."""
        return triton.next_power_of_2(self.num_parts)

    @property
    def num_pieces(self) -> int:
        """Pieces of a vector, see :mod:`kvcompile.kernels.lang.planes`.

        The pieces are the planes if a section cuts them into runs that are neither a multiple of 4 channels nor a power
        of two.
        """
        cuts = [8 // planes for planes in self.high_planes]
        cuts += [8 // bits for bits, _, _ in self.word_sections if bits < 8]
        most = max(cuts, default=1)
        width = self.width // most
        whole = self.width % most == 0 and (width % 4 == 0 or width == triton.next_power_of_2(width))
        return self.num_parts * (most if whole else 1)

    @property
    def piece_width(self) -> int:
        """Channels of a piece."""
        return self.head_dim // self.num_pieces

    @property
    def padded_piece_width(self) -> int:
        """``piece_width`` rounded up to a power of two."""
        return triton.next_power_of_2(self.piece_width)

    @property
    def store_warps(self) -> int:
        """Warps of a program that stores a block: a thread holds up to 64 numbers of the block."""
        return max(4, self.padded_head_dim // 32)

    @property
    def padded_columns(self) -> int:
        """Columns of a tile in piece order."""
        return self.num_pieces // self.num_parts * self.padded_parts * self.padded_piece_width

    @property
    def tile_bits(self) -> int:
        """Bits of a code in the section ``codes``; 0 for words."""
        if self.word_fields:
            return 0
        return self.code_dtype.primitive_bitwidth // self.num_planes

    @property
    def loaded_bits(self) -> int:
        """Bits of a vector's codes in a tile. There each section of words, and of high bits, takes whole bytes.

        For planes of unequal bits, inline PTX reads a high section from a tile for each of its pieces.
        """
        if self.word_fields:
            return 8 * self.padded_width * sum(-(-bits // 8) for bits, _, _ in self.word_sections)
        codes = self.tile_bits * self.padded_head_dim
        if self.alternation:
            return codes + 8 * self.padded_width // 2
        high = sum(8 // planes if self.unpack_ptx is not None else 1 for planes in self.high_planes)
        return codes + 8 * self.padded_width * high

    @property
    def prefetched_lines(self) -> int:
        """Cache lines of 128 bytes in a block, rounded up to a power of two."""
        return triton.next_power_of_2(-(-self.block_bytes // 128))

    def __repr__(self) -> str:
        return self.name  # Triton uses it in the names of compiled functions

    @functools.cached_property
    def cache_key(self) -> str:
        """The key of this constant in Triton's cache on disk: the layout, and the codec's numbers and source."""
        return " ".join([str(vars(self)), self.codec.encode.cache_key, self.codec.levels.cache_key])


@functools.cache
def operand_and_scale(
    spec: str, role: Role, head_dim: int, float32: bool, ptx: int, by_reference: bool = False
) -> tuple[PackedOperand, float]:
    """:func:`packed_operand`, and the static scale of the format.

    The description is the same for all static scales, so that layers with different scales share kernels.

    Raises:
        ValueError: the format has no codec.
    """
    layout = PackedLayout.parse(spec, role, head_dim)
    if not layout.format.has_levels:
        raise ValueError(f"{spec} has no codec; it has separate kernels, in kvcompile.kernels.latent")
    unscaled = replace(layout, format_name=layout.format.kernel_name)
    return packed_operand(unscaled.spec, role, head_dim, float32, ptx, by_reference), layout.format.static_scale


@functools.cache
def packed_operand(
    spec: str, role: Role, head_dim: int, float32: bool, ptx: int, by_reference: bool = False
) -> PackedOperand:
    """The compile-time description of a packed cache.

    Args:
        spec: format and residual, see :attr:`PackedLayout.spec`.
        role: ``key`` or ``value``.
        head_dim: channels of a vector.
        float32: whether products are computed in float32.
        ptx: the major compute capability whose inline PTX can run, or 0.
        by_reference: whether the data is a reference.
    """
    layout = PackedLayout.parse(spec, role, head_dim)
    fmt, offsets = layout.format, layout.section_offsets
    sections = {section.name: section for section in layout.sections}
    words = fmt.packing if isinstance(fmt.packing, WordPacking) else None
    high = [] if words else [section for section in layout.sections if section.name in HIGH_SECTIONS]
    code_dtype = _TRITON_DTYPES[sections["codes"].dtype]()
    products = tl.float32 if float32 or code_dtype == tl.float32 else tl.float16
    if code_dtype == tl.bfloat16:
        products = tl.float32 if float32 or INTERPRETED else tl.bfloat16  # the interpreter multiplies bit patterns
    scale, zero = sections.get("scale"), sections.get("zero")
    unpack_ptx = None if float32 or not _shares_shifts(layout) else _unpack_ptx(fmt.codec, ptx)
    unpack_gains = fmt.codec.unpack_gains if unpack_ptx is not None else ()
    suffix = (f"_ptx{ptx}" if ptx else "") + ("_reference" if by_reference else "")
    return PackedOperand(
        name=re.sub(r"\W", "_", f"{spec}_{role}_{head_dim}_{products}{suffix}"),
        dtype=products,
        head_dim=head_dim,
        padded_head_dim=triton.next_power_of_2(head_dim),
        num_planes=fmt.num_planes,
        low_bits=fmt.packing.low_bits,
        word_fields=words.fields if words else (),
        word_sections=_word_sections(words, layout) if words else (),
        code_dtype=code_dtype,
        width=fmt.packing.width(head_dim),
        padded_width=_padded_width(layout),
        num_high=len(high),
        high_planes=fmt.packing.high,
        has_equal_planes=fmt.packing.has_equal_planes,
        high_widths=tuple(section.width for section in high),
        high_offsets=tuple(offsets[section.name] for section in high),
        alternation=0,
        column_major=layout.column_major(sections["codes"]),
        rotated=fmt.rotated,
        rotation_seed=fmt.rotation_seed,
        granularity=fmt.granularity,
        num_scales=fmt.num_scales(head_dim),
        group_size=fmt.group_size,
        has_scale=scale is not None,
        scale_offset=offsets.get("scale", 0),
        scale_dtype=_TRITON_DTYPES[scale.dtype]() if scale is not None else None,
        has_zero=zero is not None,
        zero_offset=offsets.get("zero", 0),
        zero_dtype=_TRITON_DTYPES[zero.dtype]() if zero is not None else None,
        takes_static_scale=fmt.takes_static_scale,
        block_tokens=BLOCK_TOKENS,
        block_bytes=layout.block_bytes,
        gain=fmt.gain,
        gains=tuple(fmt.gain * gain for gain in unpack_gains or (1.0,) * fmt.num_planes),
        codec=fmt.codec,
        ptx=ptx,
        unpack_ptx=unpack_ptx,
        planes_above=(None,) * fmt.num_planes,
        multiplies_integers=unpack_ptx is not None and _multiplies_integers(layout),
        query_exponent=_query_exponent(fmt),
        residual=_exact_blocks(layout),
        by_reference=by_reference,
    )


@functools.cache
def for_decode(operand: PackedOperand) -> PackedOperand:
    """The description of the same data for decode attention."""
    return _nested(_in_pieces(_without_single_groups(operand)))


def _without_single_groups(operand: PackedOperand) -> PackedOperand:
    """The description of vectors of one group, whose scales are scales per token."""
    if operand.granularity != "group" or operand.num_scales > 1:
        return operand
    return replace(operand, name=f"{operand.name}_of_tokens", granularity="token")


def _nested(operand: PackedOperand) -> PackedOperand:
    """The description of values whose numbers are nested, if the codec has them.

    All planes must have the same weights: a scale for each token, and not for each group. Keys are never nested: their
    planes are multiplied by different channels of the query.
    """
    is_value = operand.column_major and operand.granularity == "token"
    if not is_value or operand.unpack_ptx is None or operand.codec.nested_ptx is None:
        return operand
    codec = operand.codec
    name = f"{operand.name}_nested"
    return replace(operand, name=name, unpack_ptx=codec.nested_ptx, planes_above=codec.planes_above)


def _in_pieces(operand: PackedOperand) -> PackedOperand:
    """The description of data whose planes are loaded in two pieces, if possible.

    The pieces of 3-bit codes share their high bits. A tile of a whole plane needs a tile of high bits for each piece.
    Twice as many bytes are then copied to shared memory, which limits decode attention: 71 us instead of 65 on an H200.

    A thread of a tensor core product holds four neighbouring columns of keys, and rows 8 apart of the transposed
    values. If pieces take turns in this way, it has both pieces, and needs no codes of other threads.

    Keys of up to 64 channels are loaded as a whole. Triton computes wrong products of two joined tiles of 8 columns: it
    gives each of four threads 8 columns, more than there are (``kWidth``, Triton 3.6). Triton 3.8 and 3.9 would write
    the joined levels of all keys to shared memory, so that keys are loaded as a whole there.
    """
    if operand.word_fields or operand.high_planes != (operand.num_planes,):
        return operand
    if not operand.column_major and (PREFERS_WARPGROUPS or operand.padded_width < 32):
        return operand
    alternation = 8 if operand.column_major else 4
    return replace(operand, name=f"{operand.name}_in_pieces", alternation=alternation)


def _padded_width(layout: PackedLayout) -> int:
    """The attribute ``padded_width`` of :class:`PackedOperand`."""
    return max(16, triton.next_power_of_2(layout.format.packing.width(layout.head_dim)))


def _word_sections(words: WordPacking, layout: PackedLayout) -> tuple[tuple[int, int, int], ...]:
    """The attribute ``word_sections`` of :class:`PackedOperand`."""
    sections = [section for section in layout.sections if section.is_codes]
    offsets = layout.section_offsets
    return tuple(
        (bits, section.width, offsets[section.name])
        for bits, section in zip(words.bits_of_sections, sections, strict=True)
    )


def _shares_shifts(layout: PackedLayout) -> bool:
    """Whether four codes of words that share a register lie in one piece of each section of fewer than 8 bits.

    Inline PTX shifts the four bytes of a register at once. A register holds four neighbouring columns of keys, or four
    tokens of one column of values.
    """
    packing = layout.format.packing
    if layout.role == "value" or not isinstance(packing, WordPacking):
        return True
    sections = zip(packing.bits_of_sections, packing.sections(layout.head_dim), strict=True)
    return all(section.width % 4 == 0 for bits, section in sections if bits < 8)


def _unpack_ptx(codec: Codec, ptx: int) -> tuple[str, ...] | None:
    fitting = [capability for capability in codec.unpack_ptx if ptx and capability <= ptx]
    return codec.unpack_ptx[max(fitting)] if fitting else None


def _multiplies_integers(layout: PackedLayout) -> bool:
    """The attribute ``multiplies_integers`` of :class:`PackedOperand`.

    The query must be rotated, or in the basis of a calibration, as it is for words: without outlier channels all
    channels keep enough digits. A product of integers sums over at least 32 columns, which may be padding.
    """
    fmt = layout.format
    has_integers = fmt.codec.integers_ptx is not None and _padded_width(layout) >= 32
    return layout.role == "key" and (fmt.rotated or fmt.granularity == "plane") and has_integers


def _query_exponent(fmt: Format) -> int:
    """The attribute ``query_exponent`` of :class:`PackedOperand`.

    With an exponent of 7 the smallest normal fp16 number is 21 binary orders below the largest channel, and a bf16
    query is exact within them. Scales per channel multiply the query before its products. fp16 scales are at most
    ``2**17 / max_code``, and the scaled query must stay below 2**16. float32 scales are normalised to less than 2,
    which leaves nearly the whole range of fp16 to the differences between them.
    """
    if fmt.granularity != "channel":
        return 7
    return 14 if fmt.scale_dtype == torch.float32 else int(math.log2(fmt.codec.constants.max_code)) - 1


def _exact_blocks(layout: PackedLayout) -> ExactBlocks | None:
    residual = layout.residual
    if residual is None:
        return None
    return ExactBlocks(
        dtype=_TRITON_DTYPES[residual.dtype](),
        sink_blocks=residual.sink_blocks,
        recent_blocks=residual.recent_blocks,
        num_entries=residual.num_entries,
        padded_entries=triton.next_power_of_2(residual.num_entries),
        header_blocks=layout.header_blocks,
        rows_per_block=layout.rows_per_block,
        row_bytes=layout.row_bytes,
        lines_per_row=triton.next_power_of_2(-(-layout.row_bytes // 128)),
    )


_TRITON_DTYPES: dict[torch.dtype, Callable[[], Any]] = {
    torch.uint8: lambda: tl.uint8,
    torch.float16: lambda: tl.float16,
    torch.bfloat16: lambda: tl.bfloat16,
    torch.float32: lambda: tl.float32,
}
