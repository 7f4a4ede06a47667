"""Read the effect of an operation on scores and weights: views, casts, softmax, dropout, dropped sinks.

:func:`read` gives the value of one operation. Operations on numbers of scores are read in
:mod:`kvcompile.passes.mark.read_scores`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.pytree import tree_leaves
from kvcompile.passes.mark.axes import Axis, Layout, axes_of, regroup
from kvcompile.passes.mark.calls import CASTS, PERMUTATIONS, SAME_VALUE, SOFTMAXES, VIEWS, Call, value_of
from kvcompile.passes.mark.equal_masks import INVERSIONS, as_bools, select_alike
from kvcompile.passes.mark.products import Product
from kvcompile.passes.mark.read_scores import (
    Context,
    are_rows_of,
    axis_of,
    check_masks,
    check_rows,
    filling,
    read_scores,
    reduced,
    size_one_axis,
)
from kvcompile.passes.mark.values import (
    Exponentials,
    ExponentialSum,
    Fill,
    HiddenKeys,
    HiddenRows,
    Known,
    LogSumExp,
    LogWeights,
    Maximum,
    Multiply,
    NotUnderstood,
    Operand,
    RowValue,
    Scores,
    ShiftedSink,
    SinkOdds,
    SinkScale,
    Tensors,
    Unknown,
    Value,
    Weights,
)

_ENDS = frozenset(("linear", "bilinear", "addmm", "conv1d", "conv2d", "layer_norm", "rms_norm", "group_norm"))
"""Operations at which following a value ends: they begin the next part of a model."""

CHANNELS = "e"
"""The name of the axis of the values' channels."""


def read(call: Call, context: Context) -> Value | None:
    """The value of ``call``, which has at least one input with a value; None if it is not a part of attention.

    Raises:
        NotUnderstood: the effect of the operation on scores or weights is not known.
    """
    subject = _subject(call, context)
    if subject is None or call.name in _ENDS:
        return None
    if isinstance(subject, Unknown):
        return _read_unknown(call, subject)
    value = _read_known(call, subject, context)
    return replace(value, nodes=value.nodes | {call.node}) if value is not None else None


def _subject(call: Call, context: Context) -> Value | None:
    """The value that ``call`` is applied to; scores, weights or exponentials if there are several."""
    given = [call.get("input"), call.get("other"), *tree_leaves(call.get("tensors"))]
    values = [context.values[node] for node in given if isinstance(node, Node) and node in context.values]
    return next(
        (value for value in values if isinstance(value, (Scores, Weights, LogWeights, Exponentials))),
        next(iter(values), None),
    )


def _read_known(call: Call, subject: Known, context: Context) -> Known | None:
    if isinstance(subject, RowValue):
        return _read_row_value(call, subject, context)
    if isinstance(subject, HiddenKeys):
        return _read_hidden_keys(call, subject)
    if call.name in CASTS or call.name in SAME_VALUE:
        return _cast(call, subject)
    if call.name in VIEWS or call.name in PERMUTATIONS:
        return replace(subject, layout=_viewed(call, subject.layout))
    if call.name == "getitem":
        return _get_item(call, subject)
    if call.name == "dropout":
        return _dropout(call, subject, context)
    if isinstance(subject, Exponentials):
        return _read_exponentials(call, subject, context)
    if isinstance(subject, Weights):
        if call.name == "nan_to_num" and call.get("nan") in (None, 0):
            return replace(subject, hidden_rows_are_zero=True)
        if call.name in ("masked_fill", "where", "mul"):
            return _with_zeros(call, subject, context)
        raise NotUnderstood(f"{call.name} is applied to its weights")
    if isinstance(subject, LogWeights):
        if call.name == "exp":
            return _softmax(subject.scores, subject.layout, subject.axis, subject.nodes)
        raise NotUnderstood(f"{call.name} is applied to the logarithm of its weights")
    if call.name in SOFTMAXES or call.name == "log_softmax":
        _cast(call, subject)
        axis = axis_of(call.get("dim"), subject.layout)
        if call.name == "log_softmax" and axis is not None:
            return LogWeights(subject, subject.nodes, subject.layout, axis)
        is_safe = call.name == "_safe_softmax"
        if is_safe and not _keeps_hidden_keys(subject):
            raise NotUnderstood("a safe softmax is applied to its scores after a shift or a factor")
        weights = _softmax(subject, subject.layout, axis, subject.nodes)
        return weights and replace(weights, hidden_rows_are_zero=is_safe)
    if call.name == "exp":
        return Exponentials(subject, subject.nodes, subject.layout)
    return read_scores(call, subject, context)


def _read_unknown(call: Call, subject: Unknown) -> Unknown | None:
    if not has_room_for_scores(call.node, subject):
        return None
    return replace(subject, softmaxed=subject.softmaxed or call.name in SOFTMAXES or call.name == "exp")


def are_weights(value: Value) -> bool:
    """Whether attention may multiply ``value`` with its values: weights, whether normalised or not."""
    return value.softmaxed if isinstance(value, Unknown) else isinstance(value, (Weights, Exponentials))


def has_room_for_scores(node: Node, unknown: Unknown) -> bool:
    """Whether the tensor of ``node`` is large enough for scores. An in-place operation may have no tensor."""
    after, scores = value_of(node), value_of(unknown.product.node)
    if not isinstance(after, Tensor):
        return after is None
    return statically_known_true(after.numel() >= scores.numel())


def _read_row_value(call: Call, subject: RowValue, context: Context) -> Known:
    if isinstance(subject, Maximum) and subject.is_pair:
        if call.name == "getitem" and call.get("index") == 0:
            return replace(subject, is_pair=False)
    elif call.name in SAME_VALUE:
        return subject
    elif call.name in VIEWS:
        return replace(subject, layout=_viewed(call, subject.layout))
    elif call.name == "getitem":
        return _get_item(call, subject)
    elif call.name == "log" and isinstance(subject, ExponentialSum) and subject.sink is None:
        return LogSumExp(subject.scores, subject.nodes, subject.axis, subject.layout)
    elif isinstance(subject, HiddenRows) and call.name in INVERSIONS:
        return replace(subject, is_hidden=not subject.is_hidden)
    elif isinstance(subject, (LogSumExp, SinkOdds, SinkScale)):
        return _read_sink_scale(call, subject, context)
    elif isinstance(subject, Maximum) and (value := _read_maximum(call, subject, context)) is not None:
        return value
    elif (total := _read_sum_with_sink(call, subject, context)) is not None:
        return total
    what = {Maximum: "maximum", LogSumExp: "logsumexp", HiddenRows: "rows without a visible key"}.get(
        type(subject), "sum of the exponentials"
    )
    raise NotUnderstood(f"{call.name} is applied to the {what} of its scores")


def _read_hidden_keys(call: Call, subject: HiddenKeys) -> HiddenKeys | HiddenRows:
    """A row has no visible key if all its keys are hidden, and it has one if any of its keys is visible."""
    if call.name in INVERSIONS:
        return replace(subject, is_hidden=not subject.is_hidden)
    axis = axis_of(call.get("dim"), subject.layout)
    if axis is None or call.name != ("all" if subject.is_hidden else "any"):
        raise NotUnderstood(f"{call.name} is applied to the hidden keys of its scores")
    return HiddenRows(subject.scores, subject.nodes, axis, reduced(call, subject.layout), subject.is_hidden)


def _read_sink_scale(call: Call, subject: LogSumExp | SinkOdds | SinkScale, context: Context) -> Known:
    """``sigmoid(logsumexp(scores) - sinks)``, by which a model scales attention without sinks."""
    result, other = value_of(call.node), value_of(call.get("other"))
    if call.name in CASTS and _is_floats(result):
        return subject
    if call.name == "sigmoid" and isinstance(subject, SinkOdds):
        return SinkScale(subject.scores, subject.nodes, subject.axis, subject.layout, subject.sink)
    is_difference = call.name == "sub" and call.get("alpha", 1) == 1 and isinstance(subject, LogSumExp)
    is_first = context.values.get(call.get("input")) is subject
    if is_difference and is_first and _is_floats(other) and result.dim() == len(subject.layout):
        sink = context.operand(call.get("other"), subject.layout)
        return SinkOdds(subject.scores, subject.nodes, subject.axis, subject.layout, sink)
    raise NotUnderstood(f"{call.name} is applied to the logsumexp of its scores")


def _read_maximum(call: Call, subject: Maximum, context: Context) -> Maximum | ShiftedSink | None:
    """The larger one of a maximum and of a tensor, or a sink minus a maximum; None for other operations.

    A negated maximum is a sink of 0 minus the maximum, as in softmax1 ("softmax off by one").
    """
    if call.name == "neg":
        return _shifted_sink(subject, context.number(0.0))
    operands = [call.get("input"), call.get("other", call.get("dim"))]
    others = [node for node in operands if context.values.get(node) is not subject]
    if len(others) != 1 or others[0] in context.values or not _is_floats(value_of(others[0])):
        return None
    if not _has_layout(call.node, subject.layout):
        return None
    if call.name in ("maximum", "max"):
        return replace(subject, origin=call.node, is_bounded=True)
    if call.name == "sub" and call.get("alpha", 1) == 1 and others[0] is call.get("input"):
        return _shifted_sink(subject, context.operand(others[0], subject.layout))
    return None


def _shifted_sink(top: Maximum, sink: Operand) -> ShiftedSink:
    return ShiftedSink(top.scores, top.nodes, top.axis, top.layout, sink, top.origin, top.is_bounded)


def _read_sum_with_sink(call: Call, subject: RowValue, context: Context) -> RowValue | None:
    """``exp(scores - top).sum(dim) + exp(sink - top)``, where ``top`` is one node; None for other operations.

    ``exp(scores).sum(dim) + c`` with a positive number ``c`` has a sink of ``log(c)``.
    """
    if isinstance(subject, ShiftedSink) and not subject.is_exponential:
        return replace(subject, is_exponential=True) if call.name == "exp" else None
    if call.name != "add" or call.get("alpha", 1) != 1 or not _has_layout(call.node, subject.layout):
        return None
    if isinstance(subject, ExponentialSum) and subject.sink is None:
        added = next(filter(None, (context.constant(call.get(name)) for name in ("input", "other"))), 0.0)
        if added > 0 and subject.exponentials.scores.shifted is None:
            return replace(subject, sink=context.number(math.log(added)))
    values = [context.values.get(call.get(name)) for name in ("input", "other")]
    total, sink = values if isinstance(values[0], ExponentialSum) else values[::-1]
    if not isinstance(total, ExponentialSum) or not isinstance(sink, ShiftedSink) or not sink.is_exponential:
        return None
    is_of_rows = (total.axis, total.layout) == (sink.axis, sink.layout)
    if not is_of_rows or total.sink is not None or not _are_shifted_alike(total, sink):
        return None
    return replace(total, nodes=total.nodes | sink.nodes, sink=sink.sink, nan_if_hidden=not sink.is_bounded)


def _are_shifted_alike(total: ExponentialSum, sink: ShiftedSink) -> bool:
    """Whether the same numbers were subtracted from the scores and from the sink, and nothing else."""
    return total.exponentials.scores.shift is sink.shift


def _has_layout(node: Node, layout: Layout) -> bool:
    """Whether the tensor of ``node`` has the sizes of ``layout``."""
    shape = value_of(node).shape if isinstance(value_of(node), Tensor) else ()
    return len(shape) == len(layout) and all(
        statically_known_true(size == _size(dim)) for size, dim in zip(shape, layout, strict=True)
    )


def _is_floats(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _cast(call: Call, subject: Tensors) -> Tensors:
    after, before = value_of(call.node), value_of(product_of(subject).node)
    if not _is_floats(after):
        raise NotUnderstood(f"{call.name} casts its scores or weights to something other than floats")
    if after.device != before.device:
        raise NotUnderstood("its scores or weights move to another device")
    return subject


def product_of(value: Value) -> Product:
    """The product of queries and keys that ``value`` comes from."""
    if isinstance(value, (Scores, Unknown)):
        return value.product
    return product_of(value.scores)


def _viewed(call: Call, layout: Layout) -> Layout:
    if call.name in PERMUTATIONS:
        return tuple(layout[dim] for dim in _order(call, len(layout)))
    before, after = value_of(call.get("input")), value_of(call.node)
    result = regroup(layout, after.shape) if after.dtype is before.dtype else None
    if result is None:
        raise NotUnderstood(f"{call.name} regroups its scores or weights")
    return result


def _order(call: Call, rank: int) -> list[int]:
    """The dimensions of the input in the order of the result."""
    if call.name == "permute":
        dims = call.get("dims")
        order = list(dims) if isinstance(dims, (tuple, list)) else [dims, *call.get("extra")]
        return [dim % rank for dim in order]
    first, second = (-1, -2) if call.name == "mT" else (call.get("dim0"), call.get("dim1"))
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return order


def _dropout(call: Call, subject: Tensors, context: Context) -> Tensors:
    p = context.constant(call.get("p", 0.5))
    if call.get("training", True) is False or p == 0:
        return subject
    if not isinstance(subject, Weights) or p is None:
        raise NotUnderstood("dropout is applied to its scores")
    return replace(subject, dropout_p=p)


def _get_item(call: Call, subject: Known) -> Known:
    """The value after indexing that only adds dimensions, or that drops the weights of the sinks."""
    layout: list[tuple[Axis, ...]] = []
    dropped = False
    dims = iter(subject.layout)
    for entry in _entries(call.get("index"), len(subject.layout)):
        if entry is None:
            layout.append(())
            continue
        dim = next(dims)
        if _is_whole(entry, dim):
            layout.append(dim)
        elif isinstance(subject, Weights) and subject.has_sink and _drops_sink(entry, dim, subject):
            layout.append(axes_of(Axis(dim[0].name, dim[0].size - 1)))
            dropped = True
        else:
            raise NotUnderstood("some of its scores or weights are taken out")
    layout.extend(dims)
    if isinstance(subject, Weights) and dropped:
        return replace(subject, layout=tuple(layout), has_sink=False)
    return replace(subject, layout=tuple(layout))


def _entries(index: Any, rank: int) -> list[Any]:
    """The entries of an index: one for every dimension, and None for every new dimension."""
    entries = list(index) if isinstance(index, (tuple, list)) else [index]
    if any(not (entry is None or entry is Ellipsis or isinstance(entry, slice)) for entry in entries):
        raise NotUnderstood("some of its scores or weights are taken out")
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        missing = rank - sum(isinstance(entry, slice) for entry in entries)
        entries[place : place + 1] = [slice(None)] * missing
    return entries


def _size(dim: tuple[Axis, ...]) -> Any:
    return math.prod(axis.size for axis in dim)


def _is_whole(entry: slice, dim: tuple[Axis, ...]) -> bool:
    start, stop = value_of(entry.start), value_of(entry.stop)
    ends = stop is None or statically_known_true(stop >= _size(dim))
    return _starts_at(start, 0) and ends and entry.step in (None, 1)


def _starts_at(start: Any, place: int) -> bool:
    return (start is None and place == 0) or (isinstance(start, int) and start == place)


def _drops_sink(entry: slice, dim: tuple[Axis, ...], weights: Weights) -> bool:
    start, stop = value_of(entry.start), value_of(entry.stop)
    if len(dim) != 1 or dim[0].name != weights.key_axis or entry.step not in (None, 1):
        return False
    if weights.scores.sink_first:
        return _starts_at(start, 1) and (stop is None or statically_known_true(stop >= _size(dim)))
    at_last = (isinstance(stop, int) and stop == -1) or (
        stop is not None and statically_known_true(stop == _size(dim) - 1)
    )
    return _starts_at(start, 0) and at_last


def _softmax(scores: Scores, layout: Layout, axis: str | None, nodes: frozenset[Node]) -> Weights | None:
    """Weights that are normalised along ``axis``; None if it is not the axis of keys."""
    key_axis = size_one_axis(scores) if axis == "" else axis
    sides = [side for side in (0, 1) if scores.product.free[side] == (key_axis,)]
    if key_axis is None or not sides or scores.sink_axis not in ("", key_axis):
        return None
    if scores.shifted not in (None, "", axis):
        raise NotUnderstood("the maximum along another dimension is subtracted from its scores")
    check_masks(scores)
    return Weights(scores, nodes, layout, key_axis, sides[0], has_sink=scores.sink is not None)


def _with_zeros(call: Call, weights: Weights, context: Context) -> Weights:
    """Weights with zeros for masked keys. Only rows without a visible key change: their output becomes 0.

    The mask must equal the mask of the scores, and nothing else may change the scores. Another mask or bias could hide
    the remaining keys of a row, and the weights of this row would not become 0. A factor of 0 keeps NaN, so it changes
    nothing where -inf hides keys.
    """
    mask, where, value = _zeroing(call, weights, context)
    rows = context.values.get(mask) if call.name != "mul" and context.constant(value) == 0 else None
    if isinstance(rows, HiddenRows) and _are_hidden(rows, where, weights) and _has_layout(call.node, weights.layout):
        return replace(weights, nodes=weights.nodes | rows.nodes, hidden_rows_are_zero=True)
    scores, steps = weights.scores, weights.scores.bias
    step = steps[0] if len(steps) == 1 else None
    is_mask_of_scores = (
        isinstance(step, Fill)
        and isinstance(mask, Node)
        and step.operand.layout == context.operand(mask, weights.layout).layout
        and select_alike(step.operand.node, step.where, mask, where, context.is_changed)
    )
    if not is_mask_of_scores or scores.sink is not None or context.constant(value) != 0:
        raise NotUnderstood(f"{call.name} is applied to its weights")
    assert isinstance(step, Fill)
    if call.name == "mul" and step.value == -math.inf:
        return weights
    scores = replace(scores, bias=(replace(step, value=-math.inf),))
    return replace(weights, scores=scores, hidden_rows_are_zero=True)


def _are_hidden(rows: HiddenRows, where: bool, weights: Weights) -> bool:
    """Whether ``rows`` equals ``where`` exactly for the rows of ``weights`` without a visible key."""
    scores, axis = rows.scores, rows.axis or size_one_axis(rows.scores)
    is_of_weights = scores is weights.scores and axis == weights.key_axis and are_rows_of(rows, weights.layout)
    return is_of_weights and rows.is_hidden is where and scores.sink is None and _keeps_hidden_keys(scores)


def _keeps_hidden_keys(scores: Scores) -> bool:
    """Whether a score of -inf stays -inf. A shift by the maximum of a hidden row, or a factor of 0, makes it NaN."""
    return scores.shifted is None and not any(isinstance(step, Multiply) for step in scores.bias)


def _zeroing(call: Call, weights: Weights, context: Context) -> tuple[Any, bool, Any]:
    """The mask of ``call`` on weights, the value that selects the new number, and this number."""
    if call.name != "mul":
        return filling(call, weights, context)
    is_first = context.values.get(call.get("input")) is weights
    factor = call.get("other") if is_first else call.get("input")
    return as_bools(factor, context.is_changed), False, 0


def _read_exponentials(call: Call, subject: Exponentials, context: Context) -> Known | None:
    """``exp(scores) / exp(scores).sum(dim, keepdim=True)`` is a softmax, also with the exponential of a sink added."""
    if call.name == "sum":
        axis = axis_of(call.get("dim"), subject.layout)
        if axis is not None:
            layout = reduced(call, subject.layout)
            return ExponentialSum(subject.scores, subject.nodes, axis, layout, exponentials=subject)
    total = context.values.get(call.get("other"))
    if call.name == "div" and isinstance(total, ExponentialSum) and total.exponentials is subject:
        check_rows(total, subject.layout)
        scores = subject.scores
        if total.sink is not None:
            scores = replace(scores, sink=total.sink, nan_if_hidden=total.nan_if_hidden)
        weights = _softmax(scores, subject.layout, total.axis, subject.nodes | total.nodes)
        return weights and replace(weights, has_sink=False)  # the sink has no column of weights
    raise NotUnderstood(f"{call.name} is applied to the exponentials of its scores")
