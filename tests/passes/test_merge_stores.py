"""One operation stores keys and values that go to the same positions."""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node

from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.passes.rewrite.merge_stores import STORE, STORE_PAIR, merge_stores


class Stores:
    """A graph of stores, with one use of each result."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()

    def input(self, name: str, *shape: int) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def store(self, data: Node, x: Node, positions: Node, role: str) -> Node:
        arguments = {"x": x, "positions": positions, "valid": None, "format": f"{role}_format", "role": role}
        call = self.graph.call_function(
            auto_functionalized_v2, (STORE,), {**arguments, "_data_base_index": 0, "_all_bases": [data]}
        )
        result = self.graph.call_function(operator.getitem, (call, 1))
        result.meta["val"] = data.meta["val"]
        return result

    def use(self, *states: Node) -> Node:
        return self.graph.call_function(torch.ops.aten.add.Tensor, states)

    def stored(self) -> Counter[object]:
        merge_stores(self.graph)
        self.graph.lint()
        nodes = list(self.graph.nodes)
        assert list(reversed(self.graph.nodes)) == nodes[::-1]  # an insertion beside an erased node breaks it
        return Counter(node.args[0] for node in self.graph.nodes if node.target is auto_functionalized_v2)


def inputs(stores: Stores, v_tokens: int = 1) -> tuple[Node, ...]:
    sizes = {"k_data": (4, 1), "v_data": (4, 2), "key": (1, 2, 1, 64), "value": (1, 2, v_tokens, 80), "positions": (1,)}
    return tuple(stores.input(name, *size) for name, size in sizes.items())


def test_stores_are_merged_whichever_comes_first_and_later_stores_follow() -> None:
    stores = Stores()
    k_data, v_data, key, value, positions = inputs(stores)
    v_state = stores.store(v_data, value, positions, "value")
    k_state = stores.store(k_data, key, positions, "key")
    user = stores.use(k_state, stores.store(v_state, value, stores.input("later", 1), "value"))
    assert stores.stored() == {STORE_PAIR: 1, STORE: 1}
    pair = next(node for node in stores.graph.nodes if node.args[:1] == (STORE_PAIR,))
    assert pair.kwargs["_all_bases"] == [k_data, v_data]
    assert (pair.kwargs["key"], pair.kwargs["v_format"]) == (key, "value_format")
    assert user.args[0].args == (pair, 1)
    assert user.args[1].args[0].kwargs["_all_bases"][0].args == (pair, 2)


def test_a_result_that_is_used_before_the_other_store_cannot_wait() -> None:
    stores = Stores()
    k_data, v_data, key, value, positions = inputs(stores)
    stores.use(stores.store(k_data, key, positions, "key"), key)
    stores.use(stores.store(v_data, value, positions, "value"), value)
    assert stores.stored() == {STORE: 2}


def test_a_store_waits_for_no_pair_that_comes_later_than_it_can() -> None:
    stores = Stores()
    k_data, v_data, key, value, here = inputs(stores)
    there = stores.input("there", 1)
    keys_here = stores.store(k_data, key, here, "key")
    values_there = stores.store(v_data, value, there, "value")
    values_here = stores.store(values_there, value, here, "value")
    keys_there = stores.store(keys_here, key, there, "key")
    user = stores.use(keys_there, values_here)
    assert stores.stored() == {STORE_PAIR: 1, STORE: 2}
    (pair,) = (node for node in stores.graph.nodes if node.args[:1] == (STORE_PAIR,))
    assert pair.kwargs["positions"] is here
    assert pair.kwargs["_all_bases"] == [k_data, values_there]
    assert user.args[0].args[0].kwargs["_all_bases"][0].args == (pair, 1)
    assert user.args[1].args == (pair, 2)


def test_other_positions_other_tokens_and_another_write_of_keys_stay_apart() -> None:
    for case in ("positions", "tokens", "role"):
        stores = Stores()
        k_data, v_data, key, value, positions = inputs(stores, v_tokens=2 if case == "tokens" else 1)
        k_state = stores.store(k_data, key, positions, "key")
        other = stores.input("others", 1) if case == "positions" else positions
        stores.use(k_state, stores.store(v_data, value, other, "key" if case == "role" else "value"))
        assert stores.stored() == {STORE: 2}, case
