"""Each node has a role for a site. The surroundings of a site are the graph around it, small enough to draw."""

from __future__ import annotations

import dataclasses
import json

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.notes.roles import NodeRole, note_role, noting_new_nodes, role_of
from kvcompile.passes.notes.surroundings import MAX_CONSUMERS, Box, surroundings_of_sites


def traced() -> tuple[GraphModule, dict[str, Node]]:
    """cache -> exp -> neg -> mul(x), and many users of exp."""

    def program(cache: Tensor, x: Tensor) -> list[Tensor]:
        state = cache.exp()
        return [state.neg() * x, *(state + i for i in range(10))]

    gm = make_fx(program, tracing_mode="fake")(torch.ones(2, 3), torch.ones(3))
    return gm, {node.name: node for node in gm.graph.nodes}


def test_the_first_note_of_a_node_stays() -> None:
    _, nodes = traced()
    first = NodeRole("key write", (0, 1), ("layers.0", "layers.1"))
    note_role(nodes["exp"], first)
    note_role(nodes["exp"], NodeRole("key read", (1,), ("layers.1",)))
    assert role_of(nodes["exp"]) == first
    assert str(first) == "layers.0 and 1 more: key write"
    assert str(NodeRole("attention", (0,), ("",))) == "top level: attention"


def test_all_nodes_made_in_a_block_are_noted_and_none_after_it() -> None:
    gm, nodes = traced()
    with noting_new_nodes(gm, lambda node: NodeRole(node.name, (0,), ("m",))), gm.graph.inserting_before(nodes["neg"]):
        made = gm.graph.call_function(torch.ops.aten.cos.default, (nodes["exp"],))
        copied = gm.graph.node_copy(nodes["neg"], lambda node: node)
    with gm.graph.inserting_before(nodes["neg"]):
        later = gm.graph.call_function(torch.ops.aten.sin.default, (nodes["exp"],))
    assert [part and part.name for part in map(role_of, (made, copied, later))] == [made.name, copied.name, None]


def test_a_part_is_one_box_and_its_neighbours_are_separate_boxes() -> None:
    gm, nodes = traced()
    for name in ("exp", "neg"):
        note_role(nodes[name], NodeRole("key store", (1,), ("m",)))
    note_role(nodes["cache_1"], NodeRole("key cache", (0, 1), ("l", "m")))
    first, second = surroundings_of_sites(gm.graph, 2)
    assert first is not None
    assert second is not None
    assert second.boxes[0] == Box("key cache", ("float32 [2, 3]",), "cache")
    assert second.boxes[1] == Box("key store", ("exp, neg", "float32 [2, 3]"), "write")
    assert [box.label for box in second.boxes[2:]] == ["add"] * MAX_CONSUMERS, "consumers beyond the limit are left out"
    assert second.edges == ((0, 1), *((1, place) for place in range(2, len(second.boxes))))
    assert [box.label for box in first.boxes] == ["key cache", "exp"], "the cache is in both"


def test_a_site_without_nodes_has_no_surroundings() -> None:
    gm, _ = traced()
    assert surroundings_of_sites(gm.graph, 1) == [None]


def test_many_operations_are_counted_and_a_neighbourhood_is_plain_data() -> None:
    gm, nodes = traced()
    for node in list(nodes.values())[2:-1]:
        note_role(node, NodeRole("packed attention", (0,), ("m",)))
    with gm.graph.inserting_before(nodes["neg"]):
        for op in (torch.ops.aten.cos, torch.ops.aten.sin, torch.ops.aten.tan):
            note_role(gm.graph.call_function(op.default, (nodes["exp"],)), NodeRole("packed attention", (0,), ("m",)))
    (view,) = surroundings_of_sites(gm.graph, 1)
    assert view is not None
    assert [box for box in view.boxes if box.kind == "attention"] == [
        Box("packed attention", ("16 operations", "float32 [2, 3]"), "attention")
    ]
    assert [box.kind for box in view.boxes] == ["input", "input", "attention", "output"]
    assert json.loads(json.dumps(dataclasses.asdict(view)))["edges"] == [[0, 2], [1, 2], [2, 3]]
