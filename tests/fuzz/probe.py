"""A program that is written by hand, for a fault that drawn programs reach rarely.

A probe is a ``drive`` as the fuzzer writes it (:mod:`fuzz.oracle`): it yields everything that must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzz.oracle import Drive, How, Outcome, compare

B, H, S, D = 2, 2, 9, 16


@dataclass(frozen=True)
class Probe:
    """A program and its fault.

    Attributes:
        fault: the title of the fault that it shows.
        drive: the program.
        how: how it runs.
    """

    fault: str
    drive: Drive = field(repr=False)
    how: How

    def run(self, **how: Any) -> Outcome:
        """Compare the packed and the plain run; the program is compiled anew."""
        torch._dynamo.reset()
        return compare(self.drive, How(**{**vars(self.how), **how}))


def collecting(probes: list[Probe], **how_of_all: Any) -> Callable[..., Callable[[Drive], Drive]]:
    """A decorator, with the title of a fault, that adds a probe of a ``drive`` to ``probes``."""

    def shows(fault: str, **how: Any) -> Callable[[Drive], Drive]:
        def add(drive: Drive) -> Drive:
            probes.append(Probe(fault, drive, How(**{"operators": True, "dynamic": False, **how_of_all, **how})))
            return drive

        return add

    return shows


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1], **more)


def tokens(new: Any, count: int = 1, heads: int = H, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of new tokens."""
    return new(batch, heads, count, D), new(batch, H, count, D), new(batch, H, count, D)


def caches(new: Any, count: int = 2, tokens: int = S) -> list[Tensor]:
    return [new(B, H, tokens, D) for _ in range(count)]
