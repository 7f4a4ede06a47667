"""The command that runs the judges and writes docs/outside.json."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from outside import judges, loops, sources
from outside.reference_models import REFERENCES
from outside.verdict import Verdict

RESULTS = Path(__file__).parents[2] / "docs" / "outside.json"

_USAGE = """\
Run the tests and reference models of other projects, first plainly and then on packed caches.

    python -m tests.outside --sources DIR                      # all of them: hours
    python -m tests.outside --sources DIR --models llama,t5    # of Transformers' models, only these
    python -m tests.outside --sources DIR --only models --models llama

DIR has a checkout of each project: transformers, gpt-fast, llama3, DeepSeek-V3, litgpt, torchtune, gemma_pytorch,
LLMs-from-scratch, whisper. Results go to docs/outside.json after each judge, from which docs/coverage.md is made. The
command exits with 1 if a test that passes plainly fails on packed caches, or if nothing was packed.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.outside", description=_USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", help=f"the folder with the checkouts; default: the variable {sources.VARIABLE}")
    parser.add_argument("--only", choices=("references", "caches", "models"), help="only one kind of judges")
    parser.add_argument("--models", default="", help="folders in tests/models of Transformers, separated by commas")
    parser.add_argument("--ways", default="", help="names of ways for models, separated by semicolons; default: all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no judge after so many minutes")
    parser.add_argument("--missing", action="store_true", help="only judges that have no result yet")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file with the results")
    parser.add_argument("--logs", type=Path, help="a folder for the output of the tests")
    options = parser.parse_args(arguments)
    folder = sources.given(options.sources)
    if folder is None:
        parser.error(f"pass --sources, or set {sources.VARIABLE}, to the folder with the checkouts")
    torch.set_num_threads(1)  # only a process without threads can be forked
    bad = 0
    for verdict in _verdicts(options, folder):
        _store(verdict, options.results)
        bad += bool(verdict.problems())
        print(f"{verdict.judge}, {verdict.way}: {verdict.passed} of {verdict.passed_plain}", flush=True)
        print(*(f"  {problem}" for problem in verdict.problems()), sep="\n", flush=True)
    return int(bad > 0)


def _verdicts(options: argparse.Namespace, folder: Path) -> Iterator[Verdict]:
    end = time.monotonic() + 60 * options.minutes
    known = {verdict["judge"] for verdict in load(options.results)} if options.missing else set()

    def stamped(verdict: Verdict, project: str) -> Verdict:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return replace(verdict, versions=sources.versions(folder, project), date=today)

    if options.only in (None, "references"):
        for reference in REFERENCES:
            for policy in (loops.LOSSLESS, judges.LOSSY):
                if reference.name not in known and sources.missing(folder, reference.source) is None:
                    yield stamped(loops.judge(reference, folder, policy), reference.source)
    wanted: list[judges.Judge] = [*judges.CACHE_TESTS] if options.only in (None, "caches") else []
    if options.only in (None, "models") and sources.missing(folder, "transformers") is None:
        wanted += judges.model_judges(folder, [name for name in options.models.split(",") if name])
    for number, judge in enumerate(wanted):
        if judge.name in known or sources.missing(folder, judge.source) is not None:
            continue
        if time.monotonic() > end:
            return
        if judge.marked and not any(other.marked for other in wanted[:number]):
            judges.preload(folder)
        if options.ways and judge.marked:
            names = options.ways.split(";")
            judge = replace(judge, ways=tuple(way for way in judge.ways if str(way) in names))
        for verdict in judge.verdicts(folder, options.logs):
            yield stamped(verdict, judge.source)


def load(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _store(verdict: Verdict, path: Path) -> None:
    """Put a verdict into the file, in place of an older one of the same judge and way."""
    others = [other for other in load(path) if (other["judge"], other["way"]) != (verdict.judge, verdict.way)]
    verdicts = sorted([*others, verdict.to_dict()], key=lambda one: (one["judge"], one["way"]))
    path.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
