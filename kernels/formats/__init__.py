"""The registry of cache formats, by the names that policies and op arguments use."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.fp8 import FP8_FORMATS
from kvcompile.kernels.formats.int4 import ASYMMETRIC_INT_FORMATS
from kvcompile.kernels.formats.int8 import INT8_FORMATS
from kvcompile.kernels.formats.raw import RAW_FORMATS
from kvcompile.kernels.formats.turboquant import TURBOQUANT_FORMATS, TurboQuant

FORMATS: dict[str, Format] = {
    fmt.name: fmt for fmt in (*INT8_FORMATS, *FP8_FORMATS, *ASYMMETRIC_INT_FORMATS, *TURBOQUANT_FORMATS, *RAW_FORMATS)
}

_SEEDED = re.compile(r"(?P<base>turboquant_(?P<bits>[\d.]+)bit)_seed(?P<seed>[1-9]\d{0,8})")


@functools.cache
def get_format(name: str) -> Format:
    """The format called ``name``, perhaps with a seed (``turboquant_4bit_seed7``); ValueError lists the known ones."""
    seeded = _SEEDED.fullmatch(name)
    if seeded and seeded["base"] in FORMATS:
        return TurboQuant(Fraction(seeded["bits"]), int(seeded["seed"]))
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"unknown cache format {name!r}; known formats: {', '.join(sorted(FORMATS))}") from None
