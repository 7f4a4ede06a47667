"""A node has the text of the user's call, or of the whole line if several statements share it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from kvcompile.passes.notes.calls import call_of

HEAD = "def step(keys, values, x):\n"


def texts(body: str, folder: Path) -> dict[str, str]:
    """The text of each operation that Dynamo traces in a step with this body, by the name of its node."""
    path = folder / "model.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[Node] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        found.extend(node for node in gm.graph.nodes if node.op not in ("placeholder", "output"))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(module.step, backend=backend)(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3))
    calls = {node.name: call_of(node) for node in found}
    return {name: call.code for name, call in calls.items() if call is not None}


@pytest.mark.parametrize(
    ("body", "node", "text"),
    [
        ("keys[0] = x\nvalues[0] = x", "setitem_1", "values[0] = x"),
        ("keys[0] = x; values[0] = x", "setitem", "keys[0] = x; values[0] = x"),
        ("keys[0] = x; values[0] = x", "setitem_1", "keys[0] = x; values[0] = x"),
        ("y = x.sin(); values[0] = x.cos()", "cos", "x.cos()"),
        ("values[0] = torch.add(\n    x,\n    x.cos(),\n)", "cos", "x.cos()"),
    ],
)
def test_a_node_has_the_text_of_its_call(body: str, node: str, text: str, tmp_path: Path) -> None:
    assert texts("import torch\n" + body, tmp_path)[node] == text
