"""The part of coverage.md on judges from outside: tests and reference models of other projects.

``python -m tests.outside`` writes ``outside.json``, and :mod:`make_pages` puts the tables into the page.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from reference_parts import table

RESULTS = Path(__file__).parent / "outside.json"

TITLE = "## Judges from outside"

Verdict = dict[str, Any]


def section() -> str:
    """The end of coverage.md, with the markers of its generated part."""
    return f"\n{TITLE}\n\n{_INTRODUCTION}\n\n<!-- made by outside_parts.judges -->\n\n{judges()}\n\n<!-- end -->\n"


_INTRODUCTION = """\
A judge from outside is an unchanged test module or reference model of another project. Its tests run twice: without
kvcompile (plainly), and on packed caches. A test that passes plainly must also pass on packed caches. A run that packs
nothing fails as an empty judge. Graphs run node by node on a CPU.

| way | what is packed |
|---|---|
| `config` | `kvquant` is the default backend of `CompileConfig`, which `generate()` on a static cache always uses |
| `compile` | `kvcompile.compile` compiles each model before its first `generate()`, also for beams and an assistant |
| `packing` | the class of the cache makes packed tensors; nothing is compiled |
| its loop | the project's own loop drives its model, whose weights are small and random |

`float32` is the lossless format. Reference models must then give the same tokens, and logits with a relative L2 error
of at most 2e-5. In `int8_per_token_head` scores may differ by a tenth of the largest score.

Caches of `kvcompile.compile` have room for up to 63 more tokens than a request needs. In these tests they have no
further room, because the tests compare shapes.

```sh
python -m tests.outside --sources DIR
```"""


def judges() -> str:
    """The tables of all results, or a sentence if there are none."""
    verdicts = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    if not verdicts:
        return "There are no results yet."
    reasons: dict[str, int] = {}
    rows = [_row(verdict, reasons) for verdict in verdicts]
    header = ["judge", "way", "pass plainly", "pass packed", "on packed caches", "sites", "packed calls", "notes"]
    return "\n\n".join(
        [
            _summary(verdicts),
            table(header, rows),
            "Sites are attention layers of compiled graphs, over all tests. `12 of 13` packed calls means that one\n"
            "call of 13 ran as plain Inductor would. Numbers in brackets refer to the lines below: reasons for\n"
            "refusals, and failures.",
            "\n".join(f"{number}. {reason}" for reason, number in reasons.items()) or "No notes.",
            _versions(verdicts),
        ]
    )


def _summary(verdicts: list[Verdict]) -> str:
    plain, packed = (sum(verdict[name] for verdict in verdicts) for name in ("passed_plain", "passed"))
    known = sum(len(verdict["known"]) for verdict in verdicts)
    empty = sum(not verdict["packed_calls"] and not verdict["packed_caches"] for verdict in verdicts)
    return (
        f"{len({verdict['judge'] for verdict in verdicts})} judges ran in {len(verdicts)} runs. {plain} tests and "
        f"models pass plainly, and {packed} of these pass packed.\n{known} of the other {plain - packed} fail for "
        "reasons that are not faults of packed caches; the notes name them.\n"
        f"{empty} runs are empty judges: nothing was packed."
    )


def _row(verdict: Verdict, reasons: dict[str, int]) -> list[str]:
    calls = str(verdict["packed_calls"])
    if verdict["plain_calls"]:
        calls += f" of {verdict['packed_calls'] + verdict['plain_calls']}"
    broken = [f"`{test.rpartition('::')[2]}`: {message}" for test, message in verdict["broken"].items()]
    known = sorted({f"{_tests(verdict, reason)}: {reason}" for reason in verdict["known"].values()})
    notes = [*verdict["refused"], *verdict["plain_because"], *known, *broken]
    marks = ", ".join(f"[{reasons.setdefault(_plain_text(note), len(reasons) + 1)}]" for note in notes)
    numbers = [verdict["passed_plain"], verdict["passed"], verdict["reached"], verdict["sites"]]
    return [verdict["judge"], f"{verdict['way']}", *map(str, numbers), calls, marks]


def _tests(verdict: Verdict, reason: str) -> str:
    """The tests of one model class that fail for a known reason."""
    found = dict.fromkeys(test.rpartition("::")[2] for test, why in verdict["known"].items() if why == reason)
    return ", ".join(f"`{name}`" for name in found)


def _plain_text(note: str) -> str:
    return note.replace("|", "\\|").replace("<", "&lt;")


def _versions(verdicts: list[Verdict]) -> str:
    """The versions and days of the runs."""
    ran = Counter(
        (", ".join(f"{name} {version}" for name, version in verdict["versions"].items()), verdict["date"])
        for verdict in verdicts
    )
    return "\n".join(f"- {runs} runs on {date}: {versions}" for (versions, date), runs in sorted(ran.items()))
