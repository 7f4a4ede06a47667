"""The shape of the repository: imports run one way, and every file says what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("kvcompile", "passes", "kernels", "docs", "examples", "benchmarks", "tests")


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports_of(path: Path) -> Iterator[str]:
    """Full names of what a file imports, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; write kvcompile...."
            yield from (f"{node.module}.{name.name}" for name in node.names)


def foreign_imports(folder: str, *allowed: str) -> list[str]:
    """What files of a folder import from the package outside of ``allowed``."""
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(folder)
        for name in imports_of(path)
        if f"{name}.".startswith("kvcompile.") and not name.startswith(allowed)
    ]


def test_kernels_import_nothing_but_kernels() -> None:
    assert foreign_imports("kernels", "kvcompile.kernels.") == []


def test_passes_import_nothing_but_passes_and_kernels() -> None:
    assert foreign_imports("passes", "kvcompile.passes.", "kvcompile.kernels.") == []


@pytest.mark.parametrize(
    ("folder", "packages"),
    [("kernels", ("torch.fx", "torch._dynamo", "transformers")), ("passes", ("transformers",)),
     ("kvcompile", ("transformers",))],
)  # fmt: skip
def test_kernels_know_no_graphs_and_only_what_is_for_its_users_knows_hugging_face(
    folder: str, packages: tuple[str, ...]
) -> None:
    its_users = [ROOT / "kvcompile" / name for name in ("evaluation", "caches")]
    others = [path for path in files(folder) if path not in its_users and path.parent not in its_users]
    assert [(path, name) for path in others for name in imports_of(path) if name.startswith(packages)] == []


def test_every_module_says_what_it_is_for() -> None:
    def has_docstring(path: Path) -> bool:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return not tree.body or ast.get_docstring(tree) is not None

    assert [path for path in files(*FOLDERS) if not has_docstring(path)] == []
