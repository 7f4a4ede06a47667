"""Compiling a graph with plain Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from kvcompile.compat.graphs import copied_graph
from kvcompile.compat.inductor import compile_fx


def compile_plain(gm: GraphModule, inductor_config: dict[str, Any], inputs: Sequence[Any]) -> Any:
    """The code of plain Inductor for ``gm``, which stays unchanged."""
    return compile_fx(copied_graph(gm), list(inputs), config_patches=inductor_config)


def plain_for_any_inputs(gm: GraphModule, inductor_config: dict[str, Any]) -> Callable[..., Any]:
    """A function that runs ``gm`` with plain Inductor. It is compiled at its first call.

    Dynamo traces the inputs and sets guards again, in a separate compilation. The compilation that made ``gm`` is
    finished, so Inductor cannot add guards on sizes and numbers to it. Inputs that fail the guards cause another
    compilation.
    """
    return torch.compile(gm, backend=lambda gm, inputs: compile_plain(gm, inductor_config, inputs))
