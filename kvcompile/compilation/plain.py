"""Compiling a graph with plain Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from kvcompile.call.shared_memory import shares_plain_part
from kvcompile.compat.graphs import copied_graph
from kvcompile.compat.inductor import compile_fx
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor


def compile_plain(gm: GraphModule, inductor_config: dict[str, Any], inputs: Sequence[Any]) -> Any:
    """The code of plain Inductor for ``gm``, which stays unchanged."""
    gm = copied_graph(gm)
    if any(isinstance(value, PackedTensor) for value in inputs):
        _return_views_as_plain_tensors(gm)
    return compile_fx(gm, list(inputs), config_patches=inductor_config)


def _return_views_as_plain_tensors(gm: GraphModule) -> None:
    """Let the graph return values in place of views of packed caches whose first token depends on sizes.

    AOTAutograd stores the first token of a view as a constant, so it cannot return such a view.
    """
    output = gm.graph.output_node()
    for node in output.all_input_nodes:
        with gm.graph.inserting_before(output):
            output.replace_input_with(node, gm.graph.call_function(_with_constant_start, (node,)))
    gm.recompile()


def _with_constant_start(x: Any) -> Any:
    return x.dequantize() if isinstance(x, PackedTensor) and not isinstance(x.start, int) else x


def plain_for_any_inputs(gm: GraphModule, inductor_config: dict[str, Any]) -> Callable[..., Any]:
    """A function that runs ``gm`` with plain Inductor. It is compiled at its first call.

    Dynamo traces the inputs and sets guards again, in a separate compilation. The compilation that made ``gm`` is
    finished, so Inductor cannot add guards on sizes and numbers to it. Inputs that fail the guards cause another
    compilation.
    """
    return torch.compile(gm, backend=lambda gm, inputs: compile_for_calls(gm, inductor_config, inputs))


def compile_for_calls(gm: GraphModule, inductor_config: dict[str, Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """:func:`compile_plain`, but a call runs eagerly if a plain part of a packed stack is also another input.

    AOTAutograd does not see this, and would assume that a write to one of them does not change the other.
    """
    compiled = compile_plain(gm, inductor_config, inputs)
    if not any(isinstance(value, PackedStack) for value in inputs):
        return compiled  # type: ignore[no-any-return]
    eager = copied_graph(gm)
    return lambda *args: (eager if shares_plain_part(args) else compiled)(*args)
