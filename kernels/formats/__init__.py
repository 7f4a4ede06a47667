"""The registry of cache formats, by the names that policies and op arguments use."""

from __future__ import annotations

from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.fp8 import Fp8E4M3
from kvcompile.kernels.formats.int4 import Int4PerTokenHead, Int4Unrotated
from kvcompile.kernels.formats.int8 import Int8PerTokenHead
from kvcompile.kernels.formats.turboquant import TURBOQUANT_4BIT

FORMATS: dict[str, Format] = {
    fmt.name: fmt for fmt in (Int8PerTokenHead(), Fp8E4M3(), Int4PerTokenHead(), Int4Unrotated(), TURBOQUANT_4BIT)
}


def get_format(name: str) -> Format:
    """The format called ``name``; ValueError lists the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"unknown cache format {name!r}; known formats: {', '.join(sorted(FORMATS))}") from None
