"""The registry of cache formats, by the names that policies and op arguments use."""

from __future__ import annotations

import copy
import functools
import re

from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.fp8 import FP8_FORMATS, Fp8
from kvcompile.kernels.formats.fp8_ds_mla import FP8_DS_MLA
from kvcompile.kernels.formats.int4 import ASYMMETRIC_INT_FORMATS
from kvcompile.kernels.formats.int8 import INT8_FORMATS
from kvcompile.kernels.formats.raw import RAW_FORMATS
from kvcompile.kernels.formats.turboquant import TURBOQUANT_FORMATS

FORMATS: dict[str, Format] = {
    fmt.name: fmt for fmt in (*INT8_FORMATS, *FP8_FORMATS, *ASYMMETRIC_INT_FORMATS, *TURBOQUANT_FORMATS, *RAW_FORMATS)
}

LATENT_FORMATS: dict[str, Format] = {FP8_DS_MLA.name: FP8_DS_MLA}
"""Formats for latents, which serve as keys and values. Each supports one head_dim only, and has no levels."""

_SEEDED = re.compile(r"(?P<base>\w[\w.]*)_seed(?P<seed>[1-9]\d{0,8})")
_SCALED = re.compile(r"(?P<base>fp8_e\dm\d)_scale(?P<scale>[\d.]+(e[+-]?\d+)?)")


@functools.cache
def get_format(name: str) -> Format:
    """The format called ``name``.

    A name may end in a seed for the rotation of a rotated format (``turboquant_4bit_seed7``), or in the static scale of
    8-bit floats (``fp8_e4m3_scale0.0123``).

    Raises:
        ValueError: there is no such format; the message lists the known formats.
    """
    seeded = _SEEDED.fullmatch(name)
    if seeded and seeded["base"] in FORMATS:
        return with_rotation_seed(FORMATS[seeded["base"]], int(seeded["seed"]))
    scaled = _SCALED.fullmatch(name)
    if scaled and f"{scaled['base']}_unit" in FORMATS:
        return with_static_scale(FORMATS[f"{scaled['base']}_unit"], float(scaled["scale"]))
    known = FORMATS | LATENT_FORMATS
    if name not in known:
        raise ValueError(f"unknown cache format {name!r}; known formats: {', '.join(sorted(known))}")
    return known[name]


def with_rotation_seed(fmt: Format, seed: int) -> Format:
    """``fmt`` with random signs before the Hadamard matrix of its rotation.

    Args:
        fmt: a rotated format.
        seed: from 1 to 999999999. These seeds hash to different numbers, and names stay short.

    Raises:
        ValueError: the format is not rotated.
    """
    if not fmt.rotated:
        rotated = ", ".join(name for name, known in FORMATS.items() if known.rotated)
        raise ValueError(f"{fmt.name} is not rotated, so it cannot have a rotation seed; rotated formats: {rotated}")
    seeded = copy.copy(fmt)
    seeded.name, seeded.rotation_seed = f"{fmt.name}_seed{seed}", seed
    return seeded


def with_static_scale(fmt: Format, scale: float) -> Format:
    """``fmt`` with one scale for all vectors of a cache.

    Raises:
        ValueError: the format takes no static scale, or ``scale`` is out of bounds.
    """
    if not isinstance(fmt, Fp8) or not fmt.takes_static_scale:
        known = ", ".join(name for name, known in FORMATS.items() if known.takes_static_scale)
        raise ValueError(f"{fmt.name} cannot have a static scale; formats that can: {known}")
    return fmt.with_static_scale(scale)
