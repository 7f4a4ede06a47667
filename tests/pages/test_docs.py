"""README and docs are true: their commands and their Python run, and their generated parts are up to date."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import make_pages
import pytest
import torch.distributed as dist
import walk_parts
from calibrated_bases import write_transforms
from documented_commands import PAGES, ROOT, blocks, command_line, commands, runs_elsewhere
from model_configs import LLAMA_3_1_8B, write_config
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.passes.refusal import Reason
from kvcompile.policy.policy import Policy

POLICY_PAGE = ROOT / "docs" / "policy.md"

RUN_ELSEWHERE = {
    "pip install -e . && python examples/quickstart.py": "test_quickstart.py",
    'pip install -e ".[test]" && pytest': ".ci/run",
    ".ci/run": "what runs these tests",
    "ruff check && ruff format --check && mypy": ".ci/run",
}
"""Commands in pages that this file does not run, and the file that runs them."""

SLOW = {"tuning.md"}
"""Pages with slow Python, whose functions other tests run too; they run only in ``pytest -m slow``."""


RESULTS = ROOT / "benchmarks" / "results"

LINKED_PAGES = [*PAGES, *sorted(ROOT.glob("benchmarks/**/*.md")), *sorted(ROOT.glob("kernels/**/*.md"))]
"""All pages whose links this file follows: also pages of benchmarks and kernels, whose commands it does not run."""


by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
by_linked_page = pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", make_pages.pages(), ids=lambda page: page.name)
def test_parts_generated_from_the_code_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    version = re.search(r"come from PyTorch (\S+)\.\n", text)
    if version and version[1] != walk_parts.torch_version():
        pytest.skip(f"the page shows graphs of PyTorch {version[1]}")
    assert make_pages.made(text) == text, "run: python docs/make_pages.py"


def test_one_command_makes_pages_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- made by reference_parts.cache_size_formula -->\nold\n<!-- end -->\n\nAfter.\n")
    monkeypatch.setattr(make_pages, "FOLDER", tmp_path)
    with pytest.raises(SystemExit):
        make_pages.main(["--check"])
    assert "old" in page.read_text()
    make_pages.main([])
    make_pages.main(["--check"])
    text = page.read_text()
    assert "ceiling(num_tokens/64)" in text
    assert (text.startswith("Before."), "old" in text, text.endswith("After.\n")) == (True, False, True)


def test_every_refusal_is_on_its_page() -> None:
    text = (ROOT / "docs" / "refusals.md").read_text()
    assert re.findall(r"^### `(\w+)`$", text, re.MULTILINE) == [reason.name for reason in Reason]


@by_linked_page
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
        name, _, anchor = target.partition("#")
        other = (page.parent / name) if name else page
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], target


def test_the_page_of_main_figures_links_every_page_of_results() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)\)", (RESULTS / "README.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in RESULTS.glob("*.md")} - {"README.md"}


def test_every_file_of_results_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in RESULTS.glob("*.md"))
    assert [path.name for path in RESULTS.glob("*.json") if f"`{path.name}`" not in text] == []


@by_linked_page
def test_the_page_has_no_merge_conflicts(page: Path) -> None:
    assert not re.findall(r"^(?:<{7}|>{7}) .*$", page.read_text(encoding="utf-8"), re.MULTILINE)


@by_page
@pytest.mark.usefixtures("folder")
def test_policies_on_the_page_are_valid(page: Path) -> None:
    for text in blocks(page, "yaml"):
        Policy.from_text(text)


# Commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that commands and snippets read."""
    write_config(tmp_path, LLAMA_3_1_8B)
    (tmp_path / "policy.yaml").write_text(blocks(POLICY_PAGE, "yaml")[0])
    write_transforms(tmp_path / "transforms.safetensors")
    (tmp_path / "scales.json").write_text('{"largest": {"layers.0.attn": {"key": 1.0, "value": 1.0}}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVQUANT_POLICY", raising=False)
    return tmp_path


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("arguments", [command for command in command_line() if not runs_elsewhere(command)])
def test_commands_of_the_command_line_run(arguments: str, folder: Path) -> None:
    result = CliRunner().invoke(app, shlex.split(arguments), prog_name="kvcompile")
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stdout


@pytest.mark.parametrize("command", commands("sh"))
def test_other_commands_are_of_files_that_exist_or_run_elsewhere(command: str) -> None:
    if command in RUN_ELSEWHERE:
        return
    program, *arguments = shlex.split(command)
    assert program in ("python", "pytest"), command
    for argument in arguments:
        if "/" in argument:
            assert (ROOT / argument.partition("::")[0]).exists(), command


# Python


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in PAGES
        if blocks(page, "python") and page.name != "README.md"  # test_readme.py
    ],
)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snippets define all names that they use, as in a new process.

    They run as a module with a file, because ``triton.jit`` reads the source and Dynamo the module. A page on several
    ranks runs on one rank.
    """
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    file = folder / f"snippets_of_{page.stem}.py"
    file.write_text("\n".join(blocks(page, "python")))
    module = ModuleType(file.stem)
    vars(module).update(__file__=str(file))
    monkeypatch.setitem(sys.modules, file.stem, module)
    try:
        exec(compile(file.read_text(), file, "exec"), vars(module))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
