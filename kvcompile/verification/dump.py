"""A dump for a bug report: a folder with both graphs and the inputs of a step in which they differ."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from kvcompile.debugging.stages import readable
from kvcompile.errors import KVCompileError
from kvcompile.policy.policy import Policy
from kvcompile.verification.check import Verdict


def write_dump(verdict: Verdict, policy: Policy) -> Path:
    """Write a new folder among the temporary files, and return it. It holds no floats of the model.

    Raises:
        KVCompileError: the folder cannot be written.
    """
    pair = verdict.pair
    sources = {place: known.source for place, known in enumerate(pair.rewrite.packing.inputs)}
    try:
        folder = Path(tempfile.mkdtemp(prefix="kvcompile_verify_"))
        (folder / "index.md").write_text("\n".join(_index(verdict)) + "\n", encoding="utf-8")
        (folder / "policy.yaml").write_text(policy.to_yaml(), encoding="utf-8")
        (folder / "original.py").write_text(readable(pair.original, sources), encoding="utf-8")
        (folder / "rewritten.py").write_text(readable(pair.rewrite.packing.gm, sources), encoding="utf-8")
    except OSError as error:
        raise KVCompileError(f"verify cannot write its dump to {tempfile.gettempdir()}: {error.strerror}") from error
    return folder


def _index(verdict: Verdict) -> Iterator[str]:
    yield "# A rewrite that differs from its original"
    yield ""
    versions = f"PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    yield f"{versions}. Step {verdict.steps} of the check."
    yield ""
    yield "- [original.py](original.py): the graph that plain Inductor would compile"
    yield "- [rewritten.py](rewritten.py): the rewritten graph, with caches in a lossless format"
    yield "- [policy.yaml](policy.yaml): the policy"
    yield ""
    yield "`kvcompile.tap` marks the result of each attention. The run of the rewritten graph compares it with the"
    yield "result of the original, and continues with the original result."
    yield ""
    yield "## Differences"
    yield ""
    names = [site.module or "top level" for site in verdict.pair.rewrite.packing.sites]
    for mismatch in verdict.mismatches:
        where = ", ".join(names[site] for site in sorted(mismatch.sites)) or "any site"
        yield f"- {where}: {mismatch}"
    yield ""
    yield "## Inputs of the step"
    yield ""
    yield "Caches and inputs of floats are normally distributed."
    yield ""
    yield from (f"- {line}" for line in verdict.inputs)
