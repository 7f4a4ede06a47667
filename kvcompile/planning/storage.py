"""Bytes of a vector in a cache, as sympy expressions.

A format's own arithmetic is the source (``Format.bytes_per_token`` and ``Format.bits``); uncompressed dtypes are
storages too, so that everything downstream knows one kind of thing. What a cache keeps besides a constant number of
bytes a token (recent and first tokens in its own dtype) is in :meth:`Storage.nbytes` and nowhere else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import sympy

from kvcompile.kernels.formats import get_format
from kvcompile.kernels.formats.base import HEAD_DIM, Format
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Residual, Role
from kvcompile.planning.errors import PlanError

Measure = Literal["payload", "stored", "allocated"]
"""``payload``: codes alone. ``stored``: with scales and zero points, and with the tokens that are kept as they are.
``allocated``: in whole blocks of tokens."""

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
        residual: recent and first tokens that are kept as they are.
    """

    name: str
    payload: sympy.Expr
    stored: sympy.Expr
    block_tokens: int = 1
    format: Format | None = None
    residual: Residual | None = None

    def bytes_per_token(self, width: int, measure: Measure) -> sympy.Expr:
        """Bytes that one more vector of ``width`` channels adds, without the padding of blocks."""
        return (self.payload if measure == "payload" else self.stored).subs(HEAD_DIM, width)

    def nbytes(self, width: int, tokens: sympy.Expr, measure: Measure) -> sympy.Expr:
        """Bytes of the vectors, ``width`` channels each, that one head keeps for ``tokens`` tokens."""
        if measure == "allocated" and self.block_tokens > 1:
            tokens = self.block_tokens * sympy.ceiling(tokens / self.block_tokens)
        return self.bytes_per_token(width, measure) * tokens + self.residual_bytes(width, measure)

    def residual_bytes(self, width: int, measure: Measure) -> int:
        """Bytes of what one head keeps as it is. They are there in full from the first token on."""
        if self.residual is None or measure == "payload":
            return 0
        layout = PackedLayout(self.name, "key", width, self.residual)  # the role makes no difference to sizes
        if measure == "allocated":
            return layout.residual_bytes
        return self.residual.num_entries * layout.entry_bytes

    def refusal(self, width: int, role: Role) -> str | None:
        """Why keys or values of ``width`` channels cannot be stored so; None if they can."""
        if self.residual is not None:
            return PackedLayout(self.name, role, width, self.residual).unsupported(self.residual.dtype)
        return self.format.unsupported(width, role) if self.format is not None else None


@functools.cache
def uncompressed(name: str) -> Storage:
    """The storage of a cache that stays in dtype ``name``, a key of :data:`DTYPE_BYTES`."""
    nbytes = HEAD_DIM * DTYPE_BYTES[name]
    return Storage(name, nbytes, nbytes)


@functools.cache
def compressed(name: str, residual: Residual | None = None) -> Storage:
    """The storage of a cache in the format ``name`` of the registry, perhaps with tokens that are kept as they are."""
    fmt = get_format(name)
    payload = HEAD_DIM * sympy.Rational(fmt.bits) / 8
    return Storage(name, payload, fmt.bytes_per_token(), BLOCK_TOKENS, fmt, residual)


def of_dtype(dtype: str) -> Storage:
    """The storage of a cache in the model's dtype, e.g. ``bfloat16``; PlanError if a cache cannot have it."""
    if dtype not in _DTYPES:
        raise PlanError(f"the config's dtype {dtype!r} is none that a cache can have ({', '.join(_DTYPES)})")
    return uncompressed(_DTYPES[dtype])
