"""Merge the store of keys and the store of values of a layer into one operation, if both write the same positions.

A decode step writes one token for each layer, so the cost of a store is its launch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from kvcompile.compat.operators import auto_functionalized_v2
from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile

STORE = torch.ops.kvcompile.store.default
STORE_PAIR = torch.ops.kvcompile.store_pair.default


def has_stores(graph: Graph) -> bool:
    """Whether the graph has stores that are operators."""
    return bool(_stores(graph))


def merge_stores(graph: Graph) -> None:
    """Merge pairs of the functional stores that :mod:`kvcompile.passes.rewrite.insert` inserts."""
    stores = _stores(graph)
    while stores:
        first = stores.pop(0)
        second = next((node for node in stores if _fit(first, node)), None)
        if second is not None:
            stores.remove(second)
            _merge(graph, first, second)


def _stores(graph: Graph) -> list[Node]:
    calls = graph.find_nodes(op="call_function", target=auto_functionalized_v2)
    return [call for call in calls if call.args[0] is STORE]


def _fit(first: Node, second: Node) -> bool:
    """Whether ``first`` can run together with ``second``, which writes another cache at the same positions."""
    (result,) = first.users
    same_tokens = all(first.kwargs[name] is second.kwargs[name] for name in ("positions", "valid"))
    return (
        same_tokens
        and first.kwargs["role"] != second.kwargs["role"]
        and first.kwargs["x"].meta["val"].shape[:3] == second.kwargs["x"].meta["val"].shape[:3]
        and first.kwargs["x"].meta["val"].device == second.kwargs["x"].meta["val"].device
        and _base(first) is not _base(second)
        and all(user > second for user in result.users)
    )


def _base(store: Node) -> Node:
    (base,) = store.kwargs["_all_bases"]
    return base


def _views(store: Node, name: str, base_index: int) -> dict[str, Any]:
    """The arguments that tell ``auto_functionalized_v2`` which slice of its base the argument ``name`` is."""
    own = {key: value for key, value in store.kwargs.items() if key.startswith("_data_")}
    return {key.replace("_data", name, 1): value for key, value in (own | {"_data_base_index": base_index}).items()}


def _merge(graph: Graph, first: Node, second: Node) -> None:
    key, value = (first, second) if first.kwargs["role"] == "key" else (second, first)
    arguments = {
        "key": key.kwargs["x"],
        "value": value.kwargs["x"],
        "positions": key.kwargs["positions"],
        "valid": key.kwargs["valid"],
        "k_format": key.kwargs["format"],
        "v_format": value.kwargs["format"],
        **_views(key, "_k_data", 0),
        **_views(value, "_v_data", 1),
        "_all_bases": [_base(key), _base(value)],
    }
    with graph.inserting_before(second):
        pair = graph.call_function(auto_functionalized_v2, (STORE_PAIR,), arguments)
        pair.meta = {**second.meta, "val": (None, *(_base(store).meta["val"] for store in (key, value)))}
        results = [graph.call_function(operator.getitem, (pair, index)) for index in (1, 2)]
    for store, result in zip((key, value), results, strict=True):
        (old,) = store.users
        result.meta = dict(old.meta)
        old.replace_all_uses_with(result)
        graph.erase_node(old)
        graph.erase_node(store)
