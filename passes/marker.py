"""The marker op ``kvcompile::sdpa``: it carries one attention in one piece from marking to packing.

AOTAutograd turns ``F.scaled_dot_product_attention`` into a backend-specific op or decomposes it, and written-out
attention into a dozen operations. A marker stays in one piece. It also carries the qualified name of the module that
computes attention, which only Dynamo's graph knows.

The operand ``original`` of a marker is the result of the attention as the model computes it, and the marker has its
value. Both travel side by side through AOTAutograd and Inductor's joint passes. Packing then replaces the marker. A
packed site gets attention on packed caches, and the original computation is erased. A refused site gets ``original``,
and the remaining graph is, operation by operation, the graph that plain Inductor would have compiled. No state is kept
outside of the graph.

The op has no kernel, because packing replaces every marker.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_library = torch.library.Library("kvcompile", "FRAGMENT")
_library.define(
    "sdpa(Tensor original, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, float dropout_p, "
    "bool is_causal, float? scale, float softcap, bool enable_gqa, str module, str form, str? unsupported, "
    "bool hidden_rows_are_nan=False, str digest='') -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@dataclass(frozen=True)
class Marker:
    """One attention: ``softmax(softcap(scale * query @ key^T) + mask, sinks beside the keys) @ value``.

    Attributes:
        original: the result as the model computes it. The marker has its shape, strides and dtype.
        query: [batch, num_heads, q_len, head_dim].
        key: [batch, num_kv_heads, kv_len, head_dim]; ``num_kv_heads`` may be less than ``num_heads``.
        value: [batch, num_kv_heads, kv_len, v_head_dim].
        mask: broadcastable to [batch, num_heads, q_len, kv_len]; bool (True: attend) or float (added to the scores).
        sinks: [num_heads], logits of keys whose values are zero; they take part in the softmax.
        dropout_p: probability of dropout of the attention weights.
        is_causal: whether query ``i`` sees the keys 0 to ``i`` only; excludes ``mask``.
        scale: factor of the products; None for ``1 / sqrt(head_dim)``.
        softcap: if not 0, every score becomes ``softcap * tanh(score / softcap)`` before the mask.
        enable_gqa: as for ``F.scaled_dot_product_attention``.
        module: the qualified name of the module that computes attention.
        form: how the model writes it: ``sdpa``, ``written out`` or ``flex_attention``.
        unsupported: why it cannot be computed on packed caches; None if it can. If it cannot, the tensors may have
            other shapes than those above.
        hidden_rows_are_nan: whether a row is NaN if ``mask`` hides every key from it; it is zero otherwise.
        digest: a digest of everything outside of the graph that decides about packing it. The first marker of a graph
            has it, so that the keys of PyTorch's caches cover it. Empty if PyTorch may not store the compiled graph.
    """

    original: Node
    query: Node
    key: Node
    value: Node
    mask: Node | None = None
    sinks: Node | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    enable_gqa: bool = False
    module: str = ""
    form: str = "sdpa"
    unsupported: str | None = None
    hidden_rows_are_nan: bool = False
    digest: str = ""

    @classmethod
    def of(cls, node: Node) -> Marker:
        """The attention that the marker ``node`` describes."""
        return cls(*node.args)

    def describe(self) -> str:
        """The kind of attention, for the report."""
        parts = [self.form]
        if self.mask is not None:
            parts.append("bool mask" if _fake(self.mask).dtype == torch.bool else "float mask")
        if self.is_causal:
            parts.append("causal")
        head_dim = _fake(self.query).shape[-1] or 1  # 0**-0.5 raises for attention without channels
        if isinstance(self.scale, float) and abs(self.scale - head_dim**-0.5) > 1e-9:
            parts.append(f"scale {self.scale:g}")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        if self.sinks is not None:
            parts.append("sinks")
        return ", ".join(parts)

    def insert(self, graph: Graph) -> Node:
        """A marker node at the graph's insertion point."""
        return graph.call_function(TARGET, self._args())

    def _args(self) -> tuple[Any, ...]:
        """The arguments of a marker node; a digest that is empty is left out."""
        names = [field.name for field in fields(self)]
        return tuple(getattr(self, name) for name in (names if self.digest else names[:-1]))


def add_digest(graph: Graph, digest: str) -> None:
    """Write ``digest`` into the first marker of ``graph``."""
    first = markers_of(graph)[0]
    first.args = replace(Marker.of(first), digest=digest)._args()


def _fake(node: Node) -> Any:
    return node.meta["val"] if "val" in node.meta else node.meta["example_value"]


def is_marker(node: Node) -> bool:
    return node.op == "call_function" and node.target is TARGET


def markers_of(graph: Graph) -> list[Node]:
    """The markers of a graph, in its order."""
    return list(graph.find_nodes(op="call_function", target=TARGET))


def owners_of_originals(graph: Graph) -> dict[Node, frozenset[Node]]:
    """The nodes that only original computations depend on, each with the markers of these computations.

    Each of these nodes is erased once all its markers are replaced by packed attention.
    """
    owners: dict[Node, frozenset[Node]] = {}
    for node in reversed(graph.nodes):
        if not node.users or not _is_erasable(node):
            continue
        served: set[Node] = set()
        for user in node.users:
            if user in owners:
                served |= owners[user]
            elif is_marker(user) and node not in user.args[1:]:
                served.add(user)
            else:
                break
        else:
            owners[node] = frozenset(served)
    return owners


def replace_marker(graph: Graph, marker: Node, result: Node) -> None:
    """Put ``result`` in the place of a marker, and erase the nodes that only its original depended on."""
    marker.replace_all_uses_with(result)
    unused = {Marker.of(marker).original: None}
    graph.erase_node(marker)
    while unused:
        node, _ = unused.popitem()
        if not node.users and _is_erasable(node) and not is_marker(node):
            inputs = dict.fromkeys(node.all_input_nodes)
            graph.erase_node(node)
            unused.update(inputs)


def _is_erasable(node: Node) -> bool:
    # Attention kernels count as random because of their dropout. It is zero wherever a marker is rewritten.
    return node.op == "call_function" and not node.is_impure(impure_random=False)


def _sdpa_fake(original: Tensor, *rest: Any) -> Tensor:
    return torch.empty_strided(original.shape, original.stride(), dtype=original.dtype, device=original.device)


torch.library.register_fake("kvcompile::sdpa", _sdpa_fake, lib=_library)

TARGET = torch.ops.kvcompile.sdpa.default


def expand_markers(graph: Graph) -> None:
    """Replace every remaining marker by the computation that the model wrote."""
    for marker in markers_of(graph):
        replace_marker(graph, marker, Marker.of(marker).original)
