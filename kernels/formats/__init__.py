"""The registry of cache formats, by the names that policies and op arguments use."""

from __future__ import annotations

from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.int8 import Int8PerTokenHead

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (Int8PerTokenHead(),)}


def get_format(name: str) -> Format:
    """The format called ``name``; ValueError lists the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"unknown cache format {name!r}; known formats: {', '.join(sorted(FORMATS))}") from None
