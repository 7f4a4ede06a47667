"""The roles of tensors in written-out attention: scores, weights, and values that are made of them.

All these records are immutable. :mod:`kvcompile.passes.mark.read_attention` makes one from another, operation by
operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from kvcompile.passes.mark.axes import Layout
from kvcompile.passes.mark.products import Product
from kvcompile.passes.refusal import Reason, Refusal


class NotUnderstood(Refusal):
    """Raised for an operation on scores or weights that attention on packed caches does not compute."""

    def __init__(self, detail: str) -> None:
        """``detail``: completes the sentence "the site is refused because ..."."""
        super().__init__(Reason.unrecognised, detail=detail)


@dataclass(frozen=True)
class Operand:
    """A tensor or a number from outside that takes part in the computation.

    Attributes:
        node: the node of a tensor or of a symbolic number, or a number.
        layout: the axes of its dimensions.
        position: place in the graph where the model reads it.
    """

    node: Any
    layout: Layout
    position: int


@dataclass(frozen=True)
class Add:
    """``factor * operand`` is added to the scores. ``bound`` bounds the absolute values of the operand."""

    operand: Operand
    factor: float
    bound: float = math.inf


@dataclass(frozen=True)
class Fill:
    """Scores become ``value`` where the ``operand``, of bools or of zeros and ones, equals ``where``."""

    operand: Operand
    where: bool
    value: float


@dataclass(frozen=True)
class Multiply:
    """Scores are multiplied with ``operand``, or divided by it; it is the same for all keys."""

    operand: Operand
    divide: bool


@dataclass(frozen=True)
class Floor:
    """Scores are at least ``value``."""

    value: float


BiasStep = Add | Fill | Multiply | Floor


@dataclass(frozen=True)
class Scores:
    """Scores of queries and keys: ``bias(cap * tanh(scale * factors * product))``.

    Attributes:
        product: the product of queries and keys.
        nodes: the nodes that compute the scores, the product included.
        layout: layout of the tensor.
        position: place of the product in the graph.
        scale: constant factor of the products.
        factors: factors of the products that are the same for all keys.
        cap: factor of the tanh; 0 if there is no tanh.
        bias: the additions and fills, in this order. A multiplication applies to the bias before it.
        sink: the logits of the sinks; None without sinks.
        sink_axis: the axis along which the logits were concatenated to the scores; "" if they were not concatenated.
        sink_first: whether the sinks come before the first key, not after the last.
        nan_if_hidden: whether a row without a visible key is NaN in spite of its sink: its maximum is subtracted.
        shifted: the axis along which one number was subtracted from each row of scores; "" if it was subtracted from
            all scores, None if nothing was subtracted.
        shift: the node that computes these numbers, if nothing else was subtracted and the result was not scaled.
    """

    product: Product
    nodes: frozenset[Node]
    layout: Layout
    position: int
    scale: float = 1.0
    factors: tuple[Multiply, ...] = ()
    cap: float = 0.0
    bias: tuple[BiasStep, ...] = ()
    sink: Operand | None = None
    sink_axis: str = ""
    sink_first: bool = False
    nan_if_hidden: bool = False
    shifted: str | None = None
    shift: Node | None = None


@dataclass(frozen=True)
class RowValue:
    """One number for each row of scores.

    Attributes:
        scores: the scores.
        nodes: the nodes that compute the numbers.
        axis: the axis along which the scores were reduced.
        layout: layout of the tensor, which lacks that axis.
    """

    scores: Scores
    nodes: frozenset[Node]
    axis: str
    layout: Layout


@dataclass(frozen=True)
class Maximum(RowValue):
    """The maximum of scores along an axis, or the larger one of it and of a tensor.

    Attributes:
        origin: the node that computes it, before views.
        is_pair: whether it is the pair of maxima and indices of ``torch.max``.
        is_bounded: whether it is the larger one of the maximum and of a tensor.
    """

    origin: Node
    is_pair: bool = False
    is_bounded: bool = False


@dataclass(frozen=True)
class LogSumExp(RowValue):
    """The logarithm of the sum of the exponentials of scores along an axis."""


@dataclass(frozen=True)
class SinkOdds(RowValue):
    """The logsumexp of scores minus ``sink``: the log-odds of the keys against a sink beside them."""

    sink: Operand


@dataclass(frozen=True)
class SinkScale(RowValue):
    """The sigmoid of :class:`SinkOdds`. Attention without ``sink``, times this factor, is attention with ``sink``."""

    sink: Operand


@dataclass(frozen=True)
class ShiftedSink(RowValue):
    """A sink minus the number of the node ``shift`` for each row. ``is_exponential``: the exponential of this.

    ``is_bounded``: whether the number is finite for a row without a visible key.
    """

    sink: Operand
    shift: Node
    is_bounded: bool
    is_exponential: bool = False


@dataclass(frozen=True)
class HiddenKeys:
    """Which scores are -inf, as bools: these keys are hidden. Not ``is_hidden``: which scores are not."""

    scores: Scores
    nodes: frozenset[Node]
    layout: Layout
    is_hidden: bool


@dataclass(frozen=True)
class HiddenRows(RowValue):
    """Which rows have no visible key, as bools. Not ``is_hidden``: which rows have one."""

    is_hidden: bool


@dataclass(frozen=True)
class Exponentials:
    """The exponentials of scores."""

    scores: Scores
    nodes: frozenset[Node]
    layout: Layout


@dataclass(frozen=True)
class ExponentialSum(RowValue):
    """The sum of ``exponentials`` of scores along an axis, and of the exponential of ``sink`` if it is not None.

    ``nan_if_hidden``: see :class:`Scores`.
    """

    exponentials: Exponentials
    sink: Operand | None = None
    nan_if_hidden: bool = False


@dataclass(frozen=True)
class Weights:
    """The softmax of scores.

    Attributes:
        scores: the scores before the softmax.
        nodes: the nodes that compute the weights, the product included.
        layout: layout of the tensor.
        key_axis: the axis that the softmax normalises.
        key_side: the operand of the product, 0 or 1, that has this axis.
        has_sink: whether the weights of the sinks have not been dropped yet.
        dropout_p: probability of dropout.
        hidden_rows_are_zero: whether rows without a visible key are zero; they are NaN otherwise.
        is_scaled: whether the sinks scale the output of attention without sinks, whose rows without a visible key
            are NaN.
    """

    scores: Scores
    nodes: frozenset[Node]
    layout: Layout
    key_axis: str
    key_side: int
    has_sink: bool = False
    dropout_p: float = 0.0
    hidden_rows_are_zero: bool = False
    is_scaled: bool = False


@dataclass(frozen=True)
class LogWeights:
    """The logarithm of the softmax of scores along ``axis``: ``scores - logsumexp(scores)``."""

    scores: Scores
    nodes: frozenset[Node]
    layout: Layout
    axis: str


@dataclass(frozen=True)
class Unknown:
    """Scores after an operation that is not understood.

    Attributes:
        product: the product of queries and keys.
        reason: the operation, for the user.
        softmaxed: whether a softmax or exponential was applied, too.
        only_on_caches: whether it is attention only if the keys and values are read from caches. Code that is no
            attention has the same operations.
    """

    product: Product
    reason: str
    softmaxed: bool = False
    only_on_caches: bool = False


Tensors = Scores | Weights | LogWeights | Exponentials
Known = Tensors | RowValue | HiddenKeys
Value = Known | Unknown


@dataclass(frozen=True)
class Source:
    """The tensor that an operand of the first product is made of, before constant factors and casts.

    Attributes:
        node: the tensor.
        position: place in the graph where the model reads it.
        factor: constant factor between it and the operand.
        views: the operations that lead from it to the operand, except multiplications.
    """

    node: Node
    position: int
    factor: float = 1.0
    views: tuple[Node, ...] = ()


@dataclass(frozen=True)
class WrittenAttention:
    """Attention that is written out in matrix products and a softmax.

    Attributes:
        output: the product of weights and values, or this product times the scale of the sinks.
        output_layout: layout of ``output``, with ``e`` for the channels. Empty if the attention is not understood.
        product: the product of queries and keys.
        key_side: the operand of that product that holds the keys, 0 or 1.
        query, key: the origins of its operands.
        value: the values.
        weights: the weights that the values are multiplied with; None if they are not understood.
        unsupported: why the attention cannot be computed on packed caches; None if it can.
    """

    output: Node
    output_layout: Layout
    product: Product
    key_side: int
    query: Source
    key: Source
    value: Operand
    weights: Weights | None
    unsupported: str | None = None

    @property
    def dims(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The axes of batch, heads, query rows and keys.

        The first axis that both operands have is the batch, unless it is the only axis beside rows and keys. The last
        axis that only the query has is the rows. The other axes that only the query has are query heads that share a KV
        head.
        """
        batch, own = self.product.batch, self.product.free[1 - self.key_side]
        shared, rows, keys = own[:-1], own[-1:], self.product.free[self.key_side][-1:]
        if len(batch) + len(shared) < 2:
            return (), (*batch, *shared), rows, keys
        return batch[:1], (*batch[1:], *shared), rows, keys
