"""The codec of a format: Triton functions that encode vectors and decode codes.

Formats differ in their codec alone. The store kernels and the attention kernels take it as a parameter, and call two
functions:

    encode(x, in_vector, OPERAND) -> codes, scale, zero
        ``x`` is float32 [vectors, channels] in the stored basis and finite; the channels of a row share a scale.
        ``in_vector`` is bool [1, channels]; the other channels pad to a power of two and hold 0.
        ``codes`` has the shape of ``x`` (int32 whose lowest byte counts, or the stored values themselves), or is a
        tuple of pairs, see :mod:`kvcompile.kernels.store.code_pairs`. ``scale`` and ``zero`` are float32 [vectors];
        the caller ignores them when the format has no section for them.

    levels(codes, PLANE, OPERAND) -> level
        The codes of a plane as float32 levels. The level of the specification is ``gain * level``. Every code has a
        finite level, even codes that are never written.

``OPERAND`` is the :class:`~kvcompile.kernels.layout.operand.PackedOperand`; ``OPERAND.codec.constants`` holds the
numbers of the format's class. A format of few bits also has inline PTX, which unpacks four bytes of each code section
at once; see :func:`kvcompile.kernels.tiles.levels.halves_of_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Codec:
    """Triton functions that encode vectors and decode codes; the text above describes them.

    Attributes:
        encode: makes codes, scales and zero points from vectors.
        levels: makes levels from codes.
        unpack_ptx: PTX that makes fp16 numbers from packed bytes, by the least major compute capability that runs it: a
            text for each way to load a tile (:attr:`~kvcompile.kernels.formats.bit_planes.Packing.pieces_of_tiles`).
        unpack_gains: the ratio of levels to these fp16 numbers, a power of two for each plane; empty if both are equal.
        nested_ptx: texts as in ``unpack_ptx`` that make nested numbers, see
            :mod:`kvcompile.kernels.formats.codes_ptx`; None if the codec has none.
        planes_above: with ``nested_ptx``, for each plane the plane above it in a byte, whose codes its numbers contain,
            or None.
        integers_ptx: texts as in ``unpack_ptx`` that make 8-bit integers; None if levels are not integers plus an
            offset.
        integer_offset: the level minus this integer.
        interleaved: whether integers come in the order of :func:`kvcompile.kernels.attention.query.interleaved`.
        paired: whether ``encode`` returns pairs of codes.
        constants: numbers of the format's class that the functions use.
    """

    encode: Any
    levels: Any
    unpack_ptx: dict[int, tuple[str, ...]] = field(default_factory=dict)
    unpack_gains: tuple[float, ...] = ()
    nested_ptx: tuple[str, ...] | None = None
    planes_above: tuple[int | None, ...] = ()
    integers_ptx: tuple[str, ...] | None = None
    integer_offset: float = 0.0
    interleaved: bool = False
    paired: bool = False
    constants: SimpleNamespace = field(default_factory=SimpleNamespace)
