"""The evaluation of policies: the compiled model with packed caches against the unquantized model."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvcompile.caches.prompt import updating_layers
from kvcompile.caches.requests import clear_all
from kvcompile.caches.static import packed_layers
from kvcompile.compat.modules import running_eagerly
from kvcompile.compat.recompiling import with_new_code, without_recompile_limit
from kvcompile.compat.transformers import with_cache
from kvcompile.evaluation.attention_sites import AttentionTap, tapped
from kvcompile.evaluation.calibrate import Calibration
from kvcompile.evaluation.models import uncompiled
from kvcompile.evaluation.recall import Recalled, recalled
from kvcompile.evaluation.replay import CacheSize, Step, cache_with_windows, new_cache, replay
from kvcompile.evaluation.results import Evaluation, PolicyResult, device_name
from kvcompile.evaluation.step_comparison import StepComparison
from kvcompile.evaluation.text import Text
from kvcompile.evaluation.text_distance import text_distance
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.policy.policy import Policy
from kvcompile.report.data import enumerate_modules, modules_by_reason
from kvcompile.report.report import Report, collect_reports

OnProgress = Callable[[str, int, int], None]
"""Called with a description, the number of finished steps, and the number of all steps."""


def ignore_progress(doing: str, done: int, total: int) -> None:
    """Do nothing."""


def counted(on_progress: OnProgress, doing: str, total: int) -> Callable[[object], None]:
    """A function to call after every one of ``total`` steps."""
    done = itertools.count(1)
    return lambda step: on_progress(doing, next(done), total)


OnResult = Callable[[Evaluation], None]
"""Called after every policy with the evaluation so far."""


def evaluate(
    model: Any,
    text: Text,
    policies: Sequence[str | Path | Policy],
    *,
    model_name: str = "",
    exact_prompt: bool = False,
    tap: AttentionTap | None = None,
    on_progress: OnProgress = ignore_progress,
    on_result: OnResult = lambda evaluation: None,
) -> Evaluation:
    """Compare ``model`` under each of ``policies`` with the unquantized model.

    The reference is the uncompiled model with a plain cache. Both models predict all tokens of all windows except the
    first token of each, in the steps of ``text.schedule``. The outputs of the reference are kept in memory, on the CPU.
    Every step attends to packed keys and values, as in a sequence that is decoded from its start, unless
    ``exact_prompt`` is True. Code that was compiled before in this process is neither used nor dropped. A policy with
    ``key_outliers: promote`` is evaluated after the calibration has replaced its formats.

    Args:
        model: a Hugging Face causal language model in inference mode.
        text: from :func:`kvcompile.evaluation.text.read_text`.
        policies: anything that :meth:`kvcompile.policy.policy.Policy.load` takes.
        model_name: the name of the model in the result.
        exact_prompt: whether the prefill attends to its own tokens as the policy says: in full precision, unless the
            policy says ``prefill: packed``.
        tap: an AttentionTap of the model for the calibration, or None; see :class:`Calibration`.
        on_progress: called for every step.
        on_result: called after every policy.

    Raises:
        PolicyError: a policy does not exist or is invalid; this is raised before anything runs.
    """
    loaded = [(_name(policy), Policy.load(policy)) for policy in policies]
    model = uncompiled(model)
    for _, policy in loaded:
        for transforms in policy.transforms:
            transforms.check_model(model)
    distances = {
        transforms.source: str(text_distance(model, text.windows[0], transforms))
        for _, policy in loaded
        for transforms in policy.transforms
    }
    calibration = Calibration(model, text.inputs[0], [policy for _, policy in loaded], tap)
    run = _Run(model, text, calibration, len(loaded), on_progress, exact_prompt)
    with torch.no_grad():
        reference, nats, bits = run.reference()
        evaluation = _describe(model, text, model_name, nats, bits, exact_prompt)
        for name, policy in loaded:
            found = [*map(str, calibration.outliers(policy)), *(distances[one.source] for one in policy.transforms)]
            if policy.key_outliers == "promote":
                policy = calibration.promoted(policy)
            evaluation.results.append(run.policy(name, policy, reference, found))
            on_result(evaluation)
    return evaluation


def _name(policy: str | Path | Policy) -> str:
    return f"policy {policy.fingerprint()}" if isinstance(policy, Policy) else str(policy)


def _describe(model: Any, text: Text, name: str, nats: float, bits: float, exact_prompt: bool) -> Evaluation:
    return Evaluation(
        model=name or type(model).__name__,
        data=text.source,
        metric=text.metric,
        prefill=text.schedule.prefill,
        decode=text.schedule.decode,
        chunk=text.schedule.chunk,
        num_windows=len(text.windows),
        tokens=len(text.windows) * text.schedule.num_tokens,
        dtype=dtype_name(model.dtype),
        device=device_name(model.device),
        reference=text.quality(nats),
        reference_bits=bits,
        exact_prompt=exact_prompt,
    )


def _targets(window: torch.Tensor, step: Step) -> torch.Tensor:
    """The tokens that a step predicts: the window, shifted by one token."""
    return window[step.positions.start + 1 : step.positions.stop + 1]


class _Run:
    """Runs the model over the windows, once unquantized and once for every policy."""

    def __init__(
        self,
        model: Any,
        text: Text,
        calibration: Calibration,
        num_policies: int,
        on_progress: OnProgress,
        exact_prompt: bool,
    ) -> None:
        self.model = model
        self.text = text
        self.windows = text.windows.to(model.device)
        self.sites = calibration.sites
        self.done = 0
        self.total = (1 + num_policies) * len(text.windows) * len(text.schedule.steps())
        self.on_progress = on_progress
        self.exact_prompt = exact_prompt

    def reference(self) -> tuple[list[list[Step]], float, float]:
        """Run the model with a plain cache.

        Returns:
            The steps of every window, on the CPU; the mean loss in nats; the bits per element of the cache.
        """
        windows, nats = [], []
        with running_eagerly(), tapped(self.model, self.sites) as recorded:
            for window in self.windows:
                cache = new_cache(self.model, self.text.schedule)
                steps = []
                forwards = self.model, self.model
                for step in replay(forwards, window, with_cache(self.model, cache), self.text.schedule, recorded):
                    nats.append(F.cross_entropy(step.logits.float(), _targets(window, step), reduction="sum").item())
                    steps.append(step.to("cpu"))
                    self._advance("reference")
                windows.append(steps)
        return windows, sum(nats) / (len(windows) * self.text.schedule.num_tokens), CacheSize.of(cache).bits

    def policy(self, name: str, policy: Policy, reference: list[list[Step]], found: list[str]) -> PolicyResult:
        """Compile the model under a policy, run it over the windows, and compare."""
        begin = time.monotonic()
        compared = StepComparison()
        cache = cache_with_windows(self.model, self.text.schedule, policy)  # it serves all windows of the text
        windowed, exact_prompt = cache is not None, self.exact_prompt and policy.prefill == "exact"
        # The masks of windows depend on the number of tokens, which changes in every step.
        dynamic = None if windowed else False
        later = self._compiled(policy.model_copy(update={"prefill": "packed"}), dynamic)
        first = self._compiled(policy, dynamic) if exact_prompt and not windowed else later
        # The recompile limit is off: beyond it, Dynamo would run eager code without a report.
        with collect_reports() as report, without_recompile_limit(), tapped(self.model, self.sites) as recorded:
            graphs = len({(step.start == 0, step.stop - step.start) for step in self.text.schedule.steps()})
            for window, expected in zip(self.windows, reference, strict=True):
                if windowed:
                    clear_all(cache)
                    first = self._eagerly(cache, exact=exact_prompt)
                else:
                    cache = new_cache(self.model, self.text.schedule)
                steps = replay((first, later), window, with_cache(self.model, cache), self.text.schedule, recorded)
                for exact in expected:
                    if (number := len(compared.nats) + 1) <= graphs:
                        self.on_progress(f"{name}: compiling graph {number} of {graphs}", self.done, self.total)
                    step = next(steps)
                    compared.add(step, exact.to(window.device), _targets(window, step))
                    self._advance(name)
        size = CacheSize.of(cache)
        notes = [*_skipped(report), *report.notes, *found]
        if size.is_exact:
            notes.append(
                f"all {self.text.schedule.num_tokens} tokens of a window are in full precision, so later steps read no "
                "packed token; give a larger --prefill"
            )
        return self._result(name, report, compared, size, time.monotonic() - begin, notes)

    def _compiled(self, policy: Policy, dynamic: bool | None) -> Callable[..., Any]:
        """The model compiled under a policy. Sizes in each graph are static if ``dynamic`` is False."""

        def run(model: Any, **arguments: Any) -> Any:
            return model(**arguments)

        options: dict[str, Any] = {"policy": policy, "on_unsupported": "ignore"}
        compiled = torch.compile(with_new_code(run, "evaluate"), backend="kvquant", dynamic=dynamic, options=options)
        return functools.partial(compiled, self.model)

    def _eagerly(self, cache: Any, *, exact: bool) -> Callable[..., Any]:
        """The uncompiled model. Its attention reads packed ``cache``, and new tokens in full precision if ``exact``."""

        def run(**arguments: Any) -> Any:
            with updating_layers(packed_layers(cache), exact=exact):
                return self.model(**arguments)

        return run

    def _advance(self, doing: str) -> None:
        self.done += 1
        self.on_progress(doing, self.done, self.total)

    def _result(
        self, name: str, report: Report, compared: StepComparison, size: CacheSize, seconds: float, notes: list[str]
    ) -> PolicyResult:
        nats, exact = torch.cat(compared.nats), torch.cat(compared.reference_nats)
        divergence, difference = torch.cat(compared.divergence), nats - exact
        by_window = divergence.view(len(self.windows), -1)
        left = {site.module for site in report.sites if not site.rewritten}
        modules = {site.module for site in report.sites}
        return PolicyResult(
            policy=name,
            formats=_formats(report),
            packed_layers=len(modules - left),
            num_layers=len(modules),
            unpacked_modules=tuple(sorted(left)),
            effective_bits=size.bits,
            packed_bits=size.packed_bits,
            exact_tokens=size.exact_tokens,
            exact_share=size.exact_share,
            quality=self.text.quality(nats.mean().item()),
            change=self.text.relative_change(exact.mean().item(), difference.mean().item()),
            change_error=self.text.relative_change(
                exact.mean().item(), difference.std().item() / len(difference) ** 0.5
            ),
            mean_divergence=divergence.mean().item(),
            divergence_error=_standard_error(by_window.mean(1)),
            prefill_divergence=by_window[:, : self.text.schedule.prefill].mean().item(),
            decode_divergence=by_window[:, self.text.schedule.prefill :].mean().item(),
            decode_divergence_error=_standard_error(by_window[:, self.text.schedule.prefill :].mean(1)),
            median_divergence=divergence.median().item(),
            p999_divergence=divergence.quantile(0.999).item(),
            same_top1=torch.cat(compared.same_top).double().mean().item(),
            attention_errors=compared.attention.errors(),
            seconds=seconds,
            notes=tuple(notes),
            recalled=self._recalled(compared, by_window),
        )

    def _recalled(self, compared: StepComparison, divergence: torch.Tensor) -> tuple[Recalled, ...]:
        if self.text.planted is None:
            return ()
        right, exact = (torch.cat(x).view_as(divergence) for x in (compared.right, compared.reference_right))
        return recalled(self.text.planted, right, exact, divergence)


def _standard_error(means: torch.Tensor) -> float:
    """The standard error of the mean of ``means``; NaN for a single one."""
    return (means.std() / len(means) ** 0.5).item() if len(means) > 1 else math.nan


def _formats(report: Report) -> tuple[str, ...]:
    """The distinct format pairs of the layers, as ``K / V``."""
    pairs = []
    for site in report.sites:
        formats = {cache.role: cache.format for cache in site.caches}
        if formats:
            pairs.append(" / ".join(dict.fromkeys(formats[role] for role in ("key", "value") if role in formats)))
    return tuple(dict.fromkeys(pairs))


def _skipped(report: Report) -> list[str]:
    """A line for every reason why caches are not packed."""
    left = modules_by_reason(site for site in report.sites if not site.rewritten)
    return [f"{enumerate_modules(modules)} not packed: {reason}" for reason, modules in left.items()]
