"""Sizes, rates and contexts as text.

Bytes follow IEC 80000-13: ``GB`` is 10**9 bytes and ``GiB`` is 2**30 bytes. Contexts are written as in names of models:
``k`` in ``32k`` is 1024 tokens.
"""

from __future__ import annotations

import re
from fractions import Fraction

from kvcompile.errors import shown
from kvcompile.planning.errors import PlanError

_BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("kMGT")},
    **{f"{prefix}iB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")},
}
_TOKENS = {"": 1, "k": 1024, "K": 1024, "M": 1024**2}

SIZE_FORMS = "a number and a unit: 80GiB (2**30 bytes), 80GB (10**9 bytes), or B, kB, MB, TB, KiB, MiB, TiB"
RATE_FORMS = "bytes per second: 4.35TB/s, 864GB/s"
CONTEXT_FORMS = "a number of tokens: 5000, 32k (k is 1024 tokens) or 1M (1024k)"


def parse_size(text: str, what: str) -> int:
    """Bytes of a size such as ``80GiB``, ``1.5TB`` or ``512MiB``.

    Args:
        text: the size.
        what: the name of the argument in errors, e.g. ``--memory``.

    Raises:
        PlanError: ``text`` is not a valid size.
    """
    size = _quantity(text, _BYTES)
    if size is None:
        raise PlanError(f"{what}: {shown(text)} is not a valid size{_spelling(text, _BYTES)} (write {SIZE_FORMS})")
    return int(size)


def parse_rate(text: str, what: str) -> int:
    """Bytes per second of a rate such as ``4.35TB/s``. ``what`` names the argument in errors.

    Raises:
        PlanError: ``text`` is not a valid rate.
    """
    size = _quantity(text.removesuffix("/s"), _BYTES) if text.endswith("/s") else None
    if not size:
        raise PlanError(f"{what}: {shown(text)} is not a valid bandwidth (write {RATE_FORMS})")
    return int(size)


def parse_context(text: str, what: str) -> int:
    """Tokens of a context such as ``5000``, ``32k`` or ``1M``. ``what`` names the argument in errors.

    Raises:
        PlanError: ``text`` is not a valid context.
    """
    tokens = _quantity(text, _TOKENS)
    if not tokens or tokens.denominator != 1:
        raise PlanError(
            f"{what}: {shown(text)} is not a valid context{_spelling(text, _TOKENS)} (write {CONTEXT_FORMS})"
        )
    return int(tokens)


def format_size(num_bytes: int) -> str:
    """A size in the largest binary unit that gives at least 1: ``74.00 GiB``, ``128.0 KiB``, ``512 B``."""
    for unit, digits in (("TiB", 2), ("GiB", 2), ("MiB", 1), ("KiB", 1)):
        if abs(num_bytes) >= _BYTES[unit]:
            return f"{num_bytes / _BYTES[unit]:.{digits}f} {unit}"
    return f"{num_bytes} B"


def format_rate(bytes_per_second: int) -> str:
    """A rate in decimal units, as in data sheets: ``4.35 TB/s``."""
    unit = "TB" if bytes_per_second >= _BYTES["TB"] else "GB"
    return f"{bytes_per_second / _BYTES[unit]:g} {unit}/s"


def format_context(tokens: int) -> str:
    """A context as text for :func:`parse_context`: ``32k`` if this is exact, otherwise the number."""
    for unit in ("M", "k"):
        if tokens % _TOKENS[unit] == 0:
            return f"{tokens // _TOKENS[unit]}{unit}"
    return str(tokens)


def _quantity(text: str, units: dict[str, int]) -> Fraction | None:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2] not in units:
        return None
    return Fraction(match[1]) * units[match[2]]


def _spelling(text: str, units: dict[str, int]) -> str:
    """``; did you mean '80GiB'?`` if only the case of the unit in ``text`` is wrong."""
    match = re.fullmatch(r"([0-9.]{1,31} ?)([A-Za-z]+)", text.strip())
    unit = next((unit for unit in units if match and unit and unit.casefold() == match[2].casefold()), None)
    return f"; did you mean {match[1] + unit!r}?" if match and unit and unit != match[2] else ""
