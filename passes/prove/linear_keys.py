"""Follow the operations from cached keys to the keys of attention, if all of them are linear.

Each node must leave tokens, sequences and heads in place: it moves channels, scales them by coefficients, or adds keys.
Its *form* tells which of its dimensions hold sequences, heads, tokens and channels. One sequence and one head are
therefore enough to compute the coefficients.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.aten import (
    CASTS,
    LIST_OPS,
    RESHAPES,
    SAME_OPS,
    SQUEEZES,
    arguments,
    known_size,
    shape_of,
    view_chain,
)
from kvcompile.passes.graph.index_map import Dim, Factor, IndexMap, follow

aten = torch.ops.aten

_BATCH, _HEADS, _TOKENS, _CHANNELS = range(4)
"""Axes of the base of a form. Channels that an operation has selected or joined are numbered anew, as further axes."""

_RESHAPING = {*RESHAPES, *SQUEEZES, aten.unsqueeze.default, aten.expand.default, aten.repeat.default}
_REORDERING = {aten.permute.default, aten.transpose.int}
_SELECTING = {*LIST_OPS, aten.slice.Tensor, aten.select.int}

Values = dict[Node, Any]
"""The values of nodes for one sequence and one head: dimensions of sequences and heads have size 1."""


class _NotLinear(Exception):
    """The keys may depend on their cache in a way that is not linear."""


@dataclass(frozen=True)
class LinearKeys:
    """Linear operations from cached keys to the keys of attention.

    Attributes:
        root: the cached keys.
        key: the keys of attention.
        coefficients: the nodes by which keys are multiplied or divided.
        scaled: for each coefficient, the dims of the keys that it scales. They are empty where its size is 1, and where
            it repeats its values for all sequences or heads.
        forms: the form of ``root`` and of each node between it and ``key``, in the order of the graph.
        computes: computes the value of each of these nodes, except ``root``, from the values of other nodes.
    """

    root: Node
    key: Node
    coefficients: tuple[Node, ...]
    scaled: tuple[tuple[Dim, ...], ...]
    forms: dict[Node, IndexMap]
    computes: dict[Node, Callable[[Values, Any], Any]]

    def computed(self, cached: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """The keys of one sequence and one head, [tokens, head_dim], for cached keys of this shape.

        Nothing is rounded to another dtype in between.
        """
        num_tokens, channels = cached.shape
        values: Values = dict(zip(self.coefficients, coefficients, strict=True))
        # The dimensions of the root may be in another order, but sequences and heads have size 1.
        form = self.forms[self.root]
        cached = cached if form.axes().index(_TOKENS) < form.axes().index(_CHANNELS) else cached.mT
        values[self.root] = cached.reshape(_shape(form, num_tokens))
        for node, compute in self.computes.items():
            values[node] = compute(values, num_tokens)
        keys: Tensor = values[self.key].reshape(num_tokens, channels)
        return keys

    def dependence(self) -> Tensor:
        """Whether a channel of a key (row) depends on a channel of the cached key: bool [head_dim, head_dim].

        The operations run with generic numbers as coefficients. A channel of the result is a polynomial in them. It is
        zero for generic numbers only if it is zero for all numbers. Token ``t`` of this run has a 1 in channel ``t``.
        """
        generator = torch.Generator().manual_seed(0)
        channels = int(self.forms[self.root].base[_CHANNELS])
        generic = []
        for node, dims in zip(self.coefficients, self.scaled, strict=True):
            shape = _shape(replace(self.forms[self.root], dims=dims), channels)
            dtype = torch.complex128 if node.meta["val"].is_complex() else torch.float64
            generic.append(torch.rand(shape, dtype=dtype, generator=generator) + 1)
        keys = self.computed(torch.eye(channels, dtype=torch.float64), generic)
        return keys.T != 0


def follow_linear_keys(root: Node, axes: str, key: Node, between: Sequence[Node]) -> LinearKeys | None:
    """The linear operations from ``root`` to ``key``; None if an operation may not be linear.

    Args:
        root: the cached keys.
        axes: the order of their dimensions, four letters.
        key: the keys of attention, [batch, heads, tokens, head_dim]; each head of the cache may be repeated in place.
        between: the nodes whose numbers depend on ``root``, up to ``key``, in the order of the graph.
    """
    sizes = dict(zip(axes, shape_of(root), strict=True))
    if statically_known_true(sizes["t"] == 1) or statically_known_true(sizes["d"] == 1):
        return None  # a dimension of size 1 may be any of the four
    base = tuple(known_size(sizes[axis]) for axis in "bhtd")
    dims = tuple((Factor("bhtd".index(axis), base["bhtd".index(axis)]),) for axis in axes)
    walk = _Walk(base, root, IndexMap(base, (0,) * 4, dims))
    try:
        for node in between:
            walk.visit(node)
        walk.check_keys(key)
    except _NotLinear:
        return None
    return LinearKeys(root, key, tuple(walk.coefficients), tuple(walk.coefficients.values()), walk.forms, walk.computes)


class _Walk:
    """The forms and computations of the nodes that were visited, and the coefficients with the dims that they scale."""

    def __init__(self, base: tuple[Any, ...], root: Node, form: IndexMap) -> None:
        self.base = base
        self.root = root
        self.forms = {root: form}
        self.computes: dict[Node, Callable[[Values, Any], Any]] = {}
        self.coefficients: dict[Node, tuple[Dim, ...]] = {}

    def visit(self, node: Node) -> None:
        """Add a node, all of whose operands that depend on the cache were visited; raises :class:`_NotLinear`."""
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            raise _NotLinear
        form, compute = rule(self, node)
        self.forms[node], self.computes[node] = self._numbered_anew(form), compute

    def check_keys(self, key: Node) -> None:
        """Raise :class:`_NotLinear` unless ``key`` is [batch, heads, tokens, head_dim] of the cache."""
        kinds = [[factor.axis for factor in dim] for dim in self.forms[key].dims]
        heads = [[], [None]] if statically_known_true(self.base[_HEADS] == 1) else [[_HEADS], [_HEADS, None]]
        batches = [[]] if statically_known_true(self.base[_BATCH] == 1) else [[_BATCH]]
        fits = len(kinds) == 4 and kinds[0] in batches and kinds[1] in heads and kinds[2] == [_TOKENS]
        if not fits or not _is_channels(self.forms[key].dims[3]) or shape_of(key)[3] != self.base[_CHANNELS]:
            raise _NotLinear

    def dims_of(self, node: Any) -> tuple[Dim, ...]:
        """The dims of an operand that depends on the cache; raises :class:`_NotLinear` for other operands."""
        if not isinstance(node, Node) or node not in self.forms:
            raise _NotLinear
        return self.forms[node].dims

    def _numbered_anew(self, form: IndexMap) -> IndexMap:
        """A form with a separate axis for each run of channels; raises if sequences, heads or tokens were moved."""
        for axis in (_BATCH, _HEADS, _TOKENS):
            factors = [factor for factor in form.factors(axis) if not form.is_one(factor)]
            whole = [Factor(axis, self.base[axis])] if not statically_known_true(self.base[axis] == 1) else []
            is_whole = len(factors) == len(whole) and statically_known_true(form.starts[axis] == 0)
            if not is_whole or not all(map(_are_equal, factors, whole)):
                raise _NotLinear
        sizes: list[int] = []
        dims: list[Dim] = []
        for dim in form.dims:
            parts: list[Factor] = []
            for factor in dim:
                is_channels = factor.axis is not None and factor.axis >= _CHANNELS
                if form.is_one(factor) or (is_channels and factor.size == 1):
                    continue
                if not is_channels:
                    parts.append(factor)
                elif not isinstance(factor.size, int):
                    raise _NotLinear
                elif parts and parts[-1].axis is not None and parts[-1].axis >= _CHANNELS:
                    sizes[-1] *= factor.size
                    parts[-1] = Factor(parts[-1].axis, sizes[-1])
                else:
                    sizes.append(factor.size)
                    parts.append(Factor(_CHANNELS + len(sizes), factor.size))
            dims.append(tuple(parts))
        base = (*self.base, *sizes)
        return IndexMap(base, (0,) * len(base), tuple(dims))

    # Rules: the form of a node, and its computation

    def view(self, node: Node) -> tuple[IndexMap, Callable[[Values, Any], Any]]:
        """A view or a copy; a cast rounds in the model, and not here."""
        whole = node.args[0]
        if node.target is operator.getitem:
            pieces = whole.args[0] if isinstance(whole, Node) else None
            if pieces not in self.forms or whole.target not in LIST_OPS:
                raise _NotLinear
            form = self.forms[pieces]
        else:
            self.dims_of(whole)
            form = self.forms[whole]
        if node.target in CASTS and not node.meta["val"].dtype.is_floating_point:
            raise _NotLinear
        viewed = follow(form, node)
        target, others, kwargs = node.target, node.args[1:], node.kwargs  # the rewrite changes operands of the node
        if viewed is None:
            raise _NotLinear
        if node.target in SAME_OPS or node.target in CASTS or viewed is form:
            if node.target in LIST_OPS or node.target is operator.getitem:
                return viewed, lambda values, num_tokens: target(values[whole], *others, **kwargs)
            return viewed, lambda values, num_tokens: values[whole]
        if node.target in _RESHAPING:
            return viewed, lambda values, num_tokens: values[whole].reshape(_shape(viewed, num_tokens))
        if any(isinstance(argument, Node) for argument in (*others, *kwargs.values())):
            raise _NotLinear  # a slice whose end is a size
        return viewed, lambda values, num_tokens: target(values[whole], *others, **kwargs)

    def negative(self, node: Node) -> tuple[IndexMap, Callable[[Values, Any], Any]]:
        whole = node.args[0]
        self.dims_of(whole)
        return self.forms[whole], lambda values, num_tokens: -values[whole]

    def scaled(self, node: Node) -> tuple[IndexMap, Callable[[Values, Any], Any]]:
        """A product or a quotient of a key and a coefficient, in either order for a product."""
        one, other = node.args
        if node.kwargs:
            raise _NotLinear
        key, factor = (one, other) if isinstance(one, Node) and one in self.forms else (other, one)
        dims = self.dims_of(key)
        is_quotient = node.target in (aten.div.Tensor, aten.div.Scalar)
        if is_quotient and key is not one:
            raise _NotLinear
        apply = operator.truediv if is_quotient else operator.mul
        if isinstance(factor, Node):
            repeated = self._coefficient(factor, dims)
            return self.forms[key], lambda values, num_tokens: apply(values[key], _first_of(values[factor], repeated))
        if not isinstance(factor, (int, float, complex)):
            raise _NotLinear
        return self.forms[key], lambda values, num_tokens: apply(values[key], factor)

    def _coefficient(self, node: Node, dims: tuple[Dim, ...]) -> list[int]:
        """Note a coefficient of keys with ``dims``; raises unless it is the same for all sequences and heads.

        Returns:
            Its dimensions of sequences or heads. One index of each is enough.
        """
        sizes = shape_of(node) if isinstance(node.meta.get("val"), Tensor) else None
        if node in self.forms or sizes is None or len(sizes) > len(dims):
            raise _NotLinear
        base, chain = view_chain(node, frozenset())
        views = follow(IndexMap.identity(shape_of(base)), *chain)
        scaled: list[Dim] = []
        repeated: list[int] = []
        for place, (size, dim) in enumerate(zip(sizes, dims[len(dims) - len(sizes) :], strict=True)):
            if statically_known_true(size == 1):
                scaled.append(())
            elif _is_channels(dim) or [factor.axis for factor in dim] == [_TOKENS]:
                scaled.append(dim)
            elif views is not None and all(factor.axis is None for factor in views.dims[place]):
                scaled.append(())
                repeated.append(place)
            else:
                raise _NotLinear
        if _kinds(self.coefficients.setdefault(node, tuple(scaled))) != _kinds(scaled):
            raise _NotLinear
        return repeated

    def added(self, node: Node) -> tuple[IndexMap, Callable[[Values, Any], Any]]:
        """A sum or a difference of keys."""
        one, other, *more = node.args
        alpha = node.kwargs.get("alpha", 1)
        if more or set(node.kwargs) - {"alpha"} or not isinstance(alpha, (int, float)):
            raise _NotLinear
        if _kinds(self.dims_of(one)) != _kinds(self.dims_of(other)):
            raise _NotLinear
        sign = -alpha if node.target is aten.sub.Tensor else alpha
        return self.forms[one], lambda values, num_tokens: values[one] + values[other] * sign

    def joined(self, node: Node) -> tuple[IndexMap, Callable[[Values, Any], Any]]:
        """Keys that are concatenated along channels, or stacked."""
        parts, dim = arguments(node)
        all_dims = [self.dims_of(part) for part in parts]
        for dims in all_dims:
            rest = [dims[:dim], dims[dim + 1 :]]
            first = [all_dims[0][:dim], all_dims[0][dim + 1 :]]
            if len(dims) != len(all_dims[0]) or list(map(_kinds, rest)) != list(map(_kinds, first)):
                raise _NotLinear
            if dims[dim] and not _is_channels(dims[dim]):
                raise _NotLinear
        size = known_size(shape_of(node)[dim])
        form = self.forms[parts[0]]
        axis = len(form.base)
        form = IndexMap(
            (*form.base, size),
            (*form.starts, 0),
            (*form.dims[:dim], (Factor(axis, size),), *form.dims[dim + 1 :]),
        )
        return form, lambda values, num_tokens: torch.cat([values[part] for part in parts], dim)

    def as_complex(self, node: Node) -> tuple[IndexMap, Callable[[Values, Any], Any]]:
        whole = node.args[0]
        dims = self.dims_of(whole)
        if not _is_channels(dims[-1]):
            raise _NotLinear
        form = replace(self.forms[whole], dims=dims[:-1])
        return form, lambda values, num_tokens: torch.view_as_complex(values[whole].contiguous())

    def as_real(self, node: Node) -> tuple[IndexMap, Callable[[Values, Any], Any]]:
        whole = node.args[0]
        self.dims_of(whole)
        form = self.forms[whole]
        pair = (Factor(len(form.base), 2),)
        form = IndexMap((*form.base, 2), (*form.starts, 0), (*form.dims, pair))
        return form, lambda values, num_tokens: torch.view_as_real(values[whole])


def _shape(form: IndexMap, num_tokens: Any) -> list[Any]:
    """The shape of a node for one sequence and one head."""
    shape = []
    for dim in form.dims:
        sizes = [num_tokens if factor.axis == _TOKENS else factor.size for factor in dim if _counts(factor)]
        shape.append(math.prod(sizes) if sizes else 1)
    return shape


def _first_of(x: Tensor, dims: Sequence[int]) -> Tensor:
    """``x`` with one index of ``dims``."""
    for dim in dims:
        x = x.narrow(dim, 0, 1)
    return x


def _counts(factor: Factor) -> bool:
    return factor.axis is not None and factor.axis >= _TOKENS


def _is_channels(dim: Dim) -> bool:
    """Whether a dimension holds channels and nothing else."""
    return bool(dim) and all(factor.axis is not None and factor.axis >= _CHANNELS for factor in dim)


def _kinds(dims: Sequence[Dim]) -> list[list[tuple[int | None, Any]]]:
    """The kind of content of each dimension: all axes of channels count as one kind."""
    return [
        [(factor.axis if factor.axis is None else min(factor.axis, _CHANNELS), factor.size) for factor in dim]
        for dim in dims
    ]


def _are_equal(one: Factor, other: Factor) -> bool:
    sizes = statically_known_true(one.size == other.size)
    return one.axis == other.axis and sizes and statically_known_true(one.step == other.step)


_RULES: dict[Any, Callable[[_Walk, Node], tuple[IndexMap, Callable[[Values, Any], Any]]]] = {
    **dict.fromkeys((*SAME_OPS, *CASTS, *_RESHAPING, *_REORDERING, *_SELECTING, operator.getitem), _Walk.view),
    aten.neg.default: _Walk.negative,
    aten.mul.Tensor: _Walk.scaled,
    aten.mul.Scalar: _Walk.scaled,
    aten.div.Tensor: _Walk.scaled,
    aten.div.Scalar: _Walk.scaled,
    aten.add.Tensor: _Walk.added,
    aten.sub.Tensor: _Walk.added,
    aten.cat.default: _Walk.joined,
    aten.view_as_complex.default: _Walk.as_complex,
    aten.view_as_real.default: _Walk.as_real,
}
"""The operations that are linear and leave tokens, sequences and heads in place, if the checks of their rules hold."""
