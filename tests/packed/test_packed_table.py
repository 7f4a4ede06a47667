"""The page on packed caches names every operator with a handler.

Functions in ``kvcompile/packed`` and ``kvcompile/caches`` import nothing but Transformers.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import packed_parts
import pytest
import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.live_view import LiveView
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.repeated_heads import RepeatedHeads
from kvcompile.packed.stack import PackedRanges, PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("packed", "caches") for path in (ROOT / "kvcompile" / folder).glob("*.py"))


@pytest.mark.parametrize("packed_type", [PackedTensor, PackedPool, PackedStack, PackedRanges, LiveView, RepeatedHeads])
def test_the_page_names_every_operator_with_a_handler(packed_type: type[PackedSubclass]) -> None:
    page = (ROOT / "docs" / "packed_tensors.md").read_text(encoding="utf-8")
    table = page.partition("## What each operator does")[2].partition("## What is refused")[0]
    named = set(re.findall(r"`(\w+)`", table))
    handled = {op._schema.name.removeprefix("aten::") for op in packed_type.handlers}
    assert handled - named == set()


def caches() -> dict[type[PackedSubclass], PackedSubclass]:
    """A packed tensor of each class of the generated table."""
    layout = PackedLayout("int8_per_token_head", "key", 16)
    cache = PackedTensor.from_dense(torch.randn(2, 3, 5, 16), layout)
    stack = PackedStack.from_dense(torch.randn(2, 2, 3, 5, 16), {(0,): (layout, "bhtd"), (1,): (layout, "bhtd")})
    pool = PackedPool.from_dense(torch.randn(4, 64, 3, 16), layout, heads_first=False)
    ranges = PackedRanges.of(PackedStack.of_parts([cache.clone(), cache.clone()], (2,), (3,)))
    view = cache[:, :, ::2]
    return {PackedTensor: cache, PackedPool: pool, PackedStack: stack, PackedRanges: ranges, LiveView: view}


@pytest.mark.parametrize("packed_type", packed_parts.CLASSES)
def test_operators_without_a_handler_follow_the_last_rows_of_the_table(packed_type: type[PackedSubclass]) -> None:
    x = caches()[packed_type]
    assert type(x) is packed_type
    assert type(x * 2) is Tensor, "all others are dequantized"
    assert type(x.unsqueeze(0)) is LiveView, "others that return a view"
    before = x.dequantize().clone()
    x.select(0, 0).select(0, 0).select(0, 0).add_(1)
    changed = (x.dequantize() != before).flatten(0, -2).any(-1)
    assert 0 < int(changed.sum()) < changed.numel(), "others that write store the vectors that changed"
    with pytest.raises(NotImplementedError):
        x.resize_(1)
    with pytest.raises(NotImplementedError):
        x.squeeze_()


@pytest.mark.parametrize("packed_type", packed_parts.CLASSES)
def test_the_table_says_what_each_class_handles(packed_type: type[PackedSubclass]) -> None:
    column = packed_parts.CLASSES.index(packed_type) + 1
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in packed_parts.operators().splitlines()]
    handled = {op._schema.name.removeprefix("aten::") for op in packed_type.handlers}
    packed = {row[0] for row in rows if row[column] == "packed"}
    assert packed <= handled
    assert handled - packed <= {"as_strided", "detach_"}, "their result is a live view"


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
