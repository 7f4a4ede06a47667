"""The valid values of ``dtype`` in a policy, and the format pair of each.

A policy may also describe a format: the dtype of its elements, the granularity of its scales, and the group size.
"""

from __future__ import annotations

from kvcompile.errors import PolicyError, did_you_mean, shown
from kvcompile.kernels.formats import CALIBRATED_FORMATS, FORMATS, LATENT_FORMATS, is_calibrated
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.passes.site import FormatPair

DEFAULT_PRESET = "int8_per_token_head"

AUTO = "auto"
"""The dtype that leaves a cache unpacked."""

PRESETS: dict[str, FormatPair] = {
    "int8_per_token_head": FormatPair("int8_per_token_head", "int8_per_token_head"),
    "fp8_e4m3": FormatPair("fp8_e4m3", "fp8_e4m3"),
    "int4": FormatPair("int4_per_channel", "int4_per_token_head"),
    "int4_per_token_head": FormatPair("int4_per_token_head", "int4_per_token_head"),
    "turboquant_k8v4": FormatPair("fp8_e4m3_unit", "int4_unrotated"),
    "turboquant_4bit_nc": FormatPair("turboquant_4bit", "int4_unrotated"),
    "turboquant_k3v4_nc": FormatPair("turboquant_3bit", "int4_unrotated"),
    "turboquant_3bit_nc": FormatPair("turboquant_3bit", "int3_unrotated"),
    "fp8_turboquant_4bit": FormatPair("fp8_e4m3_unit", "turboquant_4bit"),
    "int4_turboquant_4bit": FormatPair("int4_per_channel", "turboquant_4bit"),
    "turboquant_4bit": FormatPair("turboquant_4bit", "turboquant_4bit"),
    "turboquant_3bit": FormatPair("turboquant_3bit", "turboquant_3bit"),
    "turboquant_4bit_r128": FormatPair("turboquant_4bit", "turboquant_4bit", residual_length=128),
    "turboquant_3bit_r128": FormatPair("turboquant_3bit", "turboquant_3bit", residual_length=128),
    "turboquant_k3v2_r128": FormatPair("turboquant_3bit", "turboquant_2bit", residual_length=128),
}
"""Presets without a calibration.

``int8_per_token_head``, ``fp8_e4m3``, ``int4_per_token_head``, ``turboquant_k8v4`` and ``turboquant_*_nc`` have the
names and the meaning of vLLM's formats. ``int4`` is our own name for the formats of KIVI (arXiv:2402.02750): keys of
four bits with scales per channel, whose newest block of tokens keeps the dtype of the cache, and values with scales per
token. Unlike KIVI's, these values are rotated. The rotation takes no bytes and halves the increase of bits per byte.

The other presets have the best measured quality for their sizes without a calibration: each has a smaller divergence
than the smallest TurboQuant preset of vLLM that takes at least as many bytes (docs/quality.md). A name of two formats
gives the format of keys first. ``r128`` keeps the 128 most recent tokens in the dtype of the cache, KIVI's residual
length.
"""

CALIBRATED_PRESETS: dict[str, FormatPair] = {
    "turboquant_4bit_nc_mean": FormatPair("turboquant_4bit_mean", "turboquant_4bit_mean"),
    "turboquant_3bit_nc_mean": FormatPair("turboquant_3bit_mean", "turboquant_3bit_mean"),
    "transform_5bit": FormatPair("transform_6655", "transform_6532"),
    "transform_4bit": FormatPair("transform_6543", "transform_6420"),
    "transform_3.2bit": FormatPair("transform_6433", "transform_5300"),
    "transform_2.6bit": FormatPair("transform_5421", "transform_5200"),
    "transform_2.2bit": FormatPair("transform_4321", "transform_4200"),
}
"""Presets that need a calibration of the model, which the policy names as ``transforms``.

The presets of TurboQuant subtract the means of keys and of values. The other presets are named after their bits per
element at a head_dim of 128, scales included.
"""

CALIBRATED_NAMES = tuple(
    dict.fromkeys(
        (*CALIBRATED_FORMATS, *(name for pair in CALIBRATED_PRESETS.values() for name in (pair.key, pair.value)))
    )
)
"""Names of calibrated formats, for lists: the formats of presets, and others. ``transform_*`` has more names."""

PER_TENSOR = "per_tensor"
"""The granularity of one static scale for all vectors of a cache."""

GRANULARITIES = {"per_token_head": "token", "per_channel": "channel", "per_group": "group"}
"""The granularities of stored scales: the name in policies -> the name in formats."""


def preset_names() -> list[str]:
    """The presets, which ``dtype`` and ``options={"policy": ...}`` accept besides ``auto`` and single formats.

    Presets that need a calibration are not included.
    """
    return list(PRESETS)


def known_names() -> list[str]:
    """All valid values of a dtype: presets, then formats with other names, then ``auto``."""
    return [
        *PRESETS,
        *CALIBRATED_PRESETS,
        *(name for name in FORMATS if name not in PRESETS),
        *CALIBRATED_NAMES,
        *LATENT_FORMATS,
        AUTO,
    ]


def resolve(name: str) -> FormatPair | None:
    """The formats that ``name`` stands for. A single format serves keys and values; ``auto`` gives None.

    Raises:
        PolicyError: no preset or format is called ``name``; the message lists the valid names.
    """
    if name == AUTO:
        return None
    if name in PRESETS or name in CALIBRATED_PRESETS:
        return (PRESETS | CALIBRATED_PRESETS)[name]
    if name in FORMATS or name in LATENT_FORMATS or is_calibrated(name):
        return FormatPair(name, name)
    raise PolicyError(
        f"unknown dtype {shown(name)}{did_you_mean(name, known_names())} (known: {', '.join(list(PRESETS)[:4])}, ...; "
        "docs/policy.md has all)"
    )


def exact_tokens(name: str | None) -> tuple[int, int]:
    """The numbers of recent and of first tokens that a preset keeps in full precision; zeros for other names."""
    pair = (PRESETS | CALIBRATED_PRESETS).get(name or "")
    return (pair.residual_length, pair.sink_tokens) if pair is not None else (0, 0)


def described(dtype: str, granularity: str, group_size: int | None) -> str:
    """The format with elements of ``dtype`` and scales of a granularity.

    Args:
        dtype: the beginning of format names, e.g. ``int4`` or ``fp8_e4m3``.
        granularity: a key of :data:`GRANULARITIES`, or PER_TENSOR, which gives the format with scale 1.
        group_size: channels of a group; with scales per channel, the tokens that share a scale.

    Raises:
        PolicyError: there is no such format; the message lists the formats with this granularity.
    """
    formats = _formats_with(granularity)
    if granularity == "per_channel" and group_size not in (None, BLOCK_TOKENS):
        raise PolicyError(
            f"group_size {group_size}: with scales per channel, a group is a block of {BLOCK_TOKENS} tokens; drop it"
        )
    if granularity in ("per_token_head", PER_TENSOR) and group_size is not None:
        words = "a scale per tensor" if granularity == PER_TENSOR else "scales per token and head"
        raise PolicyError(f"group_size {group_size}: with {words} there are no groups; drop it")
    if granularity == "per_group" and group_size is None:
        sizes = sorted({FORMATS[name].group_size for name in formats})
        raise PolicyError(f"granularity per_group needs a group_size ({', '.join(map(str, sizes))})")
    suffix = f"_{group_size}" if granularity == "per_group" else ""
    for name in (f"{dtype}_{granularity}{suffix}", f"{dtype}_unit", dtype):
        if name in formats:
            return name
    wanted = f"{dtype} {granularity}" + (f" of {group_size}" if granularity == "per_group" else "")
    raise PolicyError(f"there is no format {wanted} ({granularity}: {', '.join(formats)})")


def element_dtypes() -> list[str]:
    """The valid dtypes of :func:`described` that are not names of formats or presets."""
    return [name for name in dict.fromkeys(name.partition("_per_")[0] for name in FORMATS) if name not in known_names()]


def _formats_with(granularity: str) -> list[str]:
    """The names of all formats with this granularity."""
    if granularity == PER_TENSOR:
        return [name for name, fmt in FORMATS.items() if fmt.takes_static_scale]
    wanted = GRANULARITIES[granularity]
    return [name for name, fmt in FORMATS.items() if fmt.granularity == wanted and fmt.scale_dtype is not None]
