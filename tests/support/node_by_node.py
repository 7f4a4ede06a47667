"""Run graphs node by node: tests check the rewritten graph, not the code that Inductor generates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


def interpret(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """A callable that runs a graph node by node, in place of the code that Inductor would generate for it."""
    from functorch.compile import make_boxed_func

    from kvcompile.passes.graph.aten import replace_views_by_reshapes

    replace_views_by_reshapes(gm)
    return make_boxed_func(gm.forward)


def rewriting_to_operators() -> contextlib.AbstractContextManager[Any]:
    """Inside the ``with`` block, a rewritten graph has the operators of ``kvcompile::`` on any device, as on a GPU."""
    from kvcompile.passes.rewrite import insert  # not above: some tests look at a fresh import

    return mock.patch.object(insert, "_uses_kernels", return_value=True)


def attending_with_an_operator() -> contextlib.AbstractContextManager[Any]:
    """Inside the ``with`` block, attention is an operator in rewritten graphs, and stores are their plain PyTorch.

    For generated code whose stores are the point: attention is the larger part of what Inductor would compile.
    """
    from kvcompile.passes.rewrite import insert

    insert_attention = insert._insert_attention

    def insert_operator(*args: Any) -> Any:
        with rewriting_to_operators():
            return insert_attention(*args)

    return mock.patch.object(insert, "_insert_attention", insert_operator)


@contextlib.contextmanager
def running_node_by_node(operators: bool = False) -> Iterator[None]:
    """Graphs that are compiled inside the ``with`` block run node by node, also afterwards; no code is generated.

    Args:
        operators: whether a rewritten graph has the operators of ``kvcompile::`` on any device, as on a GPU. Otherwise
            their plain-PyTorch specification is traced into a graph for a CPU, which takes longer.
    """
    import kvcompile.compilation.graph_compiler  # not above: some tests look at a fresh import
    import kvcompile.compilation.plain

    with (
        rewriting_to_operators() if operators else contextlib.nullcontext(),
        mock.patch.object(kvcompile.compilation.graph_compiler, "CAN_STORE", False),
        mock.patch.object(kvcompile.compilation.graph_compiler, "compile_fx_inner", interpret),
        mock.patch.object(kvcompile.compilation.plain, "compile_plain", lambda gm, config, inputs: gm.forward),
    ):
        yield
