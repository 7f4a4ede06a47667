"""The Python text of masked writes, which keep some of the old tokens, and of reorders of the sequences of a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fuzz.places import HEADS_FIRST, heads_first, index, stored_order
from fuzz.write_text import Target

CHOSEN = {
    "sequences": "k[:, :1, :1, :1] > 0",
    "tokens": "k[:1, :1, :, :1] > 0",
    "each": "k[:, :1, :, :1] > 0",
    "never": "k[:, :1, :, :1] > 1e9",
    "number": "k[:1, :1, :1, :1] > 0",
    "first": "torch.arange(k.shape[2], device=k.device)[None, None, :, None] < 1",
}
"""Masks of new tokens, [batch or 1, 1, tokens or 1, 1]."""

CHOSEN_OF_CACHE = {
    "sequences": "k[:, :1, :1, :1] > 0",
    "tokens": "torch.arange({tokens}, device=k.device)[None, None, :, None] % 2 == 0",
    "each": "(torch.arange({tokens}, device=k.device)[None, None, :, None] % 2 == 0) ^ (k[:, :1, :1, :1] > 0)",
    "never": "k[:, :1, :1, :1] > 1e9",
    "number": "k[:1, :1, :1, :1] > 0",
    "first": "torch.arange({tokens}, device=k.device)[None, None, :, None] < 1",
}
"""Masks of all tokens of a cache, by the same names."""

WAYS = ("new", "inverted", "nested", "heads_first", "state")
"""Where a mask is: on the new vectors, in the order of the cache or of the argument, or on the written cache."""

OLD: dict[str, Callable[[Target], str]] = {
    "index_copy_": lambda to: f"{to.name}.index_select({to.dim}, {to.positions})",
    "index_copy": lambda to: f"{to.name}.index_select({to.dim}, {to.positions})",
    "assignment": lambda to: to.at(t=to.positions),
    "slice": lambda to: to.at(t="start:start + k.shape[2]"),
    "narrow": lambda to: f"{to.name}.narrow({to.dim}, start, k.shape[2])",
    "slice_scatter": lambda to: to.at(t="start:start + k.shape[2]"),
    "select": lambda to: f"{to.at(t='start')}.unsqueeze({to.dim})",
    "select_scatter": lambda to: f"{to.at(t='start')}.unsqueeze({to.dim})",
    "functional": lambda to: f"{to.name}.index_select({to.dim}, {to.positions})",
    "index_put": lambda to: to.at(t=to.positions),
    "index_put_": lambda to: to.at(t=to.positions),
    "scatter_": lambda to: _gathered(to),
    "scatter": lambda to: _gathered(to),
}
"""The tokens that a write replaces, in the order of the cache."""


def _gathered(to: Target) -> str:
    shape = ", ".join("-1" if axis == "t" else "1" for axis in to.axes)
    return f"{to.name}.gather({to.dim}, ({to.positions}).view({shape}).expand(({to.x}).shape))"


def masked(to: Target, form: str, mask: str, way: str, write: Callable[[Target], list[str]]) -> list[str]:
    """The lines of ``write`` for the new tokens that ``mask``, a key of CHOSEN, shows."""
    if way == "state" or form not in OLD:
        return _chosen_state(to, mask, write)
    name = f"masked_{to.name}"
    shows = _placed(CHOSEN[mask], to.axes)
    old, x = OLD[form](to), to.x
    lines = [f"shows = {shows}", f"old = {old}"]
    if way == "heads_first":
        vectors = f"torch.where({CHOSEN[mask]}, {to.vectors}, {heads_first('old', to.axes)})"
        lines = [f"old = {old}", f"{name} = {vectors}"]
        return [*lines, *write(replace(to, x=stored_order(name, to.axes), vectors=name))]
    if way == "inverted":
        lines += [f"{name} = torch.where(~shows, old, {x})"]
    elif way == "nested":
        lines += [f"{name} = torch.where(shows, torch.where(v.sum() > 0, {x}, old), old)"]
    else:
        lines += [f"{name} = torch.where(shows, {x}, old)"]
    return [*lines, *write(replace(to, x=name, vectors=heads_first(name, to.axes)))]


def _chosen_state(to: Target, mask: str, write: Callable[[Target], list[str]]) -> list[str]:
    lines = write(to)
    shows = _placed(CHOSEN_OF_CACHE[mask].format(tokens=f"{to.name}.shape[{to.dim}]"), to.axes)
    is_out_of_place = any(line.startswith(f"{to.name} = ") for line in lines)
    before = f"before_{to.name} = {to.name}" + ("" if is_out_of_place else ".clone()")
    chosen = f"torch.where({shows}, {to.name}, before_{to.name})"
    return [before, *lines, f"{to.name} = {chosen}" if is_out_of_place else f"{to.name}.copy_({chosen})"]


def _placed(mask: str, axes: str) -> str:
    return stored_order(f"({mask})", axes) if axes != HEADS_FIRST else f"({mask})"


REORDERS: dict[str, str] = {
    "index_select": "{x}.index_select({b}, beams)",
    "index": "{x}[{at_beams}]",
    "from_the_end": "{x}[{at_counted}]",
    "gather": "{x}.gather({b}, beams.view({ones}).expand(({x}).shape))",
    "take_along_dim": "torch.take_along_dim({x}, beams.view({ones}), {b})",
}
"""Reorders of the sequences of a cache by ``beams``, which the caller passes."""

PLACES = ("before", "written", "after")
"""When a layer reorders: before its writes, after them, after its attention."""


def reorder(name: str, axes: str, form: str, is_returned: bool) -> str:
    """The line that reorders the cache ``name``; only a cache that the step returns is a new tensor then."""
    places = {
        "x": name,
        "b": axes.index("b"),
        "at_beams": index(axes, b="beams"),
        "at_counted": index(axes, b=f"beams - {name}.shape[{axes.index('b')}]"),
        "ones": ", ".join("-1" if axis == "b" else "1" for axis in axes),
    }
    text = REORDERS[form].format(**places)
    return f"{name} = {text}" if is_returned else f"{name}.copy_({text})"
