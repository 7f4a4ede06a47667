"""Sets of ATen operators, and functions that read a node's arguments and sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import OpOverload
from kvcompile.compat.tensors import schema_of

aten = torch.ops.aten

Size = int | torch.SymInt

SAME_OPS = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
)


CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


_DIMS = ("dim", "dim0", "dim1", "dims")
"""The names of arguments that are dimensions."""


VIEW_OPS = frozenset(
    (
        *SAME_OPS,
        *CASTS,
        *RESHAPES,
        *SQUEEZES,
        aten.expand.default,
        aten.repeat.default,
        aten.unsqueeze.default,
        aten.permute.default,
        aten.transpose.int,
        aten.slice.Tensor,
    )
)


SIZE_OPS = frozenset((aten.sym_size.int, aten.sym_numel.default))


def view_chain(operand: Node, stop: frozenset[Node]) -> tuple[Node, tuple[Node, ...]]:
    """Walk from ``operand`` back through view ops to the first other node, or to one in ``stop``."""
    chain: list[Node] = []
    node = operand
    while node not in stop and is_view(node):
        chain.append(node)
        node = node.args[0]
    return node, tuple(reversed(chain))


def is_view(node: Node) -> bool:
    """Whether ``node`` views its operand: by a view op, or as a piece of a split that keeps the last dimension whole.

    The list of pieces is a view, too. The only index of a dimension views all of its operand, as ``squeeze`` does.
    """
    if node.target is operator.getitem:
        return node.args[0].target in _SPLITS and is_view(node.args[0])
    if node.target in _SPLITS:
        whole, _, dim = arguments(node)
        return bool(dim != len(shape_of(whole)) - 1)
    if node.target is aten.select.int:
        whole, dim, _ = arguments(node)
        return bool(statically_known_true(shape_of(whole)[dim] == 1))
    return node.op == "call_function" and node.target in VIEW_OPS


def views_alike(node: Any, other: Any) -> bool:
    """Whether two arguments of nodes are the same value, or the same views of the same value."""
    if not isinstance(node, Node) or not isinstance(other, Node) or node is other:
        return bool(node == other)
    same_op = node.target is other.target and node.target in VIEW_OPS and node.kwargs == other.kwargs
    return same_op and all(map(views_alike, arguments(node), arguments(other)))


_SIZE_FUNCTIONS = frozenset((operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg))
"""The arithmetic of symbolic sizes. ATen's operators do that of tensors."""


def calls_alike(one: Node, other: Node) -> bool:
    """Whether two nodes call the same operator, whose result depends on nothing but its operands."""
    if not (one.op == other.op == "call_function" and one.target is other.target and one.kwargs == other.kwargs):
        return False
    if one.target is operator.getitem or one.target in _SIZE_FUNCTIONS:
        return True
    if not isinstance(one.target, OpOverload) or torch.Tag.nondeterministic_seeded in one.target.tags:
        return False
    return not one.is_impure()


def computed_alike(
    one: Any,
    other: Any,
    same_function: Callable[[Node, Node], bool] = calls_alike,
    is_changed: Callable[[Node], bool] = lambda node: False,
) -> bool:
    """Whether two arguments of nodes are the same value, or are computed from the same values by the same operators.

    Args:
        one, other: the arguments.
        same_function: whether two nodes call the same function, and whether equal operands then give equal results.
        is_changed: whether anything in the graph changes the tensor of a node in place. A functional graph does not.
    """
    pairs: list[tuple[Any, Any]] = [(one, other)]
    known: set[tuple[Node, Node]] = set()
    while pairs:
        one, other = pairs.pop()
        if any(isinstance(node, Node) and is_changed(node) for node in (one, other)):
            return False
        if one is other:
            continue
        if isinstance(one, Node) and isinstance(other, Node):
            if (one, other) in known:  # many paths may lead to one pair
                continue
            if not same_function(one, other):
                return False
            known.add((one, other))
            one, other = _operands(one), _operands(other)
        elif isinstance(one, slice) and isinstance(other, slice):
            one, other = ((part.start, part.stop, part.step) for part in (one, other))
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif type(one) is not type(other) or one != other:
            return False
    return True


def _operands(node: Node) -> list[Any]:
    if isinstance(node.target, OpOverload):
        return arguments(node)
    return [*node.args, *(node.kwargs[name] for name in sorted(node.kwargs))]


def arguments(node: Node) -> list[Any]:
    """The positional arguments of an operator, however they are passed. Dimensions count from the first."""
    given = {
        known.name: node.args[place] if place < len(node.args) else node.kwargs.get(known.name, known.default_value)
        for place, known in enumerate(schema_of(node.target).arguments)
        if not known.kwarg_only
    }
    return [_from_first(node, value) if name in _DIMS else value for name, value in given.items()]


def _from_first(node: Node, dims: Any) -> Any:
    """``dims``, counted from the first dimension.

    They are dimensions of the result or of the operand, whichever has more: ``unsqueeze`` adds a dimension, and
    ``select`` removes one.
    """
    values = [operand.meta["val"] for operand in (node, *node.all_input_nodes[:1])]
    rank = max(1, *(value.dim() for value in values if isinstance(value, torch.Tensor)))
    return [dim % rank for dim in dims] if isinstance(dims, (list, tuple)) else dims % rank


def shape_of(node: Node) -> torch.Size:
    """The sizes of a tensor, with a number for every symbol that guards have made constant.

    Code can be traced with numbers even if the trace has no symbols.
    """
    return torch.Size(known_size(size) for size in node.meta["val"].shape)


def dtype_of(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def known_size(size: Any) -> Any:
    """A number for a symbol that guards have made constant."""
    return int(size.node.expr) if isinstance(size, torch.SymInt) and size.node.expr.is_number else size


def sliced_by(node: Node) -> tuple[Node, ...]:
    """The nodes from ``node`` back to the slice that it is a copy of; empty if it is not a slice."""
    chain = [node]
    while chain[-1].target in SAME_OPS:
        chain.append(chain[-1].args[0])
    return tuple(chain) if chain[-1].target is aten.slice.Tensor else ()


WRITE_OPS = frozenset(
    (
        aten.index_put.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.scatter.src,
        aten.where.self,
        aten.cat.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.gather.default,
    )
)
"""The operators that :mod:`kvcompile.passes.prove.writes` may recognise as a cache write; a test keeps both equal."""

assert VIEW_OPS.isdisjoint(WRITE_OPS), "an operator is either a view of a cache or a write of it"


LIST_OPS = frozenset((aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default))


SELECTIONS = LIST_OPS | {aten.select.int, operator.getitem}


def same_sizes(sizes: Sequence[Size], others: Sequence[Size]) -> bool:
    """Whether two shapes are known to be equal for all values of their symbols."""
    return len(sizes) == len(others) and all(statically_known_true(a == b) for a, b in zip(sizes, others, strict=True))


def replace_views_by_reshapes(gm: GraphModule) -> None:
    """Replace views by reshapes, which copy where strides allow no view, so that a graph runs without Inductor.

    Strides may differ from those that were traced. A reshape to the same shape was traced as ``as_strided`` with the
    strides of its input: it goes.
    """
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
                node.target = aten.reshape.default
            for node in module.graph.find_nodes(op="call_function", target=aten.as_strided.default):
                x, *given = node.args
                assert isinstance(x, Node)
                if given == [list(x.meta["val"].shape), list(x.meta["val"].stride())]:
                    node.replace_all_uses_with(x)
                    module.graph.erase_node(node)
            module.recompile()
