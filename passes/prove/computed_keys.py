"""Find the caches of attention whose keys are computed from a cache in every step, element-wise or by RoPE.

Some models cache pre-RoPE keys, and apply RoPE to all of them in every step (OLMo, x-transformers). The caches of such
an attention are packed. Attention applies a proven RoPE to the packed keys
(:mod:`kvcompile.passes.prove.key_factors`); otherwise the graph dequantizes the keys where the model reads them
(:mod:`kvcompile.passes.prove.fuse_computed`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from kvcompile.compat.operators import OpOverload
from kvcompile.kernels.layout.axes import CACHE_AXES, size_along
from kvcompile.passes.graph.aten import LIST_OPS, SIZE_OPS, VIEW_OPS, arguments, shape_of
from kvcompile.passes.graph.computed_from import computed_from
from kvcompile.passes.graph.names import cache_name
from kvcompile.passes.marker import Marker, is_marker
from kvcompile.passes.prove.cache import ComputedRead
from kvcompile.passes.prove.latents import is_written
from kvcompile.passes.prove.reads import Read
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten

_ROTATING = LIST_OPS | {aten.select.int, aten.view_as_complex.default, aten.view_as_real.default}
_OVER_CHANNELS = (
    *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default),
    aten.var_mean.correction,  # of a layer norm
)


def read_computed_keys(marker: Node, value: Read, is_cache: Callable[[Node], bool]) -> ComputedRead | None:
    """The caches of an attention that reads its values from a cache and computes its keys from another cache.

    Args:
        marker: the marker of the attention.
        value: how it reads its values.
        is_cache: whether a node may be the value of a cache after its writes.

    Returns:
        None unless each key is computed from the vector of its token and head in one cache of the values' shape, and
        from tensors that depend on no cache.

    Raises:
        Refusal: the query or the mask is computed from one of these caches, too.
    """
    call = Marker.of(marker)
    key = computed_from([call.key], is_cache)
    roots = [node for node, is_computed in key.items() if not is_computed]
    if len(roots) != 1 or roots[0] is value.root:
        return None
    made = {roots[0]}  # from the numbers of the cache, not only from its size
    for node in key:
        if node.target not in SIZE_OPS and not made.isdisjoint(node.all_input_nodes):
            made.add(node)
    if not all(map(_keeps_vectors_apart, made - {roots[0]})):
        return None
    both = {roots[0], value.root}
    for operand, user in ((call.query, "the query"), (call.mask, "the mask")):
        for root in both.intersection(_values_behind(operand) if operand is not None else ()):
            raise Refusal(Reason.used_elsewhere, role="key", source=cache_name(root), user=user)
    every = computed_from([call.original, call.key, call.value], both.__contains__)
    computing = frozenset(node for node, is_computed in every.items() if is_computed)
    between = tuple(node for node in key if node in made and node is not roots[0])
    return ComputedRead({roots[0]: "key", value.root: "value"}, computing | {marker}, between)


def read_like(root: Node, value: Read) -> Read | None:
    """A read of all tokens of ``root``, a cache of keys; None if no order of its dimensions fits the values.

    Several orders may fit the writes of a cache. The order of the values is tried first, and any other order must also
    fit the writes. Comparing symbolic sizes here guards on the answer, as intended: key and value caches with different
    symbols for their lengths grow together.
    """
    shape, sizes = shape_of(root), shape_of(value.root)
    if len(shape) != 4 or len(value.axes) != 4:
        return None
    for axes in dict.fromkeys((value.axes, *CACHE_AXES)):
        fits = axes == value.axes or is_written(root, axes)
        if fits and all(bool(size_along(shape, axes, axis) == size_along(sizes, value.axes, axis)) for axis in "bht"):
            batch, heads, tokens, channels = (size_along(shape, axes, axis) for axis in "bhtd")
            return Read(root, (), axes, tokens, channels, int(heads), batch)
    return None


def _values_behind(operand: Node) -> set[Node]:
    """The nodes whose numbers, and not only their sizes, ``operand`` is computed from, up to earlier attention."""
    pending, seen = [operand], {operand}
    while pending:
        node = pending.pop()
        inputs = [] if is_marker(node) or node.target in SIZE_OPS else node.all_input_nodes
        pending += [other for other in inputs if other not in seen]
        seen.update(inputs)
    return seen


def _keeps_vectors_apart(node: Node) -> bool:
    """Whether each vector of the result is computed from the vectors of one token and head."""
    if node.target in VIEW_OPS or node.target in _ROTATING or node.target is operator.getitem:
        return True
    if node.target in _OVER_CHANNELS:
        return arguments(node)[1] in ([-1], [len(shape_of(node.args[0])) - 1])
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False  # several tensors, as from a sort or from another graph
    if node.target is aten.cat.default:
        return bool(arguments(node)[1] >= len(shape_of(node)) - 1)
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
