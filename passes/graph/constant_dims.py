"""Find the dimensions along which a value does not change, such as a mask of sequences that was expanded to a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import OpOverload
from kvcompile.passes.graph.aten import CASTS, SAME_OPS, Size, arguments, shape_of

aten = torch.ops.aten


def varying_shape(node: Node) -> list[Size]:
    """The shape of ``node`` with 1 for every dimension along which it has the same value everywhere."""
    sizes = zip(_constant_dims(node, {}), shape_of(node), strict=True)
    return [1 if is_constant else size for is_constant, size in sizes]


def first_along_constant(x: Tensor, shape: Sequence[Size]) -> Tensor:
    """The first index of ``x`` along every dimension of size 1 in ``shape``, the :func:`varying_shape` of its node."""
    for dim, size in enumerate(shape):
        if statically_known_true(size == 1) and not statically_known_true(x.shape[dim] == 1):
            x = x.narrow(dim, 0, 1)
    return x


def _constant_dims(node: Node, known: dict[Node, list[bool]]) -> list[bool]:
    if node not in known:
        has_one = [statically_known_true(size == 1) for size in shape_of(node)]
        found = _found(node, known) if node.op == "call_function" else None
        known[node] = [any(both) for both in zip(has_one, found or has_one, strict=True)]
    return known[node]


def _found(node: Node, known: dict[Node, list[bool]]) -> list[bool] | None:
    """Whether the operator of ``node`` repeats one value along each dimension; None if this is not known."""
    rank = len(shape_of(node))
    operands = [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), Tensor)]
    if node.target is aten.full.default:
        return [True] * rank
    if not operands or any(len(shape_of(operand)) > rank for operand in operands):
        return None
    of_operands = [_constant_dims(operand, known) for operand in operands]
    if node.target is aten.unsqueeze.default:
        dim = arguments(node)[1]
        return [*of_operands[0][:dim], True, *of_operands[0][dim:]]
    if node.target not in _BROADCASTING and not _is_pointwise(node):
        return None
    padded = [[True] * (rank - len(found)) + found for found in of_operands]
    return [all(each) for each in zip(*padded, strict=True)]


_BROADCASTING = (aten.expand.default, aten.repeat.default, *SAME_OPS, *CASTS)


def _is_pointwise(node: Node) -> bool:
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
