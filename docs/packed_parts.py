"""The generated part of the page on packed caches: the effect of each operator on each class.

The table comes from the tables of handlers in ``kvcompile/packed/``; :mod:`make_pages` puts it into the page.
"""

from __future__ import annotations

import inspect
from typing import Any

from reference_parts import table

from kvcompile.compat.tensors import schema_of
from kvcompile.packed.in_place import changes_tensor
from kvcompile.packed.live_view import LiveView
from kvcompile.packed.op_table import is_view_op
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedRanges, PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor

CLASSES: tuple[type[PackedSubclass], ...] = (PackedTensor, PackedPool, PackedStack, PackedRanges, LiveView)


def operators() -> str:
    """The effect on a packed tensor of each class, for each operator that some class handles, and for all others."""
    handled = sorted({op for one in CLASSES for op in one.handlers}, key=_name)
    rows: dict[str, list[str]] = {}
    for op in handled:
        cells = [_by_handler(one.handlers[op]) if op in one.handlers else _general_rule(op) for one in CLASSES]
        known = rows.setdefault(_name(op), cells)
        # Overloads of one operator have the same handlers.
        assert known == cells, op
    others = [
        ("others that change a shape or a storage", "refused"),
        ("others that write an argument", "stored"),
        ("others that return a view", "live view"),
        ("all others", "dequantized"),
    ]
    names = [f"`{one.__name__}`" for one in CLASSES]
    return table(
        ["operator", *names],
        [
            *([f"`{name}`", *cells] for name, cells in rows.items()),
            *([name, *[rule] * len(CLASSES)] for name, rule in others),
        ],
    )


def _name(op: Any) -> str:
    return str(schema_of(op).name).removeprefix("aten::")


def _by_handler(handler: Any) -> str:
    return "live view" if inspect.get_annotations(handler).get("return") == "LiveView" else "packed"


def _general_rule(op: Any) -> str:
    """The effect on a packed tensor of a class without a handler for the operator."""
    if changes_tensor(op):
        return "refused"
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema_of(op).arguments):
        return "stored"
    return "live view" if is_view_op(op) else "dequantized"
