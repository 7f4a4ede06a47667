"""Text for the dimensions of a stored cache: its view [batch, heads, tokens, head_dim], and vectors in its order.

The letters have their meaning in :mod:`kvcompile.kernels.layout.axes`; ``m`` is heads and channels in one dimension.
"""

from __future__ import annotations

HEADS_FIRST = "bhtd"


def permuted(text: str, axes: str, wanted: str) -> str:
    """``text``, whose dimensions are ``axes``, with its dimensions in the order ``wanted``."""
    order = [axes.index(axis) for axis in wanted]
    moved = [dim for dim, place in enumerate(order) if dim != place]
    if not moved:
        return text
    if len(moved) == 2:
        return f"{text}.transpose({moved[0]}, {moved[1]})"
    return f"{text}.permute({', '.join(map(str, order))})"


def heads_first(stored: str, axes: str) -> str:
    """The view [batch, heads, tokens, head_dim] of a stored cache; ``k`` has new vectors in these dimensions."""
    if "m" in axes:
        stored, axes = f"{stored}.unflatten({axes.index('m')}, (k.shape[1], -1))", axes.replace("m", "hd")
    present = "".join(axis for axis in HEADS_FIRST if axis in axes)
    text = permuted(stored, axes, present)
    for dim, axis in enumerate(HEADS_FIRST):
        if axis not in axes:
            text = f"{text}.unsqueeze({dim})"
    return text


def stored_order(vectors: str, axes: str) -> str:
    """Vectors [batch, heads, tokens, head_dim] in the dimensions ``axes``; a missing dimension has size 1."""
    if "m" in axes:
        return f"{stored_order(vectors, axes.replace('m', 'hd'))}.flatten({axes.index('m')})"
    for dim, axis in enumerate(HEADS_FIRST):
        if axis not in axes:
            vectors = f"{vectors}.squeeze({dim})"
    return permuted(vectors, "".join(axis for axis in HEADS_FIRST if axis in axes), axes)


def index(axes: str, **at: str) -> str:
    """The text inside of brackets that indexes some dimensions: ``index("bthd", t="pos")`` is ``:, pos``."""
    places = [at.get(axis, ":") for axis in axes]
    while places[-1] == ":":
        places.pop()
    return ", ".join(places)
