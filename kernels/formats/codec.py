"""The Triton part of a format: how its kernels encode vectors and decode codes.

A codec is the part of a format that differs between formats. It is a set of functions that the store kernels and the
attention kernels take as a parameter:

    encode(x, in_vector, OPERAND) -> codes, scale, zero
        ``x`` is float32 [vectors, channels] in the stored basis and finite; the channels of a row share a scale.
        ``in_vector`` is bool [1, channels]; channels that are not in it pad to a power of two and hold 0.
        ``codes`` has the shape of ``x`` (int32 of which the lowest byte counts, or the stored values themselves), or
        is a tuple of pairs, see :mod:`kvcompile.kernels.store.code_pairs`. ``scale`` and ``zero`` are float32
        [vectors]; they are ignored when the format has no section for them.

    levels(codes, PLANE, OPERAND) -> level
        The codes of a plane as float32 levels. The level of the specification is ``gain * level``. Every code has a
        finite level, also one that was never written.

``OPERAND`` is the :class:`~kvcompile.kernels.layout.operand.PackedOperand`; ``OPERAND.codec.constants`` holds the
numbers of the format's class. A format of few bits also has inline PTX, which unpacks four bytes of each code section
at once; see :func:`kvcompile.kernels.tiles.packed.halves_of_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Codec:
    """The Triton part of a format; the functions are described above.

    Attributes:
        encode: vectors -> codes, scales and zeros.
        levels: codes -> levels.
        unpack_ptx: PTX that makes fp16 of bytes, by the least major compute capability that runs it.
        unpack_gains: what takes those to levels, a power of two for each plane; none if they are levels.
        integers_ptx: PTX that makes integers of 8 bits of them, if levels are such but for an offset; else None.
        integer_offset: what levels are above those.
        interleaved: whether integers come in the order of :func:`kvcompile.kernels.attention.query.interleaved`.
        paired: whether ``encode`` gives pairs of codes.
        constants: numbers of the spec class that the functions use.
    """

    encode: Any
    levels: Any
    unpack_ptx: dict[int, str] = field(default_factory=dict)
    unpack_gains: tuple[float, ...] = ()
    integers_ptx: str | None = None
    integer_offset: float = 0.0
    interleaved: bool = False
    paired: bool = False
    constants: SimpleNamespace = field(default_factory=SimpleNamespace)
