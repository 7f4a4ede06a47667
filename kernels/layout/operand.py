"""What a kernel knows at compile time about one packed cache: the parameter that makes one kernel serve every
format."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.bit_planes import HIGH_SECTIONS
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.lang.triton import INTERPRETED, tl, triton
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Role


@dataclass(frozen=True)
class ExactBlocks:
    """What a kernel knows at compile time about a :class:`~kvcompile.kernels.layout.packed_layout.Residual`.

    Attributes:
        dtype: of the tokens that are kept as they are.
        sink_blocks: the first blocks that have slots,
        recent_blocks: and how many slots the others share.
        num_entries: of both.
        padded_entries: the next power of two.
        header_blocks: blocks before those of tokens.
        rows_per_block: tokens in a block of the header.
        row_bytes: bytes of such a token.
    """

    dtype: Any
    sink_blocks: int
    recent_blocks: int
    num_entries: int
    padded_entries: int
    header_blocks: int
    rows_per_block: int
    row_bytes: int


@dataclass(frozen=True, eq=False, repr=False)
class PackedOperand:
    """Everything that a kernel knows at compile time about one packed cache tensor: the parameter that makes one kernel
    serve every format. Instances come from :func:`packed_operand`, one an argument list, so they compare by identity.

    Attributes:
        name: all that the other attributes follow from.
        dtype: of the products that the levels take part in: float16, bfloat16 or float32.
        head_dim: channels of a vector.
        padded_head_dim: the next power of two.
        num_planes: planes of channels, see :mod:`kvcompile.kernels.formats.bit_planes`.
        low_bits: bits of a code in the section ``codes``.
        code_dtype: element type of that section.
        width: its elements for a vector.
        padded_width: the next power of two, at least the 16 that a tensor core product sums over.
        num_high: high sections.
        high_planes: for each high section, how many planes have a bit in it.
        high_widths: their bytes for a vector.
        high_offsets: their byte offsets in a block.
        column_major: whether codes lie [width][BLOCK_TOKENS] (values) or [BLOCK_TOKENS][width] (keys).
        rotated: whether the stored basis is rotated.
        rotation_seed: of its random signs; 0 for none.
        granularity: what shares a scale: ``token``, ``group`` or ``channel``.
        num_scales: scales of a token, or of a block if they are per channel.
        group_size: channels of a group.
        has_scale: whether there are scales,
        scale_offset: byte offset of the scales in a block,
        scale_dtype: their dtype.
        has_zero: whether there are zero points,
        zero_offset: byte offset of the zero points in a block,
        zero_dtype: their dtype.
        takes_static_scale: whether all vectors may have a factor, which is no constant of the kernel.
        block_tokens: tokens of a block.
        block_bytes: and its bytes.
        gain: factor between the levels of the codec and those of the spec,
        unpack_gains: and between those of the spec and what PTX makes, for each plane.
        codec: the codec of the format.
        ptx: the major compute capability whose inline PTX can run, or 0.
        unpack_ptx: the text of the codec for that capability; None without one, and for products in float32.
        multiplies_integers: whether to use the codec's ``integers_ptx`` where the query has two columns a row.
        query_exponent: for keys: queries are scaled to a largest channel in ``[2**(e - 1), 2**e)``.
        residual: blocks that are kept as they are; None without any.
        by_reference: whether kernels get references, see :mod:`kvcompile.kernels.layout.references`.
    """

    name: str
    dtype: Any
    head_dim: int
    padded_head_dim: int
    num_planes: int
    low_bits: int
    code_dtype: Any
    width: int
    padded_width: int
    num_high: int
    high_planes: tuple[int, ...]
    high_widths: tuple[int, ...]
    high_offsets: tuple[int, ...]
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
    unpack_gains: tuple[float, ...]
    codec: Codec
    ptx: int
    unpack_ptx: str | None
    multiplies_integers: bool
    query_exponent: int
    residual: ExactBlocks | None
    by_reference: bool

    @property
    def header_blocks(self) -> int:
        """Blocks before those of tokens."""
        return 0 if self.residual is None else self.residual.header_blocks

    @property
    def num_entries(self) -> int:
        """Blocks that are kept as they are."""
        return 0 if self.residual is None else self.residual.num_entries

    @property
    def gains(self) -> tuple[float, ...]:
        """What planes made by :func:`kvcompile.kernels.tiles.packed.unpack` lack beside scales and zero points."""
        return (1.0,) * self.num_planes if self.granularity == "group" else self.unpack_gains

    @property
    def largest_gain(self) -> float:
        """The largest of ``gains``."""
        return max(self.gains)

    @property
    def relative_gains(self) -> tuple[float, ...]:
        """The ``gains`` over that."""
        return tuple(gain / self.largest_gain for gain in self.gains)

    @property
    def tile_bits(self) -> int:
        """Bits of a code in the section ``codes``."""
        return self.code_dtype.primitive_bitwidth // self.num_planes

    @property
    def prefetched_lines(self) -> int:
        """Lines of 128 bytes of a block, rounded up to a power of two."""
        return triton.next_power_of_2(-(-self.block_bytes // 128))

    def __repr__(self) -> str:
        return self.name  # Triton makes it part of the names of functions

    @functools.cached_property
    def cache_key(self) -> str:
        """Triton's key of this constant in its cache on disk: covers the layout, the codec's numbers and its source."""
        return " ".join([str(vars(self)), self.codec.encode.cache_key, self.codec.levels.cache_key])


@functools.cache
def operand_and_scale(
    spec: str, role: Role, head_dim: int, float32: bool, ptx: int, by_reference: bool = False
) -> tuple[PackedOperand, float]:
    """:func:`packed_operand`, the same for all static scales, so that layers share kernels; and the static scale."""
    layout = PackedLayout.parse(spec, role, head_dim)
    if not layout.format.has_levels:
        raise ValueError(f"{spec} has no codec; kernels of its own read and write it")
    unscaled = replace(layout, format_name=layout.format.kernel_name)
    return packed_operand(unscaled.spec, role, head_dim, float32, ptx, by_reference), layout.format.static_scale


@functools.cache
def packed_operand(
    spec: str, role: Role, head_dim: int, float32: bool, ptx: int, by_reference: bool = False
) -> PackedOperand:
    """The compile-time description of a packed cache of layout ``spec`` for ``role`` and ``head_dim``.

    ``float32`` asks for products in float32, ``ptx`` is the major compute capability whose inline PTX can run or 0,
    ``by_reference`` says whether the data is a reference.
    """
    layout = PackedLayout.parse(spec, role, head_dim)
    fmt, offsets = layout.format, layout.section_offsets
    sections = {section.name: section for section in layout.sections}
    high = [section for section in layout.sections if section.name in HIGH_SECTIONS]
    code_dtype = _TRITON_DTYPES[sections["codes"].dtype]()
    products = tl.float32 if float32 or code_dtype == tl.float32 else tl.float16
    if code_dtype == tl.bfloat16:
        products = tl.float32 if float32 or INTERPRETED else tl.bfloat16  # the interpreter multiplies bits of bfloat16
    scale, zero = sections.get("scale"), sections.get("zero")
    unpack_ptx = None if float32 else _unpack_ptx(fmt.codec, ptx)
    unpack_gains = fmt.codec.unpack_gains if unpack_ptx is not None else ()
    suffix = (f"_ptx{ptx}" if ptx else "") + ("_reference" if by_reference else "")
    return PackedOperand(
        name=re.sub(r"\W", "_", f"{spec}_{role}_{head_dim}_{products}{suffix}"),
        dtype=products,
        head_dim=head_dim,
        padded_head_dim=triton.next_power_of_2(head_dim),
        num_planes=fmt.num_planes,
        low_bits=fmt.packing.low_bits,
        code_dtype=code_dtype,
        width=sections["codes"].width,
        padded_width=max(16, triton.next_power_of_2(sections["codes"].width)),
        num_high=len(high),
        high_planes=fmt.packing.high,
        high_widths=tuple(section.width for section in high),
        high_offsets=tuple(offsets[section.name] for section in high),
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
        unpack_gains=tuple(fmt.gain * gain for gain in unpack_gains or (1.0,) * fmt.num_planes),
        codec=fmt.codec,
        ptx=ptx,
        unpack_ptx=unpack_ptx,
        multiplies_integers=ptx > 0 and not float32 and _multiplies_integers(layout),
        query_exponent=_query_exponent(fmt),
        residual=_exact_blocks(layout),
        by_reference=by_reference,
    )


def _unpack_ptx(codec: Codec, ptx: int) -> str | None:
    fitting = [capability for capability in codec.unpack_ptx if ptx and capability <= ptx]
    return codec.unpack_ptx[max(fitting)] if fitting else None


def _multiplies_integers(layout: PackedLayout) -> bool:
    """See :class:`PackedOperand`.

    A rotated query has no outlier channels, which would leave the others few digits. Blocks that are kept as they are
    have no integers, and products of integers sum over 32 channels at least.
    """
    fmt = layout.format
    has_integers = fmt.codec.integers_ptx is not None and fmt.packing.width(layout.head_dim) >= 32
    return layout.role == "key" and fmt.rotated and has_integers and layout.residual is None


def _query_exponent(fmt: Format) -> int:
    """See :class:`PackedOperand`.

    7 leaves 21 binary orders to the smallest normal fp16 number, and a bf16 query is exact in them. Scales per channel
    multiply the query before its products: fp16 scales, at most ``2**17 / max_code``, must not take it to 2**16;
    float32 scales are normalised to less than 2, so that nearly all the range of fp16 serves their differences.
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
    )


_TRITON_DTYPES: dict[torch.dtype, Callable[[], Any]] = {
    torch.uint8: lambda: tl.uint8,
    torch.float16: lambda: tl.float16,
    torch.bfloat16: lambda: tl.bfloat16,
    torch.float32: lambda: tl.float32,
}
