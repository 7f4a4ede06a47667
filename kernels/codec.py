"""What the Triton kernels know about a packed cache at compile time, and the building blocks of codecs.

This module is the one place that imports Triton. Where it is missing (a machine without Linux or a GPU), ``triton`` and
``tl`` are None, :func:`jit` returns the plain function, and only the plain-PyTorch paths can run.

A codec is the part of a format that differs between formats, as functions that both kernels take as a parameter:

    encode(x, in_vector, OPERAND) -> codes, scale, zero
        ``x`` is float32 [vectors, channels] in the stored basis and finite; the channels of a row share a scale.
        ``in_vector`` is bool [1, channels]; channels that are not in it only pad to a power of two, and hold 0.
        ``codes`` has the shape of ``x`` (int32, or what is stored as it is), ``scale`` and ``zero`` are float32
        [vectors] (ignored when the format has no section for them).

    levels(codes, PLANE, OPERAND) -> level
        The codes of a plane as float32 levels. The level of the spec is ``gain * level + center``. Every code, also one
        that was never written, has a finite level.

    unpack(packed, OPERAND) -> levels of every plane
        Optional and with inline PTX: ``packed`` is a tuple of tiles of any shape, the code sections; the levels are a
        tuple of fp16 tiles of that shape. The bytes of a thread come four at a time.

OPERAND is the :class:`PackedOperand`; ``OPERAND.codec.constants`` holds the numbers of the spec class.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kvcompile.kernels.bit_planes import HIGH_SECTIONS
from kvcompile.kernels.rotation import HASH_MULTIPLIERS as _HASH_MULTIPLIERS

if TYPE_CHECKING:
    from kvcompile.kernels.layout import Role

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


HASH_MULTIPLIERS: Any = None if tl is None else tl.constexpr(_HASH_MULTIPLIERS)
INTERPRETED = triton is not None and triton.knobs.runtime.interpret


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """``triton.jit``, or the function itself where there is no Triton to run it."""
    if fn is None:
        return functools.partial(jit, **options)
    return fn if triton is None else triton.jit(fn, **options)


def constexpr_function(fn: Callable) -> Any:
    """``triton.constexpr_function``: callable in kernels, at compile time, on compile-time values."""
    return fn if triton is None else triton.constexpr_function(fn)


@dataclass(frozen=True)
class Codec:
    """The Triton part of a format; the functions are described above.

    Attributes:
        encode: vectors -> codes, scales and zeros.
        levels: codes -> levels.
        unpack: packed bytes -> levels, or None.
        center: not 0 only in formats that keep a zero point.
        constants: numbers of the spec class that the functions use.
    """

    encode: Any
    levels: Any
    unpack: Any = None
    center: float = 0.0
    constants: SimpleNamespace = field(default_factory=SimpleNamespace)


@dataclass(frozen=True, eq=False, repr=False)
class PackedOperand:
    """Everything that a kernel knows at compile time about one packed cache tensor: the parameter that makes one kernel
    serve every format. Instances come from :func:`packed_operand`, one an argument list, so they compare by identity.

    Attributes:
        name: all that the other attributes follow from.
        dtype: of the products that the levels take part in: float16, bfloat16 or float32.
        head_dim: channels of a vector.
        padded_head_dim: the next power of two.
        num_planes: planes of channels, see :mod:`kvcompile.kernels.bit_planes`.
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
        block_tokens: tokens of a block.
        gain: factor between the levels of the codec and those of the spec.
        center: of the codec's levels.
        codec: the codec of the format.
        fast: whether to use the codec's ``unpack``.
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
    block_tokens: int
    gain: float
    center: float
    codec: Codec
    fast: bool

    @property
    def tile_bits(self) -> int:
        """Bits of a code in the section ``codes``."""
        return self.code_dtype.primitive_bitwidth // self.num_planes

    def __repr__(self) -> str:
        return self.name  # Triton makes it part of the names of functions

    @functools.cached_property
    def cache_key(self) -> str:
        """Triton's key of this constant in its cache on disk: covers the layout, the codec's numbers and its source."""
        functions = (self.codec.encode, self.codec.levels, self.codec.unpack)
        return " ".join([str(vars(self)), *(fn.cache_key for fn in functions if fn is not None)])


@functools.cache
def packed_operand(format_name: str, role: Role, head_dim: int, float32: bool, has_ptx: bool) -> PackedOperand:
    """The compile-time description of a packed cache of ``format_name`` for ``role`` and ``head_dim``.

    ``float32`` asks for products in float32, ``has_ptx`` says whether inline PTX can run.
    """
    from kvcompile.kernels.layout import BLOCK_TOKENS, PackedLayout  # the formats import this module

    layout = PackedLayout(format_name, role, head_dim)
    fmt, offsets = layout.format, layout.section_offsets
    sections = {section.name: section for section in layout.sections}
    high = [section for section in layout.sections if section.name in HIGH_SECTIONS]
    code_dtype = _TRITON_DTYPES[sections["codes"].dtype]()
    products = tl.float32 if float32 or code_dtype == tl.float32 else tl.float16
    if code_dtype == tl.bfloat16:
        products = tl.float32 if float32 or INTERPRETED else tl.bfloat16  # the interpreter multiplies bits of bfloat16
    scale, zero = sections.get("scale"), sections.get("zero")
    return PackedOperand(
        name=re.sub(r"\W", "_", f"{format_name}_{role}_{head_dim}_{products}{'_ptx' if has_ptx else ''}"),
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
        block_tokens=BLOCK_TOKENS,
        gain=fmt.gain,
        center=fmt.codec.center,
        codec=fmt.codec,
        fast=has_ptx and not float32 and fmt.codec.unpack is not None,
    )


_TRITON_DTYPES: dict[torch.dtype, Callable[[], Any]] = {
    torch.uint8: lambda: tl.uint8,
    torch.float16: lambda: tl.float16,
    torch.bfloat16: lambda: tl.bfloat16,
    torch.float32: lambda: tl.float32,
}


@jit
def bytes_to_halves(packed, PTX: tl.constexpr):
    """A tile of bytes -> a tile of fp16 by PTX, of four bytes at a time: $0 and $1 from $2."""
    return tl.inline_asm_elementwise(PTX, "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)


@jit
def bytes_to_half_pairs(packed, PTX: tl.constexpr):
    """A tile of bytes -> two tiles of fp16 by PTX, of four bytes at a time: $0 and $1, $2 and $3 from $4."""
    return tl.inline_asm_elementwise(
        PTX, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@jit
def bytes_to_four_planes(packed, HAS_HIGH: tl.constexpr, PTX: tl.constexpr):
    """Tiles of bytes -> four tiles of fp16 by PTX, of four bytes at a time: $0 to $7 from $8, or from $8 to $10."""
    if HAS_HIGH:
        planes = tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [packed[0], packed[1], packed[2]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        planes = tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,=r,=r,=r,=r,r", [packed[0]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return planes


@jit
def round_to_integer(x):
    """float32 -> the nearest integer, ties to even, for ``|x| < 2**22``: adding 1.5 * 2**23 leaves no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@jit
def log2(x, FAST: tl.constexpr):
    """Base-2 logarithm of positive normal float32 numbers, with an error of at most 2**-22 when FAST."""
    if FAST:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@jit
def random_signs(channel, SEED: tl.constexpr):
    """The signs of :func:`kvcompile.kernels.rotation.random_signs` for int32 channels."""
    OF_CHANNEL: tl.constexpr = HASH_MULTIPLIERS[0]
    OF_SEED: tl.constexpr = HASH_MULTIPLIERS[1] * SEED & 0xFFFFFFFF
    BETWEEN: tl.constexpr = HASH_MULTIPLIERS[2]
    x = channel.to(tl.uint64) * OF_CHANNEL + OF_SEED
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * BETWEEN) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    return 1.0 - 2.0 * ((x >> 7) & 1).to(tl.float32)


@jit
def rotate(x, OPERAND: tl.constexpr):
    """Rows of a float32 tile [rows, channels] into the stored basis."""
    if OPERAND.rotation_seed != 0:
        x *= random_signs(tl.arange(0, x.shape[1]), OPERAND.rotation_seed)[None, :]
    return hadamard(x, OPERAND.head_dim)


@jit
def hadamard_matrix(OPERAND: tl.constexpr):
    """The Hadamard matrix of :func:`hadamard` without its norm: 1, -1 and 0, float32 [channels, channels]."""
    CHANNELS: tl.constexpr = OPERAND.padded_head_dim
    row = tl.arange(0, CHANNELS)[:, None]
    column = tl.arange(0, CHANNELS)[None, :]
    matrix = tl.zeros([CHANNELS, CHANNELS], tl.float32)
    for bit in tl.static_range(4, 9):
        odd = row & column & ((1 << bit) - 1)
        odd = odd ^ (odd >> 4)
        odd = odd ^ (odd >> 2)
        odd = (odd ^ (odd >> 1)) & 1
        in_block = _in_rotation_block(row, bit, OPERAND.head_dim) & _in_rotation_block(column, bit, OPERAND.head_dim)
        matrix = tl.where(in_block, 1.0 - 2.0 * odd.to(tl.float32), matrix)
    return matrix


@jit
def rotate_by_products(x, matrix, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """:func:`rotate` for at least 16 rows of any float dtype, as a product with :func:`hadamard_matrix`.

    Elements of the matrix are exact in every dtype, so that products are, too; sums are taken in float32.
    """
    CHANNELS: tl.constexpr = OPERAND.padded_head_dim
    channel = tl.arange(0, CHANNELS)
    if PRECISION == "ieee":
        x = x.to(tl.float32)  # the interpreter multiplies the bits of bfloat16
    if OPERAND.rotation_seed != 0:
        x = (x * random_signs(channel, OPERAND.rotation_seed)[None, :]).to(x.dtype)
    norm = tl.zeros([CHANNELS], tl.float32)
    for bit in tl.static_range(4, 9):
        norm = tl.where(_in_rotation_block(channel, bit, OPERAND.head_dim), 2.0 ** (-bit / 2), norm)
    return tl.dot(x, matrix.to(x.dtype), input_precision=PRECISION) * norm[None, :]


@jit
def unrotate(x, OPERAND: tl.constexpr):
    """Inverse of :func:`rotate`."""
    x = hadamard(x, OPERAND.head_dim)
    if OPERAND.rotation_seed != 0:
        x *= random_signs(tl.arange(0, x.shape[1]), OPERAND.rotation_seed)[None, :]
    return x


@jit
def hadamard(x, HEAD_DIM: tl.constexpr):
    """Rotate the rows of a float32 tile [rows, channels] as :func:`kvcompile.kernels.rotation.rotate` does.

    The fast Walsh-Hadamard transform, one bit of the channel index a stage: a stage adds and subtracts neighbours and
    moves the bit that tells them apart to the front, so that every stage is the same and the last one restores the
    order. With a HEAD_DIM that is not a power of two the matrix is block-diagonal; a block of ``2**n`` channels takes
    part in the first ``n`` stages only. Channels beyond HEAD_DIM are padding.
    """
    ROWS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = x.shape[1]
    pair = tl.arange(0, CHANNELS // 2)[None, :] * 2
    channel = tl.arange(0, CHANNELS)[None, :]
    norm = tl.zeros([1, CHANNELS], tl.float32)
    for bit in tl.static_range(4, 9):
        norm = tl.where(_in_rotation_block(channel, bit, HEAD_DIM), 2.0 ** (-bit / 2), norm)
    for stage in tl.static_range(0, 8):
        if 1 << stage < CHANNELS:
            even, odd = tl.split(tl.reshape(x, [ROWS, CHANNELS // 2, 2]))
            total, difference = even + odd, even - odd
            if HEAD_DIM != CHANNELS:
                # Undo the moves of the earlier stages to know the pair's channel.
                origin = ((pair << stage) | (pair // (CHANNELS >> stage))) & (CHANNELS - 1)
                takes_part = origin < 0
                for bit in tl.static_range(4, 9):
                    if bit > stage:
                        takes_part = takes_part | _in_rotation_block(origin, bit, HEAD_DIM)
                total = tl.where(takes_part, total, even)
                difference = tl.where(takes_part, difference, odd)
            x = tl.reshape(tl.permute(tl.join(total, difference), (0, 2, 1)), [ROWS, CHANNELS])
    return x * norm


@jit
def _in_rotation_block(channel, bit: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Whether ``channel`` is in the block of ``2**bit`` channels, the place of that binary digit of HEAD_DIM."""
    START: tl.constexpr = (HEAD_DIM >> (bit + 1)) << (bit + 1)
    END: tl.constexpr = START + (HEAD_DIM & (1 << bit))
    return (channel >= START) & (channel < END)


@jit
def planes_of(x, OPERAND: tl.constexpr):
    """The planes of a tile [rows, channels] as a tuple of [rows, padded_width]; padding is zero where the tile's is."""
    ROWS: tl.constexpr = x.shape[0]
    NUM: tl.constexpr = OPERAND.num_planes
    WIDTH: tl.constexpr = OPERAND.padded_width
    if NUM == 1:
        planes = (x,)
    elif OPERAND.head_dim == NUM * WIDTH:
        x = tl.permute(tl.reshape(x, [ROWS, 2, NUM // 2, WIDTH]), (0, 3, 2, 1))
        low, high = tl.split(x)  # [ROWS, WIDTH, NUM // 2]
        if NUM == 2:
            planes = (tl.reshape(low, [ROWS, WIDTH]), tl.reshape(high, [ROWS, WIDTH]))
        else:
            planes = tl.split(low) + tl.split(high)
    else:
        channel = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], [ROWS, WIDTH])
        in_plane = channel < OPERAND.width
        planes = ()
        for i in tl.static_range(NUM):
            plane = tl.gather(x, tl.where(in_plane, channel + i * OPERAND.width, 0), 1)
            planes = planes + (tl.where(in_plane, plane, 0),)  # noqa: RUF005
    return planes
