"""The registry of cache formats, by the names that policies and op arguments use.

This room holds one module for each family of formats, and imports lang.
"""

from __future__ import annotations

import copy
import functools
import re

from kvcompile.kernels.formats import bases
from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.fp8 import FP8_FORMATS, Fp8
from kvcompile.kernels.formats.fp8_ds_mla import FP8_DS_MLA
from kvcompile.kernels.formats.int4 import ASYMMETRIC_INT_FORMATS
from kvcompile.kernels.formats.int8 import INT8_FORMATS
from kvcompile.kernels.formats.raw import RAW_FORMATS
from kvcompile.kernels.formats.transform import TRANSFORM, Transform, is_transform
from kvcompile.kernels.formats.turboquant import TURBOQUANT_FORMATS
from kvcompile.kernels.formats.uniform import UNIFORM, Uniform

FORMATS: dict[str, Format] = {
    fmt.name: fmt for fmt in (*INT8_FORMATS, *FP8_FORMATS, *ASYMMETRIC_INT_FORMATS, *TURBOQUANT_FORMATS, *RAW_FORMATS)
}

LATENT_FORMATS: dict[str, Format] = {FP8_DS_MLA.name: FP8_DS_MLA}
"""Formats for latents, which serve as keys and values. Each supports one head_dim only, and has no levels."""

MEAN = "_mean"

CALIBRATED_FORMATS = (
    *(
        f"{name}{MEAN}"
        for name in (
            *(fmt.name for fmt in TURBOQUANT_FORMATS),
            "int4_per_token_head",
            "int4_unrotated",
            "int3_unrotated",
        )
    ),
    *(f"{TRANSFORM}{bits}" for bits in ("6543", "6420", "6433", "5300", "5421", "5200", "4321", "4200")),
)
"""Names of calibrated formats, for lists. Every format with scales per token or group has a variant with a mean. Any
four numbers of bits from 6 to 0 in descending order name a transform format.
"""

_SEEDED = re.compile(r"(?P<base>\w[\w.]*)_seed(?P<seed>[1-9]\d{0,8})")
_SCALED = re.compile(r"(?P<base>fp8_e\dm\d)_scale(?P<scale>[\d.]+(e[+-]?\d+)?)")
_CALIBRATED = re.compile(rf"(?P<base>[^@]+)@(?P<basis>{bases.REFERENCE})")


@functools.cache
def get_format(name: str) -> Format:
    """The format called ``name``.

    A name may end in a seed for the rotation of a rotated format (``turboquant_4bit_seed7``), or in the static scale of
    8-bit floats (``fp8_e4m3_scale0.0123``). A calibrated format (``turboquant_3bit_mean``, ``transform_5310``) ends in
    the reference to its basis (``turboquant_3bit_mean@3f9a0c12de45``). Without a reference the format has sizes, but
    encodes nothing.

    Raises:
        ValueError: there is no such format, and the message lists the known formats; or its basis is not loaded.
    """
    calibrated = _CALIBRATED.fullmatch(name)
    if calibrated:
        return with_basis(get_format(calibrated["base"]), calibrated["basis"])
    seeded = _SEEDED.fullmatch(name)
    if seeded and (seeded["base"] in FORMATS or is_calibrated(seeded["base"])):
        return with_rotation_seed(get_format(seeded["base"]), int(seeded["seed"]))
    scaled = _SCALED.fullmatch(name)
    if scaled and f"{scaled['base']}_unit" in FORMATS:
        return with_static_scale(FORMATS[f"{scaled['base']}_unit"], float(scaled["scale"]))
    if name.removesuffix(MEAN) in FORMATS and name not in FORMATS:
        return with_mean(FORMATS[name.removesuffix(MEAN)])
    if name.startswith(TRANSFORM):
        return Transform.parse(name)
    if name.startswith(UNIFORM):
        return Uniform.parse(name)
    known = FORMATS | LATENT_FORMATS
    if name not in known:
        raise ValueError(
            f"unknown cache format {name!r}; known formats: {', '.join(sorted([*known, *CALIBRATED_FORMATS]))}"
        )
    return known[name]


def is_calibrated(name: str) -> bool:
    """Whether ``name`` is the name of a calibrated format, without a seed and a basis."""
    if name.endswith(MEAN):
        fmt = FORMATS.get(name.removesuffix(MEAN))
        return fmt is not None and can_have_mean(fmt)
    return name in CALIBRATED_FORMATS or is_transform(name)


def can_have_mean(fmt: Format) -> bool:
    """Whether a calibrated mean can be subtracted from the vectors of a format: it needs scales per token or group."""
    return not fmt.is_calibrated and fmt.has_levels and fmt.scale_dtype is not None and fmt.granularity != "channel"


def with_mean(fmt: Format) -> Format:
    """``fmt`` for vectors from which a calibrated mean is subtracted.

    Raises:
        ValueError: the format has no scales per token or group, which tell vectors from slots that were never written.
    """
    if not can_have_mean(fmt):
        raise ValueError(f"{fmt.name} cannot have a mean, which needs scales per token or per group of channels")
    centred = copy.copy(fmt)
    centred.name, centred.is_calibrated = f"{fmt.name}{MEAN}", True
    return centred


def with_basis(fmt: Format, reference: str) -> Format:
    """The calibrated format ``fmt`` with the basis to which ``reference`` refers.

    Raises:
        ValueError: the format is not calibrated, or the basis is unknown, or it is a basis for another kind of format.
    """
    if not fmt.is_calibrated:
        raise ValueError(f"{fmt.name} is not a calibrated format, so it cannot have a basis")
    basis = bases.find(reference)
    stored = 0 if basis.from_stored is None else basis.from_stored.shape[1]
    if stored != (fmt.stored_dim(basis.head_dim) if fmt.has_matrices else 0):
        raise ValueError(f"{fmt.name}: the basis {reference} is for another format")
    based = copy.copy(fmt)
    based.name, based.basis = f"{fmt.name}@{reference}", reference
    return based


def of_heads(name: str, first: int, count: int) -> str:
    """The name of a format for ``count`` of its KV heads, from ``first`` on; it differs for calibrated formats only."""
    calibrated = _CALIBRATED.fullmatch(name)
    if not calibrated:
        return name
    return f"{calibrated['base']}@{bases.reference_of_heads(calibrated['basis'], first, count)}"


def with_rotation_seed(fmt: Format, seed: int) -> Format:
    """``fmt`` with random signs before the Hadamard matrix of its rotation.

    Args:
        fmt: a rotated format.
        seed: from 1 to 999999999. These seeds hash to different numbers, and names stay short.

    Raises:
        ValueError: the format is not rotated.
    """
    if not fmt.rotated or fmt.basis:
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
