"""Read the effect of an operation on attention scores: scale, softcap, mask or bias, sinks.

The state of scores is ``bias(cap * tanh(scale * factors * query @ key^T))``. Each function gives the state after one
operation, or raises :class:`NotUnderstood`. Attention on packed caches computes the scores in float32 and in that
order. Scores that the model computes in lower precision differ by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.mark.axes import Axis, Layout
from kvcompile.passes.mark.calls import Call, are_zeros_and_ones, bound_of, constant_of, read_call, value_of
from kvcompile.passes.mark.values import (
    Add,
    BiasStep,
    Fill,
    Floor,
    HiddenKeys,
    Known,
    LogSumExp,
    LogWeights,
    Maximum,
    Multiply,
    NotUnderstood,
    Operand,
    RowValue,
    Scores,
    Value,
)

ABSORBING = -1e30
"""A number below this absorbs any score that is added in float32: |score| < 1e22 is less than half its last bit."""

NEVER_SEEN = -1e4
"""The largest constant that is taken for a mask. A key with this score has a weight of exactly 0 beside any key with a
score above ``NEVER_SEEN + 104``, because float32 exponentials underflow at -104."""


@dataclass(frozen=True)
class Context:
    """The facts of the graph that reading an operation may use.

    Attributes:
        values: the values of other tensors.
        position: place of the operation in the graph.
        is_changed: whether anything in the graph changes the tensor of a node in place.
    """

    values: dict[Node, Value]
    position: int
    is_changed: Callable[[Node], bool]

    def constant(self, value: Any) -> float | None:
        return constant_of(value, self.is_changed)

    def bound(self, value: Any) -> float:
        return bound_of(value, self.is_changed)

    def number(self, number: float) -> Operand:
        """A number in the place of a tensor."""
        return Operand(number, (), self.position)

    def operand(self, node: Any, layout: Layout) -> Operand:
        """A tensor that is broadcast against a tensor of layout ``layout``."""
        value = value_of(node)
        shape = value.shape if isinstance(value, Tensor) else ()
        dims = layout[len(layout) - len(shape) :]
        own = tuple(() if statically_known_true(size == 1) else dim for dim, size in zip(dims, shape, strict=True))
        return Operand(node, own, self.position)


def read_scores(call: Call, scores: Scores, context: Context) -> Known | None:
    """The value of ``call`` on ``scores``; None if it is not a part of attention."""
    handler = _HANDLERS.get(call.name)
    if handler is None:
        raise NotUnderstood(f"{call.name} is applied to its scores")
    return handler(call, scores, context)


def _other(call: Call, scores: Scores, context: Context) -> tuple[Any, bool]:
    """The other operand, and whether the scores come first."""
    first = context.values.get(call.get("input")) is scores
    return (call.get("other") if first else call.get("input")), first


def _keeps_shape(call: Call, scores: Scores) -> None:
    shape = value_of(call.node).shape if isinstance(value_of(call.node), Tensor) else None
    if shape is not None and len(shape) != len(scores.layout):
        raise NotUnderstood(f"{call.name} broadcasts its scores to {len(shape)} dimensions")
    for size, dim in zip(shape or (), scores.layout, strict=False):
        if not statically_known_true(size == math.prod(axis.size for axis in dim)):
            raise NotUnderstood(f"{call.name} broadcasts its scores to another shape")


def _before_sinks(call: Call, scores: Scores) -> None:
    if scores.sink is not None:
        raise NotUnderstood(f"{call.name} is applied to its scores and sinks")


def _add(call: Call, scores: Scores, context: Context) -> Scores:
    _before_sinks(call, scores)
    other, first = _other(call, scores, context)
    alpha = context.constant(call.get("alpha", 1))
    sign = -1.0 if call.name == "sub" else 1.0
    if alpha is None or (not first and (sign < 0 or alpha != 1)):
        raise NotUnderstood(f"{call.name} subtracts or scales its scores")
    if context.constant(other) is not None:
        return _shift(scores, "")
    masked = _masked_by_products(call, scores, context, other, sign * alpha)
    if masked is not None:
        return masked
    if not isinstance(value_of(other), Tensor) or value_of(other).dtype is torch.bool or value_of(other).is_complex():
        raise NotUnderstood(f"{call.name} adds something other than a tensor of numbers to its scores")
    _keeps_shape(call, scores)
    addend = Add(context.operand(other, scores.layout), sign * alpha, context.bound(other))
    return replace(scores, bias=(*scores.bias, addend))


def _masked_by_products(call: Call, scores: Scores, context: Context, other: Any, sign: float) -> Scores | None:
    """The scores after ``scores * b - 1e10 * (1 - b)``, where every number of ``b`` is 0 or 1; None for other sums.

    Where ``b`` is 0, the product with the scores is 0, and the sum is the constant.
    """
    factor = scores.factors[-1] if scores.factors else None
    if factor is None or factor.divide or (scores.bias and scores.bias[-1] is not factor):
        return None
    mask = factor.operand.node
    number = _factor_of_complement(other, mask, context)
    if number is None or not are_zeros_and_ones(mask, context.is_changed):
        return None
    if factor.operand.layout != context.operand(mask, scores.layout).layout:
        return None
    before = replace(scores, factors=scores.factors[:-1], bias=scores.bias[:-1])
    return _filled(call, before, context, mask, False, sign * number)


def _factor_of_complement(value: Any, mask: Node, context: Context) -> float | None:
    """The constant ``c`` if ``value`` is ``c * (1 - mask)``; None if it is not."""
    call = read_call(value) if isinstance(value, Node) else None
    if call is None or context.is_changed(value):
        return None
    one, other = call.get("input"), call.get("other")
    if call.name == "neg":
        number = _factor_of_complement(one, mask, context)
        return None if number is None else -number
    if call.name == "sub" and call.get("alpha", 1) == 1:
        if other is mask and context.constant(one) == 1:
            return 1.0
        return -1.0 if one is mask and context.constant(other) == 1 else None
    if call.name != "mul":
        return None
    for constant, rest in ((context.constant(one), other), (context.constant(other), one)):
        number = _factor_of_complement(rest, mask, context)
        if constant is not None and number is not None:
            return constant * number
    return None


def _subtract(call: Call, scores: Scores, context: Context) -> Known:
    """The scores minus another operand. One number for each row, such as its maximum, shifts them.

    Scores minus their logsumexp are the logarithms of weights.
    """
    other = context.values.get(call.get("other"))
    alone = call.get("alpha", 1) == 1
    if not (alone and isinstance(other, (Maximum, LogSumExp)) and other.scores is scores):
        return _add(call, scores, context)
    check_rows(other, scores.layout)
    nodes = scores.nodes | other.nodes
    if isinstance(other, LogSumExp):
        return LogWeights(scores, nodes, scores.layout, other.axis)
    shift = other.origin if scores.shifted is None else None
    return replace(_shift(scores, other.axis), nodes=nodes, shift=shift)


def check_rows(other: RowValue, layout: Layout) -> None:
    """Raise NotUnderstood unless ``other`` has one number for each row of a tensor of ``layout``, along its axis."""
    if not are_rows_of(other, layout) or (isinstance(other, Maximum) and other.is_pair):
        raise NotUnderstood("a number for each row is broadcast along another dimension of its scores")


def are_rows_of(other: RowValue, layout: Layout) -> bool:
    """Whether ``other`` has one value for each row of a tensor of ``layout``, along its axis."""
    return other.layout == tuple(() if [axis.name for axis in dim] == [other.axis] else dim for dim in layout)


def _shift(scores: Scores, axis: str) -> Scores:
    """The scores after one number is subtracted from all scores of a row, which does not change their softmax."""
    if scores.shifted and axis and scores.shifted != axis:
        raise NotUnderstood("the maximum along several dimensions is subtracted from its scores")
    return replace(scores, shifted=axis or scores.shifted or "", shift=None)


def _scale(call: Call, scores: Scores, context: Context) -> Scores:
    _before_sinks(call, scores)
    other, first = _other(call, scores, context)
    divide = call.name == "div"
    if call.get("rounding_mode") is not None or (divide and not first):
        raise NotUnderstood("its scores are divided in a form that is not a scale")
    number = context.constant(other)
    if number is not None:
        return _scale_by(call, scores, 1 / number if divide and number else number)
    if not isinstance(value_of(other), (Tensor, torch.SymFloat, torch.SymInt)):
        raise NotUnderstood(f"{call.name} scales its scores by something other than a tensor or number")
    if scores.cap:
        raise NotUnderstood("the softcap of its scores is scaled by a tensor")
    _keeps_shape(call, scores)
    factor = Multiply(context.operand(other, scores.layout), divide)
    bias = (*scores.bias, factor) if scores.bias else ()
    return replace(scores, factors=(*scores.factors, factor), bias=bias, shift=None)


def _scale_by(call: Call, scores: Scores, number: float) -> Scores:
    if not 0 < number < math.inf:
        raise NotUnderstood(f"its scores are scaled by {number}")
    if any(isinstance(step, Multiply) for step in scores.bias):
        raise NotUnderstood("its scores are scaled twice after a mask")
    bias = tuple(_scaled(step, number) for step in scores.bias)
    if scores.cap:
        return replace(scores, cap=scores.cap * number, bias=bias, shift=None)
    return replace(scores, scale=scores.scale * number, bias=bias, shift=None)


def _scaled(step: BiasStep, number: float) -> BiasStep:
    if isinstance(step, Add):
        return replace(step, factor=step.factor * number)
    assert not isinstance(step, Multiply), "these do not commute with a floor"
    value = step.value * number
    return replace(step, value=value if value >= torch.finfo(torch.float32).min else -math.inf)


def _tanh(call: Call, scores: Scores, context: Context) -> Scores:
    if scores.cap or scores.bias or scores.sink is not None or scores.shifted is not None:
        raise NotUnderstood("tanh is applied to its scores after a mask, a bias or another tanh")
    return replace(scores, cap=1.0)


def filling(call: Call, subject: Value, context: Context) -> tuple[Any, bool, Any]:
    """The mask of ``masked_fill`` or ``where`` on ``subject``, the value that selects the fill, and the new number."""
    if call.name == "masked_fill":
        return call.get("mask"), True, call.get("value")
    if context.values.get(call.get("input")) is subject:
        return call.get("condition"), False, call.get("other")
    return call.get("condition"), True, call.get("input")


def _masked(call: Call, scores: Scores, context: Context) -> Scores:
    return _fill(call, scores, context, *filling(call, scores, context))


def _set_item(call: Call, scores: Scores, context: Context) -> Scores:
    mask = call.get("index")
    if not isinstance(value_of(mask), Tensor) or value_of(mask).dim() != len(scores.layout):
        raise NotUnderstood("some of its scores are assigned to")
    return _fill(call, scores, context, mask, True, call.get("value"))


def _fill(call: Call, scores: Scores, context: Context, mask: Any, where: bool, value: Any) -> Scores:
    """The scores after masked keys get a constant in the dtype of the scores; :func:`check_masks` checks constants."""
    _before_sinks(call, scores)
    number = context.constant(value)
    if number is None:
        raise NotUnderstood(f"{call.name} puts something other than a constant among its scores")
    if not isinstance(value_of(mask), Tensor) or value_of(mask).dtype != torch.bool:
        raise NotUnderstood(f"{call.name} masks its scores by something other than a bool tensor")
    return _filled(call, scores, context, mask, where, number)


def _filled(call: Call, scores: Scores, context: Context, mask: Node, where: bool, number: float) -> Scores:
    result = value_of(call.node)
    dtype = (result if isinstance(result, Tensor) else value_of(call.get("input"))).dtype
    number = torch.tensor(number, dtype=dtype).item()
    if number != -math.inf and scores.shifted is not None:
        raise NotUnderstood(f"{call.name} puts a constant among scores from which a number was subtracted")
    _keeps_shape(call, scores)
    return replace(scores, bias=(*scores.bias, Fill(context.operand(mask, scores.layout), where, number)))


def check_masks(scores: Scores) -> None:
    """Raise NotUnderstood if a mask that is added to the scores would not have the effect of the model's constants.

    A constant of -inf makes a bool mask. A finite constant, such as the lowest number of the dtype, has another effect
    in rows without a visible key: all their scores are equal, and the row is the mean of all values. This constant
    becomes an addend that absorbs every score. The weights of these rows stay equal. The weights of masked keys in
    other rows stay exactly 0 if the constant is far below every visible score. Constants up to ``NEVER_SEEN`` are
    assumed to be far below.

    If several steps mask, the weights of rows without a visible key depend on the larger constant. An absorbing
    constant is written unchanged. Any other constant has to be written as a lower number. It is refused if
    another constant or a tensor masks, too.
    """
    finite = {step.value for step in scores.bias if isinstance(step, Fill) and step.value != -math.inf}
    names = " and ".join(f"{value:g}" for value in sorted(finite))
    if not all(value <= NEVER_SEEN for value in finite):
        raise NotUnderstood(f"its scores are masked by {names}, which is not far below the scores of visible keys")
    if len(finite) > 1:
        raise NotUnderstood(f"its scores are masked by different constants, {names}")
    only_fills = all(isinstance(step, Fill) for step in scores.bias) and scores.sink is None
    if not only_fills and any(value > ABSORBING for value in finite):
        raise NotUnderstood(
            f"its scores are masked by {names} beside a bias, a factor or sinks, where only -inf and constants below "
            f"{ABSORBING:g} are safe"
        )


def _clamp(call: Call, scores: Scores, context: Context) -> Scores:
    if call.get("max") is not None:
        raise NotUnderstood(f"{call.name} limits its scores")
    return _floor(call, scores, call.get("min"), context)


def _maximum(call: Call, scores: Scores, context: Context) -> Scores:
    return _floor(call, scores, _other(call, scores, context)[0], context)


def _floor(call: Call, scores: Scores, lowest: Any, context: Context) -> Scores:
    number = context.constant(lowest)
    if number is None or number > ABSORBING:
        raise NotUnderstood(f"{call.name} limits its scores")
    _before_sinks(call, scores)
    return replace(scores, bias=(*scores.bias, Floor(number)) if scores.bias else ())


def _max(call: Call, scores: Scores, context: Context) -> Known:
    other = call.get("dim", call.get("other"))
    if isinstance(value_of(other), Tensor):
        return _floor(call, scores, other, context)
    return _amax(call, scores, context)


def _amax(call: Call, scores: Scores, context: Context) -> Maximum:
    axis = _reduced_axis(call, scores)
    is_pair = call.name == "max"
    return Maximum(scores, scores.nodes, axis, reduced(call, scores.layout), call.node, is_pair)


def _logsumexp(call: Call, scores: Scores, context: Context) -> LogSumExp:
    return LogSumExp(scores, scores.nodes, _reduced_axis(call, scores), reduced(call, scores.layout))


def _compare(call: Call, scores: Scores, context: Context) -> HiddenKeys:
    """``scores == -inf``, which is True for hidden keys, or its inverse."""
    number = -math.inf if call.name == "isneginf" else context.constant(call.get("other"))
    result = value_of(call.node)
    if number != -math.inf or not isinstance(result, Tensor) or result.dtype is not torch.bool:
        raise NotUnderstood(f"{call.name} is applied to its scores")
    _keeps_shape(call, scores)
    return HiddenKeys(scores, scores.nodes, scores.layout, is_hidden=call.name != "ne")


def _reduced_axis(call: Call, scores: Scores) -> str:
    axis = axis_of(call.get("dim"), scores.layout)
    if axis is None:
        raise NotUnderstood(f"{call.name} is applied to its scores")
    return axis


def reduced(call: Call, layout: Layout) -> Layout:
    """The layout after ``call`` has reduced one dimension."""
    dim = call.get("dim")
    place = (dim[0] if isinstance(dim, (tuple, list)) else dim) % len(layout)
    return (*layout[:place], *([()] if call.get("keepdim") else []), *layout[place + 1 :])


def axis_of(dim: Any, layout: Layout) -> str | None:
    """The name of the axis of dimension ``dim``; "" if its size is 1, None if it has several axes or is not an int."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or len(layout[dim]) > 1:
        return None
    return layout[dim][0].name if layout[dim] else ""


def _concatenate(call: Call, scores: Scores, context: Context) -> Scores:
    """The scores with a column of sink logits beside them.

    The scores must not be shifted before, which would change their weight against the sinks.
    """
    tensors = call.get("tensors")
    others = [tensor for tensor in tensors if context.values.get(tensor) is not scores]
    dim = call.get("dim", 0)
    if len(tensors) != 2 or len(others) != 1 or scores.shifted is not None:
        raise NotUnderstood("its scores are concatenated to something other than one column of sinks")
    _before_sinks(call, scores)
    shape = value_of(others[0]).shape
    name = axis_of(dim, scores.layout)
    name = size_one_axis(scores) if name == "" else name
    if name is None or not statically_known_true(shape[dim] == 1):
        raise NotUnderstood("its scores are concatenated to more than one column")
    dim %= len(shape)
    size = scores.layout[dim][0].size if scores.layout[dim] else 1
    layout = (*scores.layout[:dim], (Axis(name, size + 1),), *scores.layout[dim + 1 :])
    sink = context.operand(others[0], (*layout[:dim], (), *layout[dim + 1 :]))
    first = tensors[0] is others[0]
    return replace(scores, layout=layout, sink=sink, sink_axis=name, sink_first=first)


def size_one_axis(scores: Scores) -> str | None:
    """The axis of the keys if there is a single key. If both operands have such an axis, the axis of the right one."""
    present = {axis.name for dim in scores.product.out for axis in dim}
    free = [names[0] for names in reversed(scores.product.free) if len(names) == 1]
    return next((name for name in free if name not in present), None)


_HANDLERS: dict[str, Callable[[Call, Scores, Context], Known | None]] = {
    "add": _add,
    "sub": _subtract,
    "mul": _scale,
    "div": _scale,
    "tanh": _tanh,
    "masked_fill": _masked,
    "where": _masked,
    "setitem": _set_item,
    "clamp": _clamp,
    "maximum": _maximum,
    "max": _max,
    "amax": _amax,
    "logsumexp": _logsumexp,
    "eq": _compare,
    "ne": _compare,
    "isneginf": _compare,
    "cat": _concatenate,
}
