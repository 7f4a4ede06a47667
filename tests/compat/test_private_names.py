"""Private names of other packages are used in one folder, ``kvcompile/compat``, and nowhere else."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo
import torch._inductor

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "kvcompile" / "compat"
FILES = [path for folder in ("kvcompile", "passes", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]

PACKAGES = {"torch", "triton", "transformers"}

PUBLIC = {f"{module.__name__}.{name}" for module in (torch._dynamo, torch._inductor) for name in module.__all__} | {
    "torch._dynamo.config",
    "torch._inductor.config",
}
"""The names that these modules export, and their documented settings."""

UNDOCUMENTED = re.compile(
    r"torch\.ops\.higher_order|triton\.(knobs|runtime|backends|compiler|tools|experimental|language\.target_info)|"
    r"(tl|triton\.language)\.extra"
)
"""Names without an underscore that no documentation has."""

GLUON = ("hopper.py", "hopper_tiles.py")
"""Kernels that are written entirely in Triton's experimental language."""

READ_BY_PYTORCH = {"_boxed_call", "_stable_hash_for_caching"}
"""Names that PyTorch looks up in our classes; ``test_behaviour.py`` checks that it does."""

OF_PYTHON = {"_replace"}
"""Documented names of Python's named tuples."""

DEPYF = ROOT / "kvcompile" / "debugging" / "depyf.py"
"""Changes private functions of depyf, for ``debug()`` only."""


def is_private(name: str) -> bool:
    """``_name``, but neither ``__name__`` nor ``_name_`` of an enum."""
    return name.startswith("_") and not name.endswith("_")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined_in(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes, variables and attributes of ``self`` that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


@functools.cache  # computed by the first test, not during the collection of tests, which every worker repeats
def own_names() -> set[str]:
    """The names of this package, names that PyTorch reads in it, and documented names of Python."""
    own = {name for path in FILES if path.parent != ROOM for name in defined_in(tree_of(path))}
    return own | READ_BY_PYTORCH | OF_PYTHON


def imported(node: ast.AST) -> list[str]:
    """The full names that an import statement imports; none for any other node."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{name.name}" for name in node.names]
    return []


def foreign_name(node: ast.AST) -> list[str]:
    """``torch._a.b`` for such an expression, and the attribute or the quoted name for any other access."""
    if isinstance(node, ast.Attribute):
        full = ast.unparse(node)
        if full.split(".")[0] in (*PACKAGES, "tl"):
            return [full]
        return [] if node.attr in own_names() or full.split(".")[0] == "aten" else [node.attr]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
        quoted = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
        return [name for name in quoted if name not in own_names()]
    return []


def private_names(path: Path) -> Iterator[str]:
    """The private names of other packages that a file uses, with their lines."""
    own = set(defined_in(tree_of(path)))
    for node in ast.walk(tree_of(path)):
        names = [name for name in imported(node) if name.split(".")[0] in PACKAGES]
        names += [name for name in foreign_name(node) if name not in own]
        for name in names:
            parts = name.split(".")
            is_public = ".".join(parts[:3]) in PUBLIC or name in ("torch._dynamo", "torch._inductor")
            is_undocumented = UNDOCUMENTED.match(name) is not None and path.name not in GLUON
            if is_undocumented or (any(map(is_private, parts)) and not is_public):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}"


def found_in(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The private names in a file of ``folder`` with this code."""
    monkeypatch.setattr(f"{__name__}.ROOT", folder)
    file = folder / "file.py"
    file.write_text(code)
    return list(private_names(file))


def test_no_other_room_uses_a_private_name() -> None:
    assert [name for path in FILES if path.parent != ROOM and path != DEPYF for name in private_names(path)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._guards",
        "from torch._dynamo.utils import counters",
        "from torch.utils import _pytree",
        "torch._C._storage_Use_Count(x)",
        "torch._dynamo.eval_frame.innermost_backend",
        "tensor._use_count()",
        "getattr(module, '_orig_mod', module)",
        "setattr(tensor, '_dynamo_weak_dynamic_indices', {0})",
        "model._supports_default_dynamic_cache()",
        "torch.ops.higher_order.flex_attention",
        "triton.knobs.runtime.interpret",
        "tl.extra.cuda.gdc_wait()",
    ],
)
def test_a_private_name_is_found(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_in(code, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "code",
    [
        "torch._dynamo.mark_static_address(x)",
        "from torch._inductor import config",
        "self.__dict__",
        "aten._to_copy.default",
        "reason._value_",
    ],
)
def test_a_public_name_is_not(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_in(code, tmp_path, monkeypatch) == []


def test_compat_names_a_fallback_for_each_file() -> None:
    silent = [
        path.name
        for path in sorted(ROOM.glob("*.py"))
        if any(private_names(path))
        and not any(word in path.read_text(encoding="utf-8") for word in ("fallback", "Without", "without"))
    ]
    assert silent == []
