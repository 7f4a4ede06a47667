"""Compute a function of one score for all scores at once.

``flex_attention`` takes functions of a score and its indices (sequence, head, query and key). Dynamo traces each of
these as a tensor without dimensions. Element-wise operations mean the same on the indices of all scores, [batch, 1, 1,
1], [1, num_heads, 1, 1], [1, 1, q_len, 1] and [1, 1, 1, kv_len], which broadcast against each other.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.compat.pytree import tree_leaves, tree_map
from kvcompile.passes.mark.calls import CASTS, SAME_VALUE, called, mutated_by, read_call, value_of
from kvcompile.passes.mark.values import NotUnderstood
from kvcompile.passes.mark.writer import GraphWriter

ELEMENTWISE = CASTS | SAME_VALUE | frozenset((
    "abs", "add", "and", "and_", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "ceil", "clamp",
    "cos", "div", "eq", "exp", "exp2", "floor", "floor_divide", "floordiv", "fmod", "ge", "gt", "int", "inv", "invert",
    "le", "log", "log2", "logical_and", "logical_not", "logical_or", "logical_xor", "long", "lshift", "lt",
    "masked_fill", "maximum", "minimum", "mod", "mul", "ne", "neg", "not_", "or", "or_", "pos", "pow", "reciprocal",
    "relu", "remainder", "round", "rshift", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "sub", "tanh", "trunc",
    "where", "xor",
))  # fmt: skip

_FILLED = frozenset(("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"))

FOUR_DIMENSIONS = (1, 1, 1, 1)


@dataclass(frozen=True)
class _Row:
    """A tensor whose first dimensions are indexed and whose other dimensions are not yet."""

    tensor: Node
    indices: tuple[Any, ...]


class AllScores:
    """Computes nodes of a function of one score for all scores, in the graph that calls it.

    Args:
        writer: inserts into that graph.
        values: values of the function's placeholders except the score: indices of four dimensions, and captured
            tensors.
    """

    def __init__(self, writer: GraphWriter, values: Mapping[Node, Node]) -> None:
        self._writer = writer
        self._values: dict[Node, Any] = dict(values)
        self._varies = {node for node, value in values.items() if _rank(value) != _rank(node)}

    def of(self, node: Any) -> Any:
        """The value of ``node`` for all scores: a number, or a tensor that broadcasts against the scores.

        Raises:
            NotUnderstood: the function does more than element-wise operations on numbers.
        """
        if not isinstance(node, Node):
            return node
        if node not in self._values:
            self._values[node] = self._computed(node)
        return self._values[node]

    def four_dimensional(self, node: Any) -> Any:
        """The value of ``node`` for all scores; a tensor has four dimensions."""
        value = self.of(node)
        if isinstance(value, _Row):
            raise NotUnderstood("its score_mod or mask_mod uses a part of a tensor as a number")
        if _rank(value) not in (None, 0, 4):
            raise NotUnderstood("its score_mod or mask_mod uses a whole tensor as a number")
        if _rank(value) != 0:
            return value
        return self._writer.call("view", value, FOUR_DIMENSIONS)

    def _computed(self, node: Node) -> Any:
        if node.op == "placeholder":  # the only placeholder without a value
            raise NotUnderstood("its score_mod or mask_mod combines scores with scores")
        call = read_call(node)
        if call is None or mutated_by(node):
            raise NotUnderstood(
                f"its score_mod or mask_mod calls {called(node)}, which is unknown or changes a tensor in place"
            )
        operands = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
        for operand in operands:
            self.of(operand)
        if self._varies.isdisjoint(operands):
            return self._copied(node, self.of)
        if call.name in _FILLED and _rank(node) == 0:
            return self._copied(node, self.of)  # the same number in every element, for any shape
        self._varies.add(node)
        if call.name == "getitem":
            return self._indexed(node)
        if call.name not in ELEMENTWISE or _rank(node) != 0:
            raise NotUnderstood(
                f"its score_mod or mask_mod calls {call.name}, which is not an element-wise operation on numbers"
            )
        result = self._copied(node, self.four_dimensional)
        if value_of(result).dtype is not value_of(node).dtype:
            raise NotUnderstood(f"{call.name} has another dtype for all scores than for one score")
        return result

    def _copied(self, node: Node, value: Any) -> Node:
        args, kwargs = tree_map(value, (node.args, node.kwargs))
        create = self._writer.graph.call_method if node.op == "call_method" else self._writer.graph.call_function
        return self._writer.adopt(create(node.target, args, kwargs))

    def _indexed(self, node: Node) -> Any:
        """An element of a captured tensor, ``table[b, h]`` or ``table[b][h]``."""
        tensor, index = node.args
        if tensor in self._varies and not isinstance(self.of(tensor), _Row):
            raise NotUnderstood("its score_mod or mask_mod indexes a number")
        row = self.of(tensor) if tensor in self._varies else _Row(self.of(tensor), ())
        given = index if isinstance(index, tuple) else (index,)
        if not all(_is_index(i) for i in given):
            raise NotUnderstood("its score_mod or mask_mod indexes a tensor by something other than integers")
        row = _Row(row.tensor, (*row.indices, *(self.four_dimensional(i) for i in given)))
        if len(row.indices) < value_of(row.tensor).dim():
            return row
        return self._writer.call(operator.getitem, row.tensor, row.indices)


def _rank(node: Any) -> int | None:
    """The rank of the tensor of a node; None for a number."""
    value = value_of(node)
    return value.dim() if isinstance(value, Tensor) else None


def _is_index(index: Any) -> bool:
    value = value_of(index)
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype in (torch.int32, torch.int64)
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def output_of(function: GraphModule) -> Any:
    """The result of a traced function: a node, or a constant."""
    (result,) = tree_leaves(function.graph.output_node().args[0])
    return result
