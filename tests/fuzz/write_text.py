"""The Python text of writes: new tokens in a cache of fixed size, in a window, in a growing cache, and in a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuzz.places import index, stored_order
from fuzz.program import BLOCK_SIZE, FUNCTIONAL, GROWING, PAGES, READ_ONLY, SHIFTING, SLOTS, STATIC, WINDOW

KEEP = 6
"""How many tokens a window keeps."""


@dataclass(frozen=True)
class Target:
    """The tensor that a write changes.

    Attributes:
        name: its name in the text.
        axes: the order of its dimensions.
        x: the new vectors in that order.
        vectors: the new vectors [batch, heads, tokens, head_dim].
        positions: the positions of the new tokens.
    """

    name: str
    axes: str
    x: str
    vectors: str
    positions: str

    @property
    def dim(self) -> int:
        return self.axes.index("t")

    def at(self, **place: str) -> str:
        return f"{self.name}[{index(self.axes, **place)}]"


def _index_copy(to: Target) -> list[str]:
    return [f"{to.name}.index_copy_({to.dim}, {to.positions}, {to.x})"]


def _assignment(to: Target) -> list[str]:
    return [f"{to.at(t=to.positions)} = {to.x}"]


def _index_put(to: Target) -> list[str]:
    if to.dim == 0:
        return [f"{to.name}.index_put_(({to.positions},), {to.x})"]
    first = f"transpose(0, {to.dim})"
    return [f"{to.name}.{first}.index_put_(({to.positions},), {to.x}.{first})"]


def _per_sequence(to: Target) -> list[str]:
    rows = "torch.arange(k.shape[0], device=k.device)[:, None]"
    columns = f"({to.positions}).expand(k.shape[0], -1)"
    if "b" not in to.axes:
        return _assignment(to)
    neighbours = abs(to.axes.index("b") - to.dim) == 1
    axes = to.axes if neighbours else "bt" + to.axes.replace("b", "").replace("t", "")
    if neighbours and to.axes.index("b") > to.dim:
        rows, columns = columns.replace("-1)", "-1).mT"), rows.replace("[:, None]", "")
        return [f"{to.at(t=rows, b=columns)} = {stored_order(to.vectors, axes)}"]
    return [f"{to.at(b=rows, t=columns)} = {stored_order(to.vectors, axes)}"]


def _scatter(to: Target) -> list[str]:
    shape = ", ".join("-1" if axis == "t" else "1" for axis in to.axes)
    return [f"new = {to.x}", f"{to.name}.scatter_({to.dim}, ({to.positions}).view({shape}).expand(new.shape), new)"]


def _slice(to: Target) -> list[str]:
    return [f"{to.at(t='start:start + k.shape[2]')} = {to.x}"]


def _narrow(to: Target) -> list[str]:
    return [f"{to.name}.narrow({to.dim}, start, k.shape[2]).copy_({to.x})"]


def _select(to: Target) -> list[str]:
    return [f"{to.at(t='start')} = {to.x}.select({to.dim}, 0)"]


def _token_by_token(to: Target) -> list[str]:
    return [
        f"places, new = {to.positions}, {to.x}",
        "for i in range(k.shape[2]):",
        f"    {to.at(t='places[i:i + 1]')} = new.narrow({to.dim}, i, 1)",
    ]


def _where(to: Target) -> list[str]:
    dims = ", ".join("-1" if axis == "t" else "1" for axis in to.axes)
    return [
        f"here = (torch.arange({to.name}.shape[{to.dim}], device=k.device) == ({to.positions})[0]).view({dims})",
        f"{to.name}.copy_(torch.where(here, {to.x}, {to.name}))",
    ]


def _functional(to: Target) -> list[str]:
    return [f"{to.name}.copy_({to.name}.index_copy({to.dim}, {to.positions}, {to.x}))"]


def _two_writes(to: Target) -> list[str]:
    return [
        f"places, new = {to.positions}, {to.x}",
        f"{to.name}.index_copy_({to.dim}, places[:1], new.narrow({to.dim}, 0, 1))",
        f"{to.at(t='places[1:]')} = new[{index(to.axes, t='1:')}]",
    ]


def _sequence_by_sequence(to: Target) -> list[str]:
    if "b" not in to.axes:
        return _index_copy(to)
    dim = to.axes.index("b")
    return [
        f"{to.at(b='1:')}.index_copy_({to.dim}, {to.positions}, {to.x}[{index(to.axes, b='1:')}])",
        f"{to.name}.narrow({dim}, 0, 1).index_copy_({to.dim}, {to.positions}, {to.x}.narrow({dim}, 0, 1))",
    ]


def _slice_of_sequences(to: Target) -> list[str]:
    if "b" not in to.axes:
        return _slice(to)
    return [f"{to.at(b=':k.shape[0]', t='start:start + k.shape[2]')} = {to.x}"]


def _narrow_from_data(to: Target) -> list[str]:
    return ["first = pos[0].item()", f"{to.name}.narrow({to.dim}, first, k.shape[2]).copy_({to.x})"]


def _slice_from_data(to: Target) -> list[str]:
    n = "k.shape[2]"
    return [
        "first = pos[0].item()",
        "torch._check(first >= 0)",
        f"torch._check(first + {n} <= {to.name}.shape[{to.dim}])",
        f"{to.at(t=f'first:first + {n}')} = {to.x}",
    ]


WRITES: dict[str, Callable[[Target], list[str]]] = {
    "index_copy_": _index_copy,
    "assignment": _assignment,
    "slice": _slice,
    "index_put_": _index_put,
    "per_sequence": _per_sequence,
    "scatter_": _scatter,
    "narrow": _narrow,
    "select": _select,
    "where": _where,
    "functional": _functional,
    "two_writes": _two_writes,
    "token_by_token": _token_by_token,
    "sequence_by_sequence": _sequence_by_sequence,
    "slice_of_sequences": _slice_of_sequences,
    "narrow_from_data": _narrow_from_data,
    "slice_from_data": _slice_from_data,
}
"""Writes of a cache of fixed size."""

BY_INDEX = ("assignment", "index_put_", "per_sequence", "index_put")
"""Writes that take negative positions."""

ONE_TOKEN = ("select", "where", "select_scatter", "masked")
"""Writes of exactly one token."""

FROM_DATA = ("narrow_from_data", "slice_from_data")
"""Writes that read the first position from a tensor, which must not be empty."""

BY_START = ("slice", "narrow", "select", "slice_of_sequences", "slice_scatter", "select_scatter", *FROM_DATA)
"""Writes that take a number, not a tensor, for the first position."""


def _index_put_out_of_place(to: Target) -> list[str]:
    if to.dim == 0:
        return [f"{to.name} = {to.name}.index_put(({to.positions},), {to.x})"]
    first = f"transpose(0, {to.dim})"
    return [f"{to.name} = {to.name}.{first}.index_put(({to.positions},), {to.x}.{first}).{first}"]


def _scatter_out_of_place(to: Target) -> list[str]:
    new, write = _scatter(to)
    return [new, f"{to.name} = " + write.replace("scatter_", "scatter")]


def _where_out_of_place(to: Target) -> list[str]:
    here, _ = _where(to)
    return [here, f"{to.name} = torch.where(here, {to.x}, {to.name})"]


def _written_copy(to: Target) -> list[str]:
    return [f"{to.name} = {to.name}.clone()", *_index_copy(to)]


OUT_OF_PLACE: dict[str, Callable[[Target], list[str]]] = {
    "index_copy": lambda to: [f"{to.name} = {to.name}.index_copy({to.dim}, {to.positions}, {to.x})"],
    "index_put": _index_put_out_of_place,
    "scatter": _scatter_out_of_place,
    "slice_scatter": lambda to: [f"{to.name} = {to.name}.slice_scatter({to.x}, {to.dim}, start, start + k.shape[2])"],
    "select_scatter": lambda to: [f"{to.name} = {to.name}.select_scatter({to.x}.select({to.dim}, 0), {to.dim}, start)"],
    "masked": _where_out_of_place,
    "written_copy": _written_copy,
}
"""Writes out of place: the cache that was passed is unchanged, and the step returns the new one."""


def _roll(to: Target) -> list[str]:
    return [
        f"rolled = {to.name}.roll(-k.shape[2], {to.dim})",
        f"rolled[{index(to.axes, t='-k.shape[2]:')}] = {to.x}",
        f"{to.name}.copy_(rolled)",
    ]


def _reorder(to: Target) -> list[str]:
    return [
        f"order = torch.arange({to.name}.shape[{to.dim}], device=k.device).roll(-k.shape[2])",
        f"{to.name}.copy_({to.at(t='order')})",
        f"{to.at(t='-k.shape[2]:')} = {to.x}",
    ]


def _shift(to: Target) -> list[str]:
    return [
        f"{to.at(t=':-k.shape[2]')} = {to.at(t='k.shape[2]:')}.clone()",
        f"{to.at(t='-k.shape[2]:')} = {to.x}",
    ]


def _cat_and_cut(to: Target) -> list[str]:
    whole = f"torch.cat([{to.name}, {to.x}], {to.dim})"
    return [f"{to.name}.copy_({whole}[{index(to.axes, t=f'-{to.name}.shape[{to.dim}]:')}])"]


def _cut_and_cat(to: Target) -> list[str]:
    return [f"{to.name}.copy_(torch.cat([{to.at(t='k.shape[2]:')}, {to.x}], {to.dim}))"]


SHIFTS = {
    "roll": _roll,
    "shift": _shift,
    "reorder": _reorder,
    "cat_and_cut": _cat_and_cut,
    "cut_and_cat": _cut_and_cat,
}
"""Writes of a full window of fixed size, which drop its oldest tokens."""


def _cat(to: Target) -> list[str]:
    return [f"{to.name} = torch.cat([{to.name}, {to.x}], {to.dim})"]


def _cat_twice(to: Target) -> list[str]:
    parts = (f"{to.x}[{index(to.axes, t=part)}]" for part in (":1", "1:"))
    return [f"{to.name} = torch.cat([{to.name}, {part}], {to.dim})" for part in parts]


def _read_the_last(to: Target) -> list[str]:
    whole = f"torch.cat([{to.name}, {to.x}], {to.dim})"
    return [f"{to.name} = {whole}[{index(to.axes, t=f'-{KEEP}:')}]"]


def _make_room(to: Target) -> list[str]:
    kept = f"{to.at(t=f'-{KEEP - 2}:')}"
    return [f"{to.name} = torch.cat([{kept}, {to.x}], {to.dim})"]


GROWTHS = {"cat": _cat, "cat_twice": _cat_twice}
WINDOWS = {"read_the_last": _read_the_last, "make_room": _make_room, "keep_the_last": _cat}


def _slots_assignment(to: Target) -> list[str]:
    return [f"{to.name}[slots] = {to.vectors}.transpose(1, 2)"]


def _slots_index_copy(to: Target) -> list[str]:
    return [f"{to.name}.index_copy_(0, slots.flatten(), {to.vectors}.transpose(1, 2).flatten(0, 1))"]


def _slots_index_put(to: Target) -> list[str]:
    return [f"{to.name}.index_put_((slots,), {to.vectors}.transpose(1, 2))"]


SLOT_WRITES = {"assignment": _slots_assignment, "index_copy_": _slots_index_copy, "index_put_": _slots_index_put}


def _pages_assignment(to: Target) -> list[str]:
    between = ", :, " if to.axes == "phtd" else ", "
    block, offset = f"slots // {BLOCK_SIZE}", f"slots % {BLOCK_SIZE}"
    return [f"{to.name}[{block}{between}{offset}] = {to.vectors}.transpose(1, 2)"]


def _pages_as_slots(to: Target) -> list[str]:
    if to.axes == "phtd":
        return _pages_assignment(to)
    return [f"{to.name}.flatten(0, 1)[slots] = {to.vectors}.transpose(1, 2)"]


PAGE_WRITES = {"assignment": _pages_assignment, "as_slots": _pages_as_slots}

READ_ONLY_WRITES = {"none": lambda to: [], "index_copy_": _index_copy}
"""A step may write its keys, its values, both or neither."""

FORMS = {
    STATIC: WRITES,
    READ_ONLY: READ_ONLY_WRITES,
    FUNCTIONAL: OUT_OF_PLACE,
    SHIFTING: SHIFTS,
    GROWING: GROWTHS,
    WINDOW: WINDOWS,
    SLOTS: SLOT_WRITES,
    PAGES: PAGE_WRITES,
}
