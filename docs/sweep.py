"""Run architectures of Transformers under ``kvquant``, and record which attention was packed.

    python docs/sweep.py                          # all model types: an hour on a few cores
    python docs/sweep.py --architectures llama,t5 # only these; coverage.json keeps its results for the others
    python docs/sweep.py --missing                # cases that coverage.json lacks
    python docs/sweep.py --generate               # only prints whether generate() keeps its tokens: 20 minutes
    python docs/sweep.py --generate --device cuda --jobs 15   # the same on a GPU: ten minutes on 16 cores

The installed Transformers gives the list of model types (``docs/sweep_library.py``). Every type runs in its own
process, with static and dynamic caches (``docs/sweep_case.py``). The types of ``docs/sweep_models.py`` run with every
attention implementation that they support, and all others with ``scaled_dot_product_attention``. A type that crashes or
hangs also gets a row. Results go to ``coverage.json`` after each type, and ``coverage.md`` is generated from it.
``docs/sweep_generate.py`` compares the tokens of ``generate()``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import outside_parts
import sweep_generate
import torch
import transformers
from sweep_case import MAX_ERROR, NO_ATTENTION, NOT_BUILT, STEPS, CacheKind, CaseResult, Implementation, run_case
from sweep_library import model_types
from sweep_models import ARCHITECTURES
from sweep_process import Process, Record, finished_processes

FOLDER = Path(__file__).parent
Cases = Sequence[tuple[Implementation, CacheKind]]
CASES: Cases = [(attention, cache) for attention in get_args(Implementation) for cache in get_args(CacheKind)]
SDPA: Cases = [case for case in CASES if case[0] == "sdpa"]
"""The cases of a model type whose sizes come from the rule of ``sweep_library.py``."""
EAGER: Cases = [case for case in CASES if case[0] == "eager"]
"""The further cases of such a model type if it has no sdpa."""

Results = dict[str, list[CaseResult]]


def run_all(architectures: Mapping[str, Cases], jobs: int) -> Iterator[tuple[str, list[CaseResult]]]:
    """Run the cases of each architecture, ``jobs`` processes at a time; yields architectures as they finish.

    If a process dies or hangs, its unfinished cases are failures.
    """
    torch.set_num_threads(1)  # the models are small, and only a process without threads can be forked
    run_case("gpt2", "sdpa", "static")  # do one-time initialisation before the first fork
    with tempfile.TemporaryDirectory() as folder:
        starts = [partial(Run, name, cases, Path(folder)) for name, cases in architectures.items()]
        yield from ((run.architecture, run.results()) for run in finished_processes(starts, jobs))


class Run(Process):
    """The cases of one architecture in their own process."""

    def __init__(self, architecture: str, cases: Cases, folder: Path) -> None:
        self.architecture = architecture
        self._cases = cases
        super().__init__(folder / f"{architecture}.jsonl", self._run_all)

    def _run_all(self, record: Record) -> None:
        results = [self._run(record, *case) for case in self._cases]
        if _has_no_sdpa(self.architecture, results):
            for case in EAGER:
                self._run(record, *case)

    def _run(self, record: Record, attention: Implementation, cache: CacheKind) -> CaseResult:
        result = replace(run_case(self.architecture, attention, cache), transformers=transformers.__version__)
        record(result.to_dict())
        return result

    def results(self) -> list[CaseResult]:
        finished = [CaseResult(**result) for result in self.finished()]
        known = {(case.attention, case.cache) for case in finished}
        lost = (case for case in self._cases if case not in known)
        return [*finished, *(CaseResult(self.architecture, *case, failure=self.ending) for case in lost)]


def _has_no_sdpa(name: str, results: Sequence[CaseResult]) -> bool:
    """Whether a model type has no sdpa according to ``results``, so that eager attention runs too."""
    missing = [result.skipped == NO_ATTENTION.format("sdpa") for result in results if result.attention == "sdpa"]
    return name not in ARCHITECTURES and len(missing) > 0 and all(missing)


def cases_of(name: str, known: Sequence[CaseResult] = ()) -> Cases:
    """The cases of a model type that are not among the results ``known``."""
    cases = CASES if name in ARCHITECTURES else [*SDPA, *EAGER] if _has_no_sdpa(name, known) else SDPA
    done = {(case.attention, case.cache) for case in known}
    return [case for case in cases if case not in done]


def is_built(cases: Iterable[CaseResult]) -> bool:
    return not any((case.skipped or "").startswith(NOT_BUILT) for case in cases)


def has_cache(cases: Iterable[CaseResult]) -> bool:
    """Whether a layer keeps keys and values, or a case fails."""
    return any(case.failure or case.cached for case in cases)


def outcome(cases: Sequence[CaseResult]) -> str:
    """The result of a model type in a word or two."""
    if not is_built(cases):
        return "no small model"
    if not has_cache(cases):
        return "no cached layer"
    return "covered" if is_covered(cases) else "not covered"


def is_covered(cases: Iterable[CaseResult]) -> bool:
    """Whether every layer with a cache and without a window is rewritten, in every case that exists."""
    return all(
        not case.failure
        and case.error <= MAX_ERROR
        and (case.skipped is not None or case.packed_full == case.full <= case.rewritten)
        for case in cases
    )


def problems(cases: Iterable[CaseResult]) -> list[str]:
    """The problems among the cases: failures, and logits that differ."""
    found = []
    for case in cases:
        name = f"{case.architecture}, {case.attention}, {case.cache}"
        if case.failure:
            found.append(f"{name}: {case.failure}")
        elif case.error > MAX_ERROR:
            found.append(f"{name}: its logits differ by {case.error:.1e}")
    return found


def page(results: Results, versions: Mapping[str, str], not_run: Sequence[str] = ()) -> str:
    """``coverage.md``. ``not_run``: types that have no results yet."""
    reasons: dict[str, int] = {}
    cached = {name: cases for name, cases in sorted(results.items()) if has_cache(cases)}
    rows = [_row(name, cases, reasons) for name, cases in cached.items()]
    covered = sum(map(is_covered, cached.values()))
    not_built = [name for name, cases in sorted(results.items()) if not is_built(cases)]
    others = [name for name in sorted(results) if name not in cached and name not in not_built]
    bad = [line for cases in results.values() for line in problems(cases)]
    worst = max((case.error for cases in results.values() for case in cases), default=0.0)
    lines = [
        "# Coverage",
        "",
        *_INTRODUCTION.format(steps=", ".join(map(str, STEPS)), max_error=MAX_ERROR, **versions).splitlines(),
        "",
        f"Transformers has {len(results)} types of models that generate text. {len(results) - len(not_built)} of them "
        f"have a small model here, and {len(cached)} of these",
        f"keep keys and values in a cache of Transformers. {covered} of the {len(cached)} "
        f"({100 * covered / max(len(cached), 1):.0f} %) are covered: every cached layer without",
        "a sliding window is rewritten, in every case of the model. "
        f"{len(bad)} cases fail or differ; the largest error is {worst:.1e}.",
        *_releases(cached),
        "",
        "| architecture | attention | static | error | dynamic | error |",
        "|---|---|---:|---:|---:|---:|",
        *(line for row in rows for line in row),
        "",
        *(f"{number}. {reason}" for reason, number in reasons.items()),
        "",
        "No case runs, or no layer keeps keys and values in a cache of Transformers: " + _listed(others),
        "",
        "No small model, because the sizes are fields of other names, or belong to parts for images and sound (the "
        "text part is often a separate type, such as `gemma3_text`): " + _listed(not_built),
        *(["", "Not run yet (`python docs/sweep.py --missing`): " + _listed(not_run)] if not_run else []),
    ]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
This page tests `kvquant` on small random models of the types in Transformers {transformers}, with PyTorch {torch} on a
CPU, under `int8_per_token_head`. Each model is called with {steps} tokens, one call after the other, once with a static
cache and once with a dynamic cache. With a static cache, eager code makes the first call, and the further calls are
compiled, as in `generate()`. With a dynamic cache, all calls are compiled. Windows of sliding layers are 16 tokens.
Graphs are rewritten and run node by node; no code is generated.

The sizes of most models come from one rule (`docs/sweep_library.py`). These models run with
`scaled_dot_product_attention`, or with `eager` attention if they have no other. The remaining models
(`docs/sweep_models.py`) run with every attention implementation that they support.

`2 of 3` means that 2 of 3 layers with a cache were rewritten in every graph; cross-attention counts as a layer. The
error is the relative L2 distance of all logits from a reference: the uncompiled model, whose caches are quantized on
write and dequantized on read. In the reference, attention that was not packed reads new keys and values before they are
quantized. The limit is {max_error:g}, which is less than the effect of one wrong token in a mask. A code that is
rounded differently changes the logits by 1e-4; rows without such a code are at 1e-7. Numbers in brackets refer to
reasons and notes below the table. `-` stands for a case that does not run without kvcompile either,
uncompiled or under `torch.compile`.

```sh
python docs/sweep.py
```

`python docs/sweep.py --generate` compares tokens instead: those of `generate()` with and without kvcompile, under the
lossless policy `float32`. If tokens differ, it also tries a static cache without kvcompile, because some models of
Transformers compute other logits with it. If nothing is packed, it prints the reason. On a CPU graphs run node by node.
With `--device cuda` they are compiled, and steps are recorded as CUDA graphs."""


def _releases(results: Results) -> list[str]:
    """The number of types by release of Transformers, if there were several releases."""
    ran_on = Counter(max(case.transformers for case in cases) for cases in results.values())
    if len(ran_on) < 2:
        return []
    return ["", *(f"{ran_on[release]} of these models ran on Transformers {release}." for release in sorted(ran_on))]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(f'`{name}`' for name in names) or 'none'}."


def _row(name: str, cases: Sequence[CaseResult], reasons: dict[str, int]) -> list[str]:
    lines = []
    for attention in dict.fromkeys(case.attention for case in cases):
        cells = {case.cache: _cells(case, reasons) for case in cases if case.attention == attention}
        if any(cell != ("-", "") for cell in cells.values()):
            both = [text for cache in ("static", "dynamic") for text in cells[cache]]
            lines.append(f"| `{name}` | {attention} | {' | '.join(both)} |")
    return lines


def _cells(case: CaseResult, reasons: dict[str, int]) -> tuple[str, str]:
    """Layers and error of one case."""
    if case.skipped:
        return "-", ""
    if case.failure:
        return f"failed {_reference(case.failure, reasons)}", ""
    marks = ", ".join(_reference(reason, reasons) for reason in [*case.refusals, *case.notes])
    rewritten = min(case.rewritten, case.packed)  # several modules may read one cache
    return f"{rewritten} of {case.cached} {marks}".rstrip(), f"{case.error:.0e}"


def _reference(reason: str, reasons: dict[str, int]) -> str:
    return f"[{reasons.setdefault(reason, len(reasons) + 1)}]"


def versions() -> dict[str, str]:
    """The versions that determine the results."""
    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}


def load(path: Path) -> Results:
    if not path.exists():
        return {}
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return {name: [CaseResult(**case) for case in found] for name, found in cases.items() if name in model_types()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", help="names, separated by commas; default: all")
    parser.add_argument("--missing", action="store_true", help="only cases that coverage.json does not have yet")
    parser.add_argument("--generate", action="store_true", help="only print which tokens of generate() differ")
    parser.add_argument("--device", default="cpu", help="with --generate, where the models run, such as cuda")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where coverage.json and coverage.md are")
    options = parser.parse_args(arguments)
    names = options.architectures.split(",") if options.architectures else list(model_types())
    unknown = [name for name in names if name not in model_types()]
    if unknown:
        parser.error(f"unknown architectures: {', '.join(unknown)}; known: {', '.join(model_types())}")
    if options.generate:
        sys.exit(sweep_generate.print_all(names, options.jobs, options.device))
    if options.device != "cpu":
        parser.error("--device needs --generate: coverage.json has results of a CPU")
    store = options.folder / "coverage.json"
    results = load(store)
    wanted = {name: cases_of(name, results.get(name, []) if options.missing else ()) for name in names}
    for name, cases in run_all({name: cases for name, cases in wanted.items() if cases}, options.jobs):
        results[name] = cases = [*(results.get(name, []) if options.missing else []), *cases]
        print(f"{name}: {outcome(cases)}", *problems(cases), sep="\n  ", flush=True)
        data: dict[str, Any] = {n: [case.to_dict() for case in found] for n, found in sorted(results.items())}
        store.write_text(json.dumps({"versions": versions(), "cases": data}, indent=1) + "\n", encoding="utf-8")
        not_run = [name for name in sorted(model_types()) if name not in results]
        text = page(results, versions(), not_run) + outside_parts.section()
        (options.folder / "coverage.md").write_text(text, encoding="utf-8")
    if any(problems(cases) for cases in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
