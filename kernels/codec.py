"""What the Triton kernels know about a packed cache at compile time, and the building blocks of codecs.

This module is the one place that imports Triton. Where it is missing (a machine without Linux or a GPU), ``triton`` and
``tl`` are None, :func:`jit` returns the plain function, and only the plain-PyTorch paths can run.

A codec is the part of a format that differs between formats, as two functions that both kernels take as a parameter:

    unpack(packed, DTYPE, OPERAND) -> level, or (low, high) with two channels in a byte
        ``packed`` is a uint8 tile of any shape, ``level`` has its shape and the dtype DTYPE (float16 or float32). The
        level of the spec is ``gain * level + center``. Every byte, also one that was never written, has a finite level.
        ``OPERAND.fast`` asks for inline PTX, with DTYPE float16; the bytes of a thread come four at a time.

    encode(x, in_head, OPERAND) -> codes, scale, zero
        ``x`` is float32 [tokens, channels] in the stored basis and finite, ``in_head`` bool [1, channels]; channels
        that are not in the head only pad to a power of two, and hold 0. ``codes`` is int32 [tokens, channels],
        ``scale`` and ``zero`` are float32 [tokens] (``zero`` is ignored when the format has no section for it).

OPERAND is the :class:`PackedOperand`; ``OPERAND.codec.constants`` holds the numbers of the spec class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvcompile.kernels.layout import Role

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


INTERPRETED = triton is not None and triton.knobs.runtime.interpret


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """``triton.jit``, or the function itself where there is no Triton to run it."""
    if fn is None:
        return functools.partial(jit, **options)
    return fn if triton is None else triton.jit(fn, **options)


@dataclass(frozen=True)
class Codec:
    """The Triton part of a format; the functions are described above.

    Attributes:
        unpack: packed bytes -> levels.
        encode: vectors -> codes, scales and zeros.
        gain: the spec's level is ``gain * level + center``.
        center: not 0 only in formats that keep a zero point.
        constants: numbers of the spec class that the functions use.
    """

    unpack: Any
    encode: Any
    gain: float = 1.0
    center: float = 0.0
    constants: SimpleNamespace = field(default_factory=SimpleNamespace)


@dataclass(frozen=True, eq=False, repr=False)
class PackedOperand:
    """Everything that a kernel knows at compile time about one packed cache tensor: the parameter that makes one kernel
    serve every format. Instances come from :func:`packed_operand`, one an argument list, so they compare by identity.

    Attributes:
        name: all that the other attributes follow from.
        head_dim: channels of a vector.
        padded_head_dim: the next power of two.
        channels_per_byte: 1 or 2.
        width: code bytes of a vector.
        padded_width: the next power of two, at least the 16 that a tensor core product sums over.
        column_major: whether codes lie [width][BLOCK_TOKENS] (values) or [BLOCK_TOKENS][width] (keys).
        rotated: whether the stored basis is rotated.
        scale_offset: byte offset of the scales in a block.
        scale_dtype: their dtype.
        has_zero: whether there are zero points,
        zero_offset: byte offset of the zero points in a block,
        zero_dtype: their dtype.
        block_tokens: tokens of a block.
        codec: the codec of the format.
        fast: whether ``unpack`` may use inline PTX.
    """

    name: str
    head_dim: int
    padded_head_dim: int
    channels_per_byte: int
    width: int
    padded_width: int
    column_major: bool
    rotated: bool
    scale_offset: int
    scale_dtype: Any
    has_zero: bool
    zero_offset: int
    zero_dtype: Any
    block_tokens: int
    codec: Codec
    fast: bool

    def __repr__(self) -> str:
        return self.name  # Triton makes it part of the names of functions

    @functools.cached_property
    def cache_key(self) -> str:
        """Triton's key of this constant in its cache on disk: covers the layout, the codec's numbers and its source."""
        return " ".join([str(vars(self)), self.codec.unpack.cache_key, self.codec.encode.cache_key])


@functools.cache
def packed_operand(format_name: str, role: Role, head_dim: int, fast: bool) -> PackedOperand:
    """The compile-time description of a packed cache of ``format_name`` for ``role`` and ``head_dim``."""
    from kvcompile.kernels.layout import BLOCK_TOKENS, PackedLayout  # the formats import this module

    layout = PackedLayout(format_name, role, head_dim)
    sections = {section.name: section for section in layout.sections}
    scale, zero = sections["scale"], sections.get("zero")
    triton_dtype = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return PackedOperand(
        name=f"{format_name}_{role}_{head_dim}{'_fast' if fast else ''}",
        head_dim=head_dim,
        padded_head_dim=triton.next_power_of_2(head_dim),
        channels_per_byte=layout.format.channels_per_byte,
        width=sections["codes"].width,
        padded_width=max(16, triton.next_power_of_2(sections["codes"].width)),
        column_major=layout.column_major(sections["codes"]),
        rotated=layout.format.rotated,
        scale_offset=layout.section_offsets["scale"],
        scale_dtype=triton_dtype[scale.dtype],
        has_zero=zero is not None,
        zero_offset=layout.section_offsets.get("zero", 0),
        zero_dtype=triton_dtype[zero.dtype] if zero is not None else None,
        block_tokens=BLOCK_TOKENS,
        codec=layout.format.codec,
        fast=fast,
    )


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
def halves(x, HEAD_DIM: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """The first and the second HEAD_DIM / 2 channels of a tile [rows, channels], each [rows, PADDED_WIDTH]; padding is
    zero where the tile's is."""
    ROWS: tl.constexpr = x.shape[0]
    if HEAD_DIM == 2 * PADDED_WIDTH:
        low, high = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, PADDED_WIDTH]), (0, 2, 1)))
    else:
        channel = tl.broadcast_to(tl.arange(0, PADDED_WIDTH)[None, :], [ROWS, PADDED_WIDTH])
        in_half = channel < HEAD_DIM // 2
        low = tl.where(in_half, tl.gather(x, tl.where(in_half, channel, 0), 1), 0)
        high = tl.where(in_half, tl.gather(x, tl.where(in_half, channel + HEAD_DIM // 2, 0), 1), 0)
    return low, high
