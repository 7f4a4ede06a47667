"""The shape of the repository: imports run one way between rooms, never in a circle, and every file has a docstring."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("kvcompile", "passes", "kernels", "docs", "examples", "benchmarks", "tests")

# A room is a folder, or a file at the root of its folder. Each room may import the rooms above it in this list.
ROOMS = """
compat

kernels.lang
kernels.formats
kernels.layout
kernels.spec
kernels.tiles
kernels.attention
kernels.store
kernels.gather
kernels.deepseek_v4
kernels.latent
kernels.launch
kernels.change_of_basis
kernels.calibrated
kernels.ops
kernels.paged
kernels.precompile

passes.refusal
passes.site
passes.marker
passes.calling
passes.graph
passes.mark
passes.stacks
passes.pools
passes.canonical
passes.prove
passes.rewrite
passes.notes
passes.packing
passes.pipeline

version
errors
tables
files
packed
policy
report
parallel
options
call
caches
debugging
verification
compilation
backend
packaging
explaining
generation
compiling
evaluation
planning
benching
kvcompile
cli
__main__
""".split()  # noqa: SIM905 - a list to read, with the three folders apart

ROOMS_WITH_TRANSFORMERS = (
    "kvcompile.compat.continuous_batching",
    "kvcompile.compat.stop_checks",
    "kvcompile.evaluation.",
    "kvcompile.caches.",
    "kvcompile.generation.",
)
"""The modules that import Transformers, inside the functions that need it."""

INSIDE_FUNCTIONS = {"triton", "transformers", "huggingface_hub", "depyf", "matplotlib"}
"""Packages that functions may import: optional packages, and packages that take seconds to import."""


@dataclass(frozen=True)
class Import:
    """One import statement.

    Attributes:
        file: module that imports, as ``kvcompile.passes.site``.
        name: full name of what it imports.
        in_function: whether the statement stands in a function.
    """

    file: str
    name: str
    in_function: bool


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "kvcompile" else ("kvcompile", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in files("kvcompile", "passes", "kernels")}


def imports_of(path: Path) -> Iterator[Import]:
    """The imports of a file, inside functions and for type checkers too."""
    tree, file = parse(path), module_of(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    in_functions = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(file, name.name, id(node) in in_functions) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; write kvcompile...."
            yield from (Import(file, f"{node.module}.{name.name}", id(node) in in_functions) for name in node.names)


@functools.cache  # computed by the first test, not during the collection of tests, which every worker repeats
def all_imports() -> dict[str, list[Import]]:
    """The imports of each module."""
    return {file: list(imports_of(path)) for file, path in MODULES.items()}


def module_imported(name: str) -> str | None:
    """The module of this package that an import of ``name`` loads, or None."""
    candidates = (name, name.rpartition(".")[0])
    return next((module for module in candidates if module in MODULES), None)


def room_of(module: str) -> str:
    parts = module.split(".")[1:] or ["kvcompile"]
    return ".".join(parts[:2]) if parts[0] in ("passes", "kernels") else parts[0]


def test_every_file_is_in_a_room() -> None:
    assert {room_of(module) for module in MODULES} == {*ROOMS, "passes", "kernels"}


def test_rooms_import_only_rooms_above_them() -> None:
    rank = {room: number for number, room in enumerate(ROOMS)}
    back = [
        f"{one.file} imports {module}"
        for imports in all_imports().values()
        for one in imports
        if (module := module_imported(one.name)) and rank[room_of(module)] > rank[room_of(one.file)]
    ]
    assert back == []


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = {
        file: {module for one in imports if (module := module_imported(one.name)) and module != file}
        for file, imports in all_imports().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of files: {' -> '.join(error.args[1])}")


def test_functions_import_nothing_that_a_file_could() -> None:
    inside = [
        f"{one.file} imports {one.name} in a function"
        for imports in all_imports().values()
        for one in imports
        if one.in_function and not one.file.startswith("kvcompile.cli.")
        and one.name.partition(".")[0] not in INSIDE_FUNCTIONS
    ]  # fmt: skip
    assert inside == []


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("kvcompile.kernels.", ("kvcompile.kernels.", "kvcompile.compat.")),
        ("kvcompile.passes.", ("kvcompile.passes.", "kvcompile.kernels.", "kvcompile.compat.")),
    ],
)
def test_kernels_and_passes_know_nothing_of_the_package_above(folder: str, allowed: tuple[str, ...]) -> None:
    foreign = [
        (one.file, one.name)
        for file, imports in all_imports().items()
        for one in imports
        if file.startswith(folder) and one.name.startswith("kvcompile.") and not one.name.startswith(allowed)
    ]
    assert foreign == []


@pytest.mark.parametrize(
    ("folder", "packages", "but"),
    [
        ("kvcompile.kernels.", ("torch.fx", "torch._dynamo", "transformers"), ()),
        ("kvcompile.passes.", ("transformers",), ()),
        (
            "kvcompile.",
            ("transformers",),
            ROOMS_WITH_TRANSFORMERS,
        ),
    ],
)
def test_kernels_know_no_graphs_and_only_rooms_for_its_users_know_transformers(
    folder: str, packages: tuple[str, ...], but: tuple[str, ...]
) -> None:
    foreign = [
        (file, one.name)
        for file, imports in all_imports().items()
        for one in imports
        if file.startswith(folder) and not file.startswith(but) and one.name.startswith(packages)
    ]
    assert foreign == []


def test_every_module_says_what_it_is_for() -> None:
    trees = {path: parse(path) for path in files(*FOLDERS)}
    assert [path for path, tree in trees.items() if tree.body and ast.get_docstring(tree) is None] == []


def test_every_room_says_what_lives_there_and_what_it_imports() -> None:
    docstrings = {path.parent: ast.get_docstring(parse(path.parent / "__init__.py")) for path in MODULES.values()}
    assert [folder for folder, docstring in docstrings.items() if "import" not in (docstring or "")] == []
