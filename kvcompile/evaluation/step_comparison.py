"""The distance between the predictions of two models on the same text."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.evaluation.replay import Step

ELEMENTS_AT_ONCE = 1 << 24
"""The number of logits that are compared at once, in float64."""

K = TypeVar("K", bound=Hashable)


@dataclass
class StepComparison:
    """The comparison of two models over all steps.

    Every field except ``attention`` is a list of tensors with an element for every predicted token.

    Attributes:
        nats: the model's loss.
        reference_nats: the reference's loss.
        divergence: Kullback-Leibler divergence of the model's prediction from the reference's, in nats.
        same_top: whether both models predict the same most likely token.
        right, reference_right: whether the most likely token of the model, and of the reference, is the next token.
        attention: errors of the outputs of every attention module.
    """

    nats: list[Tensor] = field(default_factory=list)
    reference_nats: list[Tensor] = field(default_factory=list)
    divergence: list[Tensor] = field(default_factory=list)
    same_top: list[Tensor] = field(default_factory=list)
    right: list[Tensor] = field(default_factory=list)
    reference_right: list[Tensor] = field(default_factory=list)
    attention: RelativeErrors[str] = field(default_factory=lambda: RelativeErrors())

    def add(self, step: Step, reference: Step, targets: Tensor) -> None:
        """Add a step; ``targets`` (int64 [tokens]) are the next tokens."""
        for part in _parts(step.logits):
            self._add_predictions(step.logits[part], reference.logits[part], targets[part])
        for name, output in step.attention.items():
            self.attention.add(name, output, reference.attention[name])

    def _add_predictions(self, logits: Tensor, reference_logits: Tensor, targets: Tensor) -> None:
        log_p, exact = (F.log_softmax(x.double(), dim=-1) for x in (logits, reference_logits))
        self.nats.append(F.nll_loss(log_p, targets, reduction="none").cpu())
        self.reference_nats.append(F.nll_loss(exact, targets, reduction="none").cpu())
        self.divergence.append(_divergence(log_p, exact).cpu())
        top, reference_top = logits.argmax(-1), reference_logits.argmax(-1)
        self.same_top.append((top == reference_top).cpu())
        self.right.append((top == targets).cpu())
        self.reference_right.append((reference_top == targets).cpu())


class RelativeErrors(Generic[K]):
    """Relative errors by key, summed over calls: the L2 norm of the difference over the norm of the exact tensor."""

    def __init__(self) -> None:
        self._sums: dict[K, Tensor] = {}

    def add(self, key: K, result: Tensor, exact: Tensor) -> None:
        """Add a result and the exact tensor that it approximates."""
        exact = exact.double()
        sums = torch.stack([(result.double() - exact).square().sum(), exact.square().sum()]).cpu()
        self._sums[key] = self._sums.get(key, torch.zeros(2, dtype=torch.float64)) + sums

    def errors(self) -> dict[K, float]:
        """The error of every key; keys whose exact tensors are all zeros are skipped."""
        return {key: math.sqrt(error / exact) for key, (error, exact) in self._sums.items() if exact > 0}


def divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """Kullback-Leibler divergence, in nats, of the predictions of ``logits`` from the predictions of ``reference``.

    Both are [tokens, vocab_size]; the result is float64 [tokens], on the CPU.
    """
    parts = [(logits[part].double(), reference[part].double()) for part in _parts(logits)]
    return torch.cat([_divergence(F.log_softmax(p, -1), F.log_softmax(exact, -1)).cpu() for p, exact in parts])


def _divergence(log_p: Tensor, exact: Tensor) -> Tensor:
    # A token with probability 0 in the reference (-inf) adds nothing.
    return torch.where(exact.isneginf(), 0.0, exact.exp() * (exact - log_p)).sum(-1)


def _parts(logits: Tensor) -> list[slice]:
    """Slices of the tokens that are small enough to be compared at once."""
    rows = max(1, ELEMENTS_AT_ONCE // logits.shape[-1])
    return [slice(begin, begin + rows) for begin in range(0, len(logits), rows)]
