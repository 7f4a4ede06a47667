"""The page on packed caches names every operator with a handler. Their functions import nothing but Transformers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvcompile.packed.live_view import LiveView
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.repeated_heads import RepeatedHeads
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("packed", "caches") for path in (ROOT / "kvcompile" / folder).glob("*.py"))


@pytest.mark.parametrize("packed_type", [PackedTensor, PackedPool, PackedStack, LiveView, RepeatedHeads])
def test_the_page_names_every_operator_with_a_handler(packed_type: type[PackedSubclass]) -> None:
    page = (ROOT / "docs" / "packed_tensors.md").read_text(encoding="utf-8")
    table = page.partition("## What each operator does")[2].partition("## What is refused")[0]
    named = set(re.findall(r"`(\w+)`", table))
    handled = {op._schema.name.removeprefix("aten::") for op in packed_type.handlers}
    assert handled - named == set()


def imported(tree: ast.AST) -> set[str]:
    """Full names of the modules that code imports, except imports for type checkers only."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            names.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update({node.module or "", *(f"{node.module}.{name.name}" for name in node.names)})
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            names |= imported(node)
    return names


def test_functions_import_nothing_but_transformers() -> None:
    for path in FILES:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert all(name.startswith("transformers") for name in imported(function)), (path, function.name)
