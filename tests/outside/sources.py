"""The folder with the code of the other projects, which this repository does not contain."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

VARIABLE = "KVCOMPILE_OUTSIDE_SOURCES"


def given(option: str | Path | None) -> Path | None:
    """The folder that the option or the environment variable names; None if neither does."""
    named = option or os.environ.get(VARIABLE)
    return Path(named).resolve() if named else None


def missing(sources: Path | None, project: str) -> str | None:
    """Why a project cannot be judged; None if its folder is there."""
    if sources is None:
        return f"pass --outside-sources DIR, or set {VARIABLE}, to a folder that has a checkout {project}"
    if not (sources / project).is_dir():
        return f"{sources / project} is missing; put a checkout of {project} there"
    return None


def versions(sources: Path, project: str) -> dict[str, str]:
    """The versions that determine a result: PyTorch, Transformers, and the commit of the project's checkout.

    The commit is the text of the file ``COMMIT`` in the folder of the project, which the person who extracts it writes.
    """
    commit = sources / project / "COMMIT"
    found = {name: importlib.metadata.version(name).split("+")[0] for name in ("torch", "transformers")}
    return found | ({f"checkout of {project}": commit.read_text(encoding="utf-8").strip()} if commit.exists() else {})
