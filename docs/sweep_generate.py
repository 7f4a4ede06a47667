"""Compare the tokens of ``generate()`` with and without kvcompile, for the model types of the sweep.

Every type gets the same request twice: two prompts, one of them with padding. The second request reuses the packed
cache of the first. The policy is lossless, so each token must equal the token of plain ``generate()``. On a CPU graphs
run node by node. On a GPU they are compiled, and steps are recorded as CUDA graphs, as for users.

Some models of Transformers compute other logits with a static cache than with the default cache, which grows. A few
also read the room of a static cache that no token has taken yet. A type whose tokens differ therefore runs once more
without kvcompile, with a static cache of the same room. If it gives the tokens of kvcompile, Transformers is the cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sweep_case import LOSSLESS, without_code_generation
from sweep_library import NotBuiltError, architecture_of
from sweep_models import VOCAB_SIZE
from sweep_process import Process, Record, finished_processes
from torch import Tensor

import kvcompile
from kvcompile.caches.room import room_for
from kvcompile.report.data import modules_by_reason
from kvcompile.report.report import NO_ATTENTION, UNUSED, Report

PROMPT_TOKENS = 20
"""The windows of the small models have 16 tokens."""
PADDING = 6
NEW_TOKENS = 8


@dataclass
class TokenResult:
    """The tokens of one model type.

    Attributes:
        model_type: the type.
        skipped: why there is nothing to compare; None if there is.
        failure: the error that ``generate()`` raises only under kvcompile; None without one.
        different: the number of tokens that differ.
        as_static: whether a static cache without kvcompile gives the same tokens as kvcompile.
        layers: the number of attention layers in compiled graphs.
        packed: the number of these layers that are packed.
        reasons: why layers are not packed, according to the report.
    """

    model_type: str
    skipped: str | None = None
    failure: str | None = None
    different: int = 0
    as_static: bool = False
    layers: int = 0
    packed: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def is_problem(self) -> bool:
        """Whether kvcompile changes tokens or raises an error."""
        return self.failure is not None or (self.different > 0 and not self.as_static)

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.model_type}: not compared: {self.skipped}"
        if self.failure:
            return f"{self.model_type}: fails: {self.failure}"
        tokens = f"{self.different} tokens differ" if self.different else "same tokens"
        static = ", as with a static cache of Transformers" if self.as_static else ""
        packed = f"{self.packed} of {self.layers} layers packed" if self.layers else "nothing packed"
        reasons = "".join(f"\n  {reason}" for reason in self.reasons)
        if self.packed == 0 and not self.reasons:
            reasons = ", and the report gives no reason"
        return f"{self.model_type}: {tokens}{static}; {packed}{reasons}"


def compare(model_type: str, device: str = "cpu") -> TokenResult:
    """Compare the tokens of one type. The result records errors."""
    result = TokenResult(model_type)
    try:
        model = _model(model_type).to(device)
        expected = _tokens(model)
    except Exception as error:
        result.skipped = _text(error)
        return result
    try:
        running = without_code_generation() if device == "cpu" else contextlib.nullcontext()
        with running, kvcompile.collect_reports() as report:
            kvcompile.compile(model, policy=LOSSLESS)
            requests = [_tokens(model) for _ in range(2)]
    except Exception as error:
        result.failure = _text(error)
        return result
    result.different = max(_num_different(tokens, expected) for tokens in requests)
    result.layers, result.packed = report.totals.layers, report.totals.packed_layers
    result.reasons = _reasons(report)
    if result.different:
        result.as_static = all(_equals_static(kvcompile.uncompile(model), tokens) for tokens in requests)
    return result


def _model(model_type: str) -> Any:
    architecture = architecture_of(model_type)
    try:
        return architecture.build(model_type, "sdpa")
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        return architecture.build(model_type, "eager")


@torch.no_grad()
def _tokens(model: Any, **options: Any) -> Tensor:
    ids = torch.randint(3, VOCAB_SIZE, (2, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    options |= {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(ids, attention_mask=mask, use_cache=True, **options)  # mpt has no cache by default


def _equals_static(model: Any, tokens: Tensor) -> bool:
    """Whether a static cache of Transformers with as much room gives these tokens. Some models do not run with it."""
    room = room_for(PROMPT_TOKENS + NEW_TOKENS)
    try:
        return torch.equal(_tokens(model, cache_implementation="static", max_cache_len=room), tokens)
    except Exception:
        return False


def _num_different(tokens: Tensor, expected: Tensor) -> int:
    return int((tokens != expected).sum()) if tokens.shape == expected.shape else expected.numel()


def _reasons(report: Report) -> list[str]:
    """Refusals and notes. The note of a report on nothing gives no reason, but may go on with graph breaks."""
    refused = [site for site in report.sites if site.reason_code not in (None, "no_cache")]
    notes = [note.removeprefix(UNUSED).removeprefix(NO_ATTENTION).removeprefix("; ") for note in report.notes]
    return [*modules_by_reason(refused), *filter(None, notes)]


def _text(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"no small model: {first}" if isinstance(error, NotBuiltError) else f"{type(error).__name__}: {first}"


class Comparison(Process):
    """The comparison of one type in its own process."""

    def __init__(self, model_type: str, folder: Path, device: str = "cpu") -> None:
        self.model_type = model_type
        super().__init__(folder / f"{model_type}.jsonl", partial(_record_comparison, model_type, device), device)

    def result(self) -> TokenResult:
        for finished in self.finished():
            return TokenResult(**finished)
        return TokenResult(self.model_type, failure=self.ending)


def _record_comparison(model_type: str, device: str, record: Record) -> None:
    record(dataclasses.asdict(compare(model_type, device)))


def compare_all(model_types: Sequence[str], jobs: int, device: str = "cpu") -> Iterator[TokenResult]:
    """Compare the tokens of each type, ``jobs`` processes at a time; yields results as they finish."""
    if device == "cpu":
        torch.set_num_threads(1)  # only a process without threads can be forked
        compare("gpt2")  # do one-time initialisation before the first fork
    else:
        multiprocessing.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        starts = [partial(Comparison, model_type, Path(folder), device) for model_type in model_types]
        yield from (process.result() for process in finished_processes(starts, jobs))


def print_all(model_types: Sequence[str], jobs: int, device: str = "cpu") -> bool:
    """Print a line for each type, and a summary. The result is whether kvcompile changes tokens or raises errors."""
    results = []
    for result in compare_all(model_types, jobs, device):
        results.append(result)
        print(result, flush=True)
    print(summary(results))
    return any(result.is_problem for result in results)


def summary(results: Sequence[TokenResult]) -> str:
    compared = [result for result in results if result.skipped is None]
    same = [result for result in compared if result.failure is None and not result.different]
    static = sum(result.as_static for result in compared)
    return (
        f"{len(results)} types, {len(compared)} of them compared; same tokens: {len(same)} "
        f"({sum(result.packed > 0 for result in same)} with packed layers); tokens of a static cache of Transformers: "
        f"{static}; other tokens or errors: {sum(result.is_problem for result in results)}"
    )
