"""How far one model's predictions are from another's on the same text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.evaluation.replay import Step

ELEMENTS_AT_ONCE = 1 << 24
"""Logits that are compared at once, in float64."""


@dataclass
class Comparison:
    """Sums over steps; the fields are lists of tensors with an element for every predicted token.

    Attributes:
        nats: the model's loss.
        reference_nats: the reference's loss.
        divergence: Kullback-Leibler divergence of the model's prediction from the reference's, in nats.
        same_top: whether both think the same token most likely.
        squared_error: by attention module, of the difference of its outputs, and of the reference's outputs.
    """

    nats: list[Tensor] = field(default_factory=list)
    reference_nats: list[Tensor] = field(default_factory=list)
    divergence: list[Tensor] = field(default_factory=list)
    same_top: list[Tensor] = field(default_factory=list)
    squared_error: dict[str, Tensor] = field(default_factory=dict)

    def add(self, step: Step, reference: Step, targets: Tensor) -> None:
        """Count a step; ``targets`` int64 [tokens] are the tokens that follow."""
        rows = max(1, ELEMENTS_AT_ONCE // step.logits.shape[-1])
        for begin in range(0, len(targets), rows):
            part = slice(begin, begin + rows)
            self._add_predictions(step.logits[part], reference.logits[part], targets[part])
        for name, output in step.attention.items():
            exact = reference.attention[name].double()
            sums = torch.stack([(output.double() - exact).square().sum(), exact.square().sum()]).cpu()
            self.squared_error[name] = self.squared_error.get(name, torch.zeros(2, dtype=torch.float64)) + sums

    def _add_predictions(self, logits: Tensor, reference_logits: Tensor, targets: Tensor) -> None:
        log_p, exact = (F.log_softmax(x.double(), dim=-1) for x in (logits, reference_logits))
        self.nats.append(F.nll_loss(log_p, targets, reduction="none").cpu())
        self.reference_nats.append(F.nll_loss(exact, targets, reduction="none").cpu())
        # A token that the reference rules out (-inf) adds nothing.
        terms = torch.where(exact.isneginf(), 0.0, exact.exp() * (exact - log_p))
        self.divergence.append(terms.sum(-1).cpu())
        self.same_top.append((logits.argmax(-1) == reference_logits.argmax(-1)).cpu())

    def attention_errors(self) -> dict[str, float]:
        """By module: the norm of the difference of its outputs over the norm of the reference's."""
        return {name: math.sqrt(error / exact) for name, (error, exact) in self.squared_error.items() if exact > 0}
