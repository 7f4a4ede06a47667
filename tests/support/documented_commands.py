"""The commands that README, docs and help pages show."""

from __future__ import annotations

import re
from pathlib import Path

import make_pages

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in ROOT_PAGES), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in this language, without generated parts."""
    text = make_pages.PART.sub("", page.read_text(encoding="utf-8"))
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(language: str) -> list[str]:
    """The commands of all pages, without comments."""
    lines = [line for page in PAGES for block in blocks(page, language) for line in block.splitlines()]
    return list(dict.fromkeys(line.partition("  #")[0].removeprefix("$ ").strip() for line in lines if line.strip()))


def command_line() -> list[str]:
    """The arguments of ``python -m kvcompile`` in all pages."""
    found = [(command, command.removeprefix("python -m kvcompile ")) for command in commands("console")]
    assert [command for command, arguments in found if arguments == command] == []
    return [arguments for _, arguments in found]


ELSEWHERE = {
    "eval": "test_evaluation.py",
    "compare": "test_comparison.py",
    "calibrate": "test_static_scales.py",
    "tune": "test_tuning.py",
    "explain": "test_explain_command.py",
    "verify": "test_explain_command.py",
    "bench": "test_bench_command.py",
}
"""Commands that need a model or much time, and the files that run their examples."""


def runs_elsewhere(command: str) -> bool:
    """Whether another file runs the examples of a command."""
    return command.split()[0] in ELSEWHERE
