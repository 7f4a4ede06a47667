"""Find attention that is written out in matrix products and a softmax, in Dynamo's graph.

One pass over the graph, in its order, finds the role of every tensor in attention: the product of queries and keys,
scores after a mask, weights, ... (:mod:`kvcompile.passes.mark.values`). A product of weights and another tensor that
contracts the axis of the softmax is attention. The spelling, order and shape of its parts do not matter.

The graph is not functional: ``scores += mask`` changes a tensor to which several nodes may refer. The change gives all
of them a new value. Packed attention is computed where the model's attention ends. The tensors that it takes from
outside must therefore not change between the place where the model reads them and the end of the attention.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.mark.axes import Axis, axes_of
from kvcompile.passes.mark.cached import PROJECTIONS, CacheReads
from kvcompile.passes.mark.calls import (
    CASTS,
    PERMUTATIONS,
    SAME_VALUE,
    SOFTMAXES,
    VIEWS,
    Call,
    asks_for_shape,
    called,
    is_same_view,
    may_overlap,
    mutated_by,
    read_call,
    reads_values,
    value_of,
)
from kvcompile.passes.mark.products import Contraction, Product, read_contraction, read_product
from kvcompile.passes.mark.read_attention import CHANNELS, are_weights, has_room_for_scores, product_of, read
from kvcompile.passes.mark.read_scores import Context, size_one_axis
from kvcompile.passes.mark.values import (
    Add,
    Exponentials,
    Fill,
    LogWeights,
    Multiply,
    NotUnderstood,
    Operand,
    Scores,
    SinkScale,
    Source,
    Unknown,
    Value,
    Weights,
    WrittenAttention,
)

OTHER_SOFTMAX = "its softmax runs over another dimension than the tokens of its keys"


def match_attention(graph: Graph) -> list[WrittenAttention]:
    """The written-out attention in Dynamo's graph, in its order. The graph does not change."""
    matcher = _Matcher(graph)
    for node in graph.nodes:
        matcher.visit(node)
    return matcher.found


class _Matcher:
    def __init__(self, graph: Graph) -> None:
        self.values: dict[Node, Value] = {}
        self.found: list[WrittenAttention] = []
        self.positions = {node: position for position, node in enumerate(graph.nodes)}
        self.changes: dict[Node, list[Node]] = defaultdict(list)  # node -> the nodes whose tensors it changes in place
        for node in graph.nodes:
            for target in mutated_by(node):
                if isinstance(value_of(target), Tensor):
                    self.changes[node].append(target)
        self.cache_reads = CacheReads(graph, lambda node: self._changed(node) is not None)

    def visit(self, node: Node) -> None:
        call = read_call(node)
        contraction = read_contraction(call) if call is not None else None
        if call is not None and contraction is not None:
            if call.name != "baddbmm":  # its result is a sum
                self._match(contraction)
            value: Value | None = self._mixed(contraction) or _scores_of(call, contraction, self._context(node))
        else:
            if call is not None and call.name == "mul":
                self._scale_by_sinks(call)
            value = self._value(node, call)
        if value is not None:
            self.values[node] = value
        for target in self.changes.get(node, ()):
            self._change(node, target, value)

    def _context(self, node: Node) -> Context:
        return Context(self.values, self.positions[node], lambda other: self._changed(other) is not None)

    def _changed(self, node: Node, begin: int = 0, end: int | None = None) -> Node | None:
        """The first node from ``begin`` on, and before ``end``, that changes the tensor of ``node`` in place."""
        if not isinstance(value_of(node), Tensor):
            return None
        for changing, targets in self.changes.items():
            place = self.positions[changing]
            if begin <= place and (end is None or place < end):
                for target in targets:
                    if may_overlap(target, node):
                        return changing
        return None

    def _value(self, node: Node, call: Call | None) -> Value | None:
        used = [other for other in node.all_input_nodes if other in self.values]
        if all(asks_for_shape(node, other) for other in used):
            return None
        name = call.name if call is not None else node.name
        try:
            if call is None:
                raise NotUnderstood(f"{called(node)} is applied to its scores or weights")
            return read(call, self._context(node)) or self._missed(call)
        except NotUnderstood as reason:
            softmaxed = name in SOFTMAXES or any(are_weights(self.values[other]) for other in used)
            unknown = Unknown(product_of(self.values[used[0]]), str(reason), softmaxed)
            return unknown if has_room_for_scores(node, unknown) else None

    def _missed(self, call: Call) -> Unknown | None:
        """Scores or weights on a cache after a projection of heads, or a softmax along no axis of keys; else None."""
        value = self.values.get(call.get("input"))
        if call.name in PROJECTIONS:
            return self._mixed_by(call.node, value, PROJECTIONS[call.name])
        if call.name not in (*SOFTMAXES, "exp", "div") or not isinstance(value, (Scores, LogWeights, Exponentials)):
            return None
        return self._on_cache(Unknown(product_of(value), OTHER_SOFTMAX, softmaxed=True))

    def _mixed(self, contraction: Contraction) -> Unknown | None:
        """Scores or weights on a cache that a product mixes over heads, as talking heads do; else None."""
        if any(attention.output is contraction.node for attention in self.found):
            return None
        pairs = zip(contraction.operands, contraction.labels, strict=True)
        mixed = (
            self._mixed_by(contraction.node, self.values.get(operand), labels.index(contraction.contracted))
            for operand, labels in pairs
        )
        return next(filter(None, mixed), None)

    def _mixed_by(self, node: Node, value: Value | None, dim: int) -> Unknown | None:
        """The result of ``node``, which contracts dimension ``dim`` of ``value``, if this dimension holds heads."""
        if isinstance(value, Unknown):
            is_mixed = value.only_on_caches and _has_rows_and_keys(node, value.product)
            return value if is_mixed else None
        if not isinstance(value, (Scores, Weights)):
            return None
        rows_and_keys = {axes[-1] for axes in product_of(value).free if axes}
        names = {axis.name for axis in value.layout[dim]}
        if not names or names & rows_and_keys:
            return None
        reason = f"{called(node)} mixes its scores or weights over heads"
        return self._on_cache(Unknown(product_of(value), reason, isinstance(value, Weights)))

    def _on_cache(self, unknown: Unknown) -> Unknown | None:
        """``unknown`` as a value that is attention only on caches; None if its product reads no cache."""
        if not any(operand in self.cache_reads for operand in unknown.product.operands):
            return None
        return replace(unknown, only_on_caches=True)

    def _change(self, node: Node, target: Node, value: Value | None) -> None:
        """Update all values that share memory with ``target``, whose tensor ``node`` changes in place to ``value``."""
        for other, known in list(self.values.items()):
            tensor = value_of(other)
            if other is node or not isinstance(tensor, Tensor) or not may_overlap(other, target):
                continue
            if value is not None and is_same_view(tensor, value_of(target)):
                self.values[other] = value
            else:
                reason = f"{called(node)} changes some of its scores or weights in place"
                self.values[other] = Unknown(product_of(known), reason, are_weights(known))

    def _match(self, contraction: Contraction) -> None:
        """Add the attention that ends in this product, if there is any."""
        for side, operand in enumerate(contraction.operands):
            weights = self.values.get(operand)
            attention = None
            if isinstance(weights, Weights):
                attention = self._attention(contraction, side, weights) or self._other(contraction, side, weights)
            elif isinstance(weights, Exponentials):
                reason = "its exponentials are multiplied with the values before they are divided by their sum"
                attention = self._unknown(contraction, side, Unknown(weights.scores.product, reason))
            elif (
                isinstance(weights, Unknown)
                and weights.softmaxed
                and (not weights.only_on_caches or contraction.operands[1 - side] in self.cache_reads)
            ):
                attention = self._unknown(contraction, side, weights)
            if attention is not None:
                self.found.append(attention)

    def _attention(self, contraction: Contraction, side: int, weights: Weights) -> WrittenAttention | None:
        """The attention if a product of weights and another operand contracts the axis of the keys only; else None."""
        axes = dict(zip(contraction.labels[side], weights.layout, strict=True))
        names = [axis.name for axis in axes[contraction.contracted]]
        channels = contraction.free(1 - side)
        is_broadcast = any(not axes[label] and not _is_one(contraction.size(label)) for label in contraction.batch)
        if names not in ([], [weights.key_axis]) or len(channels) != 1 or is_broadcast:
            return None
        if not names and not _is_one(contraction.size(contraction.contracted)):
            return None
        axes[channels] = axes_of(Axis(CHANNELS, contraction.size(channels)))
        value = contraction.operands[1 - side]
        sizes = zip(contraction.labels[1 - side], value_of(value).shape, strict=True)
        layout = tuple(() if _is_one(size) else axes[label] for label, size in sizes)
        attention = WrittenAttention(
            output=contraction.node,
            output_layout=tuple(axes[label] for label in contraction.out),
            product=weights.scores.product,
            key_side=weights.key_side,
            query=self._query(weights, contraction.node),
            key=self._key(weights.scores.product.operands[weights.key_side], weights.scores.position),
            value=Operand(value, layout, self.positions[contraction.node]),
            weights=weights,
        )
        return replace(attention, unsupported=self._obstacle(attention, weights))

    def _other(self, contraction: Contraction, side: int, weights: Weights) -> WrittenAttention | None:
        """The attention on caches that is not :meth:`_attention`; None if the product does not read caches."""
        if contraction.operands[1 - side] not in self.cache_reads:
            return None
        axes = weights.layout[contraction.labels[side].index(contraction.contracted)]
        is_along_keys = [axis.name for axis in axes] == [weights.key_axis]
        reason = "its weights are broadcast in the product with its values" if is_along_keys else OTHER_SOFTMAX
        unknown = self._on_cache(Unknown(weights.scores.product, reason, softmaxed=True))
        return None if unknown is None else self._unknown(contraction, side, unknown)

    def _unknown(self, contraction: Contraction, side: int, weights: Unknown) -> WrittenAttention:
        product, position = weights.product, self.positions[contraction.node]
        sources = [Source(operand, position) for operand in product.operands]
        key_side = 0 if weights.only_on_caches and product.operands[1] not in self.cache_reads else 1
        query, key = sources[1 - key_side], sources[key_side]
        value = Operand(contraction.operands[1 - side], (), position)
        return WrittenAttention(contraction.node, (), product, key_side, query, key, value, None, weights.reason)

    def _scale_by_sinks(self, call: Call) -> None:
        """Let attention that has been found end in ``call`` if ``call`` multiplies its output by the scale of sinks."""
        operands = call.get("input"), call.get("other")
        for output, factor in (operands, operands[::-1]):
            scale = self.values.get(factor)
            for place, attention in enumerate(self.found):
                if attention.output is output and isinstance(scale, SinkScale):
                    self.found[place] = self._with_sinks(attention, scale, call.node) or attention

    def _with_sinks(self, attention: WrittenAttention, scale: SinkScale, node: Node) -> WrittenAttention | None:
        """Attention with sinks that ends in ``node``; None if ``scale`` does not belong to the rows of its scores."""
        weights, output = attention.weights, attention.output
        if weights is None or weights.scores is not scale.scores or weights.scores.sink is not None:
            return None
        rows = tuple(() if [axis.name for axis in dim] == [CHANNELS] else dim for dim in attention.output_layout)
        before, after = value_of(output), value_of(node)
        is_alone = all(user is node or not reads_values(user, output) for user in output.users)
        axis = scale.axis or size_one_axis(weights.scores)
        if scale.layout != rows or axis != weights.key_axis or not is_alone or before.dtype != after.dtype:
            return None
        scores = replace(weights.scores, sink=scale.sink)
        nodes = weights.nodes | scale.nodes | {output}
        weights = replace(weights, scores=scores, nodes=nodes, is_scaled=True)
        attention = replace(attention, output=node, weights=weights, unsupported=None)
        return replace(attention, unsupported=self._obstacle(attention, weights))

    def _query(self, weights: Weights, output: Node) -> Source:
        """The query, before a cast that only makes its product more precise than the output."""
        operand, position = weights.scores.product.operands[1 - weights.key_side], weights.scores.position
        call = self._call_of_intact(operand, position)
        if call is not None and call.name in CASTS:
            narrow = call.get("input")
            if value_of(narrow).dtype == value_of(output).dtype and value_of(narrow).dtype.itemsize < 4:
                return Source(narrow, self.positions[operand])
        return Source(operand, position)

    def _key(self, operand: Node, position: int) -> Source:
        """The key without its constant factors, because a cache is read through views and not multiplications."""
        call = self._call_of_intact(operand, position)
        if call is None or not isinstance(call.get("input"), Node):
            return Source(operand, position)
        inner = Source(call.get("input"), self.positions[operand])
        if call.name in ("mul", "div") and call.get("rounding_mode") is None:
            number = self._context(operand).constant(call.get("other"))
            if number is not None and number > 0:
                inner = self._key(inner.node, inner.position)
                return replace(inner, factor=inner.factor * (1 / number if call.name == "div" else number))
        if call.name in (*VIEWS, *CASTS, *SAME_VALUE, *PERMUTATIONS):
            inner = self._key(inner.node, inner.position)
            if inner.factor != 1:
                return replace(inner, views=(*inner.views, operand))
        return Source(operand, position)

    def _call_of_intact(self, node: Node, position: int) -> Call | None:
        """The operation that computes ``node``, if nothing changes its tensor in place before ``position``."""
        return read_call(node) if self._changed(node, self.positions[node], position) is None else None

    def _obstacle(self, attention: WrittenAttention, weights: Weights) -> str | None:
        """Why attention that is understood cannot be computed where it ends; None if it can."""
        if weights.has_sink:
            return "the weights of its sinks are not dropped before the product with the values"
        if any(value_of(node).dtype is torch.float64 for node in weights.nodes if isinstance(value_of(node), Tensor)):
            return "it is computed in float64, attention on packed caches in float32"
        for node in weights.nodes:
            for user in node.users:
                if user is not attention.output and user not in weights.nodes and reads_values(user, node):
                    who = "the caller" if user.op == "output" else called(user)
                    return f"its scores or weights are also used by {who}"
        for node, position in _read_from_outside(attention, weights.scores):
            if node in weights.nodes:
                return f"{called(node)} is a part of its own mask"
            changing = self._changed(node, position, self.positions[attention.output])
            if changing is not None:
                return f"{called(changing)} changes {called(node)} in place before the attention ends"
        return None


def _read_from_outside(attention: WrittenAttention, scores: Scores) -> list[tuple[Node, int]]:
    """Every tensor that attention takes from outside, with the place in the graph where the model reads it."""
    steps = [step.operand for step in (*scores.bias, *scores.factors) if isinstance(step, (Add, Fill, Multiply))]
    operands = [attention.value, *steps, *([scores.sink] if scores.sink is not None else [])]
    read: list[Source | Operand] = [attention.query, attention.key, *operands]
    return [(source.node, source.position) for source in read if isinstance(value_of(source.node), Tensor)]


def _has_rows_and_keys(node: Node, product: Product) -> bool:
    """Whether the tensor of ``node`` has dimensions of the sizes of the query rows and keys of ``product``."""
    names = {axes[-1] for axes in product.free if axes}
    sizes = [axis.size for dim in product.out for axis in dim if axis.name in names]
    return all(any(statically_known_true(size == own) for own in value_of(node).shape) for size in sizes)


def _is_one(size: object) -> bool:
    return statically_known_true(size == 1)


def _scores_of(call: Call, contraction: Contraction, context: Context) -> Scores | None:
    """The scores that a product of floats makes; None if it makes no scores. ``baddbmm`` scales them and adds a bias.

    A product without a batch axis is a product of activations and a weight, and makes no scores.
    """
    if not contraction.batch or not value_of(call.node).is_floating_point():
        return None
    product = read_product(contraction)
    scores = Scores(product, frozenset((call.node,)), product.out, context.position)
    if call.name != "baddbmm":
        return scores
    alpha, beta = context.constant(call.get("alpha", 1)), context.constant(call.get("beta", 1))
    if alpha is None or beta is None or alpha <= 0:
        return None
    bias = (Add(context.operand(call.get("input"), product.out), beta),) if beta else ()
    return replace(scores, scale=alpha, bias=bias)
