"""The users and tokens that fit into a budget of bytes, in integer arithmetic."""

from __future__ import annotations

import sympy

from kvcompile.planning.model_caches import CONTEXT

_BEYOND = 2**60
"""A number of tokens beyond every context."""


def bytes_at(nbytes: sympy.Expr, context: int) -> int:
    """The value of an expression in ``CONTEXT``, in whole bytes."""
    return int(sympy.ceiling(nbytes.subs(CONTEXT, context)))


def users_in(budget: int, nbytes: sympy.Expr, context: int) -> int:
    """The number of users with ``context`` tokens each whose caches fit into ``budget`` bytes.

    ``nbytes`` is the size of one user's caches, an expression in ``CONTEXT``.
    """
    return budget // bytes_at(nbytes, context)


def longest_context(budget: int, nbytes: sympy.Expr) -> int | None:
    """The longest context of one user in ``budget`` bytes: 0 if no token fits, None if every context fits.

    ``nbytes`` must not shrink as the context grows.
    """
    if bytes_at(nbytes, _BEYOND) <= budget:
        return None
    fits, too_long = 0, _BEYOND
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if bytes_at(nbytes, middle) <= budget:
            fits = middle
        else:
            too_long = middle
    return fits
