"""Bytes of a vector in a cache, as sympy expressions.

A format's own arithmetic is the source (``Format.bytes_per_token`` and ``Format.bits``); uncompressed dtypes are
storages too, so that everything downstream knows one kind of thing. What a format keeps besides a constant number of
bytes a token (recent tokens in high precision, sinks) belongs into :meth:`Storage.nbytes` and nowhere else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import sympy

from kvcompile.kernels.formats import get_format
from kvcompile.kernels.formats.base import HEAD_DIM, Format
from kvcompile.kernels.layout import BLOCK_TOKENS, Role
from kvcompile.planning.errors import PlanError

Measure = Literal["payload", "stored", "allocated"]
"""``payload``: codes alone. ``stored``: with scales and zero points. ``allocated``: in whole blocks of tokens."""

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Uncompressed caches, by the names that policies may have for them here."""


@dataclass(frozen=True)
class Storage:
    """How vectors are stored.

    Attributes:
        name: a key of :data:`DTYPE_BYTES`, or a format's name.
        payload: bytes of the codes of a vector, in ``HEAD_DIM``.
        stored: the same with scales and zero points.
        block_tokens: memory is allocated for multiples of this.
        format: None for an uncompressed dtype.
    """

    name: str
    payload: sympy.Expr
    stored: sympy.Expr
    block_tokens: int = 1
    format: Format | None = None

    def nbytes(self, width: int, tokens: sympy.Expr, measure: Measure) -> sympy.Expr:
        """Bytes of the vectors, ``width`` channels each, that one head keeps for ``tokens`` tokens."""
        per_token = (self.payload if measure == "payload" else self.stored).subs(HEAD_DIM, width)
        if measure == "allocated" and self.block_tokens > 1:
            tokens = self.block_tokens * sympy.ceiling(tokens / self.block_tokens)
        return per_token * tokens

    def refusal(self, width: int, role: Role) -> str | None:
        """Why keys or values of ``width`` channels cannot be stored so; None if they can."""
        return self.format.unsupported(width, role) if self.format is not None else None


@functools.cache
def uncompressed(name: str) -> Storage:
    """The storage of a cache that stays in dtype ``name``, a key of :data:`DTYPE_BYTES`."""
    nbytes = HEAD_DIM * DTYPE_BYTES[name]
    return Storage(name, nbytes, nbytes)


@functools.cache
def compressed(name: str) -> Storage:
    """The storage of a cache in the format ``name`` of the registry."""
    fmt = get_format(name)
    return Storage(name, HEAD_DIM * sympy.Rational(fmt.bits) / 8, fmt.bytes_per_token(), BLOCK_TOKENS, fmt)


def of_dtype(dtype: str) -> Storage:
    """The storage of a cache in the model's dtype, e.g. ``bfloat16``; PlanError if a cache cannot have it."""
    if dtype not in _DTYPES:
        raise PlanError(f"the config's dtype {dtype!r} is none that a cache can have ({', '.join(_DTYPES)})")
    return uncompressed(_DTYPES[dtype])
