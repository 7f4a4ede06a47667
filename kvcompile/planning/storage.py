"""Bytes of a vector in a cache, as sympy expressions.

The expressions come from the formats themselves (``Format.bytes_per_token`` and ``Format.bits``). An uncompressed dtype
is a :class:`Storage` as well. :meth:`Storage.nbytes` adds the exact blocks of a cache (recent and first tokens in the
cache's own dtype), whose size does not depend on the number of tokens.
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
"""``payload``: codes alone. ``stored``: codes, scales, zero points and exact tokens. ``allocated``: the same in whole
blocks of tokens."""

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an element of uncompressed caches, by the names that the planner accepts in place of a policy."""


@dataclass(frozen=True)
class Storage:
    """A way to store vectors.

    Attributes:
        name: a key of :data:`DTYPE_BYTES`, or a format's name.
        payload: bytes of the codes of a vector, an expression in ``HEAD_DIM``.
        stored: bytes of a vector with scales and zero points, an expression in ``HEAD_DIM``.
        block_tokens: memory is allocated for multiples of this number of tokens.
        format: the format; None for an uncompressed dtype.
        residual: the recent and first tokens that are kept exact, if any.
    """

    name: str
    payload: sympy.Expr
    stored: sympy.Expr
    block_tokens: int = 1
    format: Format | None = None
    residual: Residual | None = None

    def bytes_per_token(self, width: int, measure: Measure) -> sympy.Expr:
        """Bytes of an additional vector of ``width`` channels, without the padding of blocks."""
        return (self.payload if measure == "payload" else self.stored).subs(HEAD_DIM, width)

    def nbytes(self, width: int, tokens: sympy.Expr, measure: Measure) -> sympy.Expr:
        """Bytes of the vectors, ``width`` channels each, that one head keeps for ``tokens`` tokens."""
        if measure == "allocated" and self.block_tokens > 1:
            tokens = self.block_tokens * sympy.ceiling(tokens / self.block_tokens)
        return self.bytes_per_token(width, measure) * tokens + self.residual_bytes(width, measure)

    def residual_bytes(self, width: int, measure: Measure) -> int:
        """Bytes of the exact blocks of one head. They are allocated in full, whatever the number of tokens."""
        if self.residual is None or measure == "payload":
            return 0
        layout = PackedLayout(self.name, "key", width, self.residual)  # sizes do not depend on the role
        if measure == "allocated":
            return layout.residual_bytes
        return self.residual.num_entries * layout.entry_bytes

    def refusal(self, width: int, role: Role) -> str | None:
        """Why this storage cannot hold keys or values of ``width`` channels; None if it can."""
        if self.residual is not None:
            return PackedLayout(self.name, role, width, self.residual).unsupported(self.residual.dtype)
        return self.format.unsupported(width, role) if self.format is not None else None


@functools.cache
def uncompressed(name: str) -> Storage:
    """The storage of an uncompressed cache in dtype ``name``, a key of :data:`DTYPE_BYTES`."""
    nbytes = HEAD_DIM * DTYPE_BYTES[name]
    return Storage(name, nbytes, nbytes)


@functools.cache
def compressed(name: str, residual: Residual | None = None) -> Storage:
    """The storage of a cache in the format called ``name``, with the exact blocks of ``residual``."""
    fmt = get_format(name)
    payload = HEAD_DIM * sympy.Rational(fmt.bits) / 8
    return Storage(name, payload, fmt.bytes_per_token(), BLOCK_TOKENS, fmt, residual)


def of_dtype(dtype: str) -> Storage:
    """The storage of a cache in the model's dtype, e.g. ``bfloat16``; PlanError if a cache cannot have it."""
    if dtype not in _DTYPES:
        raise PlanError(f"the config's dtype {dtype!r} is not a dtype of caches (write one of {', '.join(_DTYPES)})")
    return uncompressed(_DTYPES[dtype])
