"""Every kind of installation is complete, PyTorch finds the backend and its log, and the import is cheap."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvcompile

ROOT = Path(__file__).parents[2]

SOURCES = {path.relative_to(ROOT) for path in (ROOT / "kvcompile").rglob("*.py")} | {
    "kvcompile" / path.relative_to(ROOT) for folder in ("passes", "kernels") for path in (ROOT / folder).rglob("*.py")
}


def run_python(program: str, *arguments: str, cwd: Path) -> str:
    """The output of a program in a separate interpreter, outside the repository."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, project: Path, folder: Path) -> Path:
    """Build a ``wheel`` or ``sdist`` from a copy of the project; returns the path of the archive."""
    folder.mkdir()
    program = f"import setuptools.build_meta as b, sys; print(b.build_{kind}(sys.argv[1]))"
    return folder / run_python(program, str(folder), cwd=project).splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("source") / "project"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    for name in ("kvcompile", "passes", "kernels"):
        shutil.copytree(ROOT / name, project / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    assert (project / "kvcompile" / "passes").is_symlink()
    return build("sdist", project, project / "dist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the source distribution, as an installer does."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (project,) = folder.iterdir()
    return build("wheel", project, folder / "dist")


@pytest.fixture(scope="module")
def index(sdist: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local index of packages with both archives, in the form that ``pip --index-url`` reads."""
    folder = tmp_path_factory.mktemp("index") / "simple" / "kvcompile"
    folder.mkdir(parents=True)
    for archive in (sdist, wheel):
        shutil.copy(archive, folder)
    links = "".join(f'<a href="{archive.name}">{archive.name}</a>' for archive in (sdist, wheel))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return folder.parent


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plain installation of the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        str(folder),
    ]
    subprocess.run([*pip, str(wheel)], check=True)
    return folder


def test_the_wheel_holds_every_source_file_and_no_other(wheel: Path) -> None:
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    modules = {name for name in names if name.suffix == ".py"}
    assert modules == SOURCES
    assert Path("kvcompile/py.typed") in names
    assert {Path("kvcompile/report/page/style.css"), Path("kvcompile/report/page/filter.js")} <= names
    assert any(name.name == "LICENSE" for name in names)
    assert {name.parts[0] for name in names} == {"kvcompile", f"kvcompile-{version()}.dist-info"}


def test_the_source_distribution_holds_files_where_the_repository_has_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    files = {Path(*Path(member.name).parts[1:]) for member in members if member.isfile()}
    assert files >= SOURCES
    assert {Path("README.md"), Path("LICENSE"), Path("pyproject.toml")} <= files


def test_a_plain_installation_works_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import kvcompile.passes.site, kvcompile.kernels.formats
assert kvcompile.__file__.startswith(sys.argv[1]), kvcompile.__file__
assert kvcompile.passes.site.__file__.startswith(sys.argv[1])
from importlib.metadata import distribution
(entry,) = distribution("kvcompile").entry_points.select(group="torch_dynamo_backends")
print(entry.name, entry.value)
"""
    assert run_python(program, str(installed), cwd=tmp_path).split() == ["kvquant", "kvcompile.backend:kvquant"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_clean_environment_installs_it_by_name_from_a_local_index(kind: str, index: Path, tmp_path: Path) -> None:
    """The environment has only the dependencies of kvcompile, which a path file takes from this interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "clean")], check=True)
    python = str(tmp_path / "clean" / "bin" / "python")
    only = ["--only-binary", "kvcompile"] if kind == "wheel" else ["--no-binary", "kvcompile", "--no-build-isolation"]
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip()
    (Path(site) / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-cache-dir"]
    run([*pip, "--ignore-installed", "--index-url", index.as_uri(), *only, "kvcompile"], tmp_path)
    where = run([python, "-c", "import kvcompile.passes.site as site; print(site.__file__)"], tmp_path).strip()
    assert where == f"{site}/kvcompile/passes/site.py"
    shown = run([str(tmp_path / "clean" / "bin" / "kvcompile"), "policy", "show", "int8_per_token_head"], tmp_path)
    assert "int8_per_token_head" in shown
    backends = run([python, "-c", "import torch; print(torch._dynamo.list_backends())"], tmp_path)
    assert "kvquant" in backends


def run(command: list[str], cwd: Path) -> str:
    """The output of a command that uses no settings and no paths of this process."""
    removed = ("PYTHONPATH", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def beside_pytorch(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The names that a program finds if it imports PyTorch first, and its log with the setting ``TORCH_LOGS``."""
    program = """
import json, os, sys, torch
found = {"listed": "kvquant" in torch._dynamo.list_backends()}
found["ours"] = [name for name in sys.modules if name.split(".")[0] == "kvcompile"]
import kvcompile.backend
found["transformers"] = "transformers" in sys.modules
os.environ["TORCH_LOGS"] = "+kvcompile"
torch._logging._internal._init_logs()  # as the import of PyTorch does
from kvcompile.passes.site import Site
from kvcompile.report.report import record
record([Site("layers.0", 0, "sdpa", reason="because", reason_code="training")])
print(json.dumps(found))
"""
    folder = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_pytorch_lists_the_backend_without_an_import_and_the_backend_imports_no_transformers(
    beside_pytorch: tuple[dict[str, Any], str],
) -> None:
    assert beside_pytorch[0] == {"listed": True, "ours": [], "transformers": False}


def test_torch_logs_shows_our_log(beside_pytorch: tuple[dict[str, Any], str]) -> None:
    assert "refused: layers.0: sdpa: because" in beside_pytorch[1]


def test_import_kvcompile_is_cheap(tmp_path: Path) -> None:
    program = """
import sys, kvcompile
heavy = {"torch", "triton", "transformers", "pydantic", "sympy", "rich"} & sys.modules.keys()
assert not heavy, heavy
"""
    run_python(program, cwd=tmp_path)


@pytest.mark.parametrize("name", kvcompile.__all__)
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    assert getattr(kvcompile, name).__doc__
    assert name in dir(kvcompile)


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvcompile' has no attribute 'polciy'"):
        _ = kvcompile.polciy


def test_all_files_name_the_same_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == kvcompile.__version__
    assert f"\n## {kvcompile.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def version() -> str:
    return kvcompile.__version__
