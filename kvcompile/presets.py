"""Names that a policy may give for a dtype, and the pair of cache formats that each one stands for."""

from __future__ import annotations

from kvcompile.errors import PolicyError, did_you_mean
from kvcompile.kernels.formats import FORMATS
from kvcompile.passes.site import FormatPair

DEFAULT_PRESET = "int8_per_token_head"

AUTO = "auto"
"""The dtype that leaves a cache as the model made it."""

PRESETS: dict[str, FormatPair] = {
    "int8_per_token_head": FormatPair("int8_per_token_head", "int8_per_token_head"),
    "fp8_e4m3": FormatPair("fp8_e4m3", "fp8_e4m3"),
    "int4_per_token_head": FormatPair("int4_per_token_head", "int4_per_token_head"),
    "turboquant_k8v4": FormatPair("fp8_e4m3_unit", "int4_unrotated"),
    "turboquant_4bit_nc": FormatPair("turboquant_4bit", "int4_unrotated"),
    "turboquant_k3v4_nc": FormatPair("turboquant_3bit", "int4_unrotated"),
    "turboquant_3bit_nc": FormatPair("turboquant_3bit", "int3_unrotated"),
}
"""Presets carry vLLM's names and mean what vLLM means by them."""


def preset_names() -> list[str]:
    """Names that ``dtype`` and ``options={"policy": ...}`` accept, besides ``auto`` and single formats."""
    return list(PRESETS)


def known_names() -> list[str]:
    """Everything a dtype may be: presets, then formats that are no preset, then ``auto``."""
    return [*PRESETS, *(name for name in FORMATS if name not in PRESETS), AUTO]


def resolve(name: str) -> FormatPair | None:
    """The formats that ``name`` stands for; a single format serves both halves, and ``auto`` gives None.

    Raises:
        PolicyError: no preset or format is called ``name``; the message lists what exists.
    """
    if name == AUTO:
        return None
    if name in PRESETS:
        return PRESETS[name]
    if name in FORMATS:
        return FormatPair(name, name)
    known = known_names()
    raise PolicyError(f"unknown dtype {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")
