"""Find the caches of attention whose keys and values are computed from caches in every step.

Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) caches one vector for each token, its
*latent*, and the rotary channels of its keys, which all heads share. In every step a projection computes the keys and
values of all heads from them. These caches are packed, and dequantized where the model reads them. The dequantized
latents are small beside the keys and values of all heads, which the model computes anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.layout.axes import CACHE_AXES, RANK_3_AXES, size_along
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.graph.aten import VIEW_OPS, WRITE_OPS, shape_of
from kvcompile.passes.graph.computed_from import computed_from, states_behind
from kvcompile.passes.graph.names import cache_name
from kvcompile.passes.graph.states import first_state
from kvcompile.passes.marker import Marker, is_marker, markers_of
from kvcompile.passes.prove.cache import ComputedRead
from kvcompile.passes.prove.reads import Read
from kvcompile.passes.prove.writes import match_write
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten

_PRODUCTS = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default))


def read_latents(marker: Node, is_cache: Callable[[Node], bool]) -> ComputedRead | None:
    """The caches of latents that keys and values of an attention are computed from.

    A cache from which keys and values are computed has the role ``key``. If there is such a cache, a second cache from
    which only keys are computed has the role ``value``, because Transformers keeps the two as ``keys`` and ``values``
    of a layer. In all other cases, a cache has the role of the operand that is computed from it.

    The search stops at the attention of earlier layers.

    Args:
        marker: the marker of the attention.
        is_cache: whether a node may be the value of a cache after its writes.

    Returns:
        None unless keys and values both depend on such caches, and a matrix product computes one of them.

    Raises:
        Refusal: the query is computed from one of these caches, too.
    """
    call = Marker.of(marker)
    key, value = (computed_from([operand], is_cache) for operand in (call.key, call.value))
    if not (key and value) or not (_is_projected(key) or _is_projected(value)):
        return None
    given = [call.original, call.key, call.value, *([call.mask] if call.mask is not None else [])]
    every, query = computed_from(given, is_cache), computed_from([call.query], is_cache)
    roots = [node for node, is_computed in every.items() if not is_computed]
    has_shared = any(root in key and root in value for root in roots)
    roles: dict[Node, Role] = {}
    for root in roots:
        if root in query:
            raise Refusal(Reason.used_elsewhere, role="key", source=cache_name(root), user="the query")
        roles[root] = "key" if root in key and (root in value or not has_shared) else "value"
    computing = frozenset(node for node, is_computed in every.items() if is_computed)
    return ComputedRead(roles, computing | {marker})


def has_one_head(node: Node, *axes: int) -> bool:
    """Whether ``node`` has floats [batch, 1, tokens, width], [batch, tokens, 1, width] or of rank 3, and is no marker.

    ``axes``: the dimensions that may be the heads. By default, these are 1 and 2, or the heads have no dimension.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or is_marker(node):
        return False
    if value.dim() != 4:
        return value.dim() == 3 and not axes
    return any(statically_known_true(value.shape[axis] == 1) for axis in axes or (1, 2))


def read_whole(root: Node) -> Read:
    """A read of all tokens of ``root``, a cache value with one head. Its tokens are on the axis of its writes."""
    shape = shape_of(root)
    known = CACHE_AXES if len(shape) == 4 else RANK_3_AXES
    orders = [axes for axes in known if statically_known_true(size_along(shape, axes, "h") == 1)]
    axes = next((axes for axes in orders if is_written(root, axes)), orders[0])
    return Read(root, (), axes, shape[axes.index("t")], shape[-1], 1, size_along(shape, axes, "b"))


def later_states(graph: Graph) -> set[Node]:
    """The written states of inputs that may be caches, of four or three dimensions.

    Any activation may have three dimensions. An input of rank 3 is a cache if keys or values are selected from it. It
    is also a cache if the graph copies its state back or returns it, and computes keys or values, but no query, from
    that state. A query is computed from new tokens alone. A state from which a query is computed, such as a sequence
    with a token added in front, is therefore not a cache.
    """
    written = {
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target in WRITE_OPS and first_state(node).op == "placeholder"
    }
    rank_3 = {node for node in written if has_one_head(node) and len(shape_of(node)) == 3}
    kept = {first_state(node) for node in graph.output_node().args[0] if isinstance(node, Node)}
    kept.update(copy.args[0] for copy in graph.find_nodes(op="call_function", target=aten.copy_.default))
    states = {node for node in rank_3 if first_state(node) in kept and not _is_indexed(node)}
    caches: set[Node] = set()
    for call in map(Marker.of, markers_of(graph)) if rank_3 else ():
        key, value, query = (states_behind(x, states.__contains__) for x in (call.key, call.value, call.query))
        caches.update(first_state(node) for node in (call.key, call.value, *(key | value) - query))
    rank_4 = {node for node in written if len(shape_of(node)) == 4}
    return rank_4 | {node for node in rank_3 if first_state(node) in caches}


def _is_indexed(node: Node) -> bool:
    """Whether ``node`` is read by an index, as a pool is."""
    return any(user.target is aten.index.Tensor for user in node.users)


def views_of(root: Node, computing: Collection[Node]) -> set[Node]:
    """The nodes in ``computing`` that are views of ``root``."""
    views: set[Node] = set()
    pending = [root]
    while pending:
        found = {user for user in pending.pop().users if user in computing and user.target in VIEW_OPS} - views
        views |= found
        pending += found
    return views


def is_written(root: Node, axes: str) -> bool:
    """Whether ``root`` is a write along the tokens of a cache in the order ``axes``."""
    try:
        return match_write(root, axes, "key") is not None
    except Refusal:
        return False


def _is_projected(behind: dict[Node, bool]) -> bool:
    return any(is_computed and node.target in _PRODUCTS for node, is_computed in behind.items())
