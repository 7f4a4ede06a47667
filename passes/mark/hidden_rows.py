"""Rows of attention from which every key is hidden: whether there may be some, and what becomes of them.

``F.scaled_dot_product_attention``, ``flex_attention`` and attention on packed caches give zeros there. A softmax that a
model writes out divides zero by zero and gives NaN, and NaN is what a packed site gives then, too: what a model does
with such rows (drop them, look for them, spread them) stays its own affair.

It costs little, and nothing where the graph shows that a mask is finite, as Transformers makes its own: a reduction of
the mask, once a step for all layers that share it, and one selection of every output, which compilers fuse with what
follows. The kernels know nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcompile.passes.mark.values import Add, BiasStep, Fill, Floor


def may_hide_rows(steps: Sequence[BiasStep]) -> bool:
    """Whether the steps may give the score -inf to all keys of a row."""
    lowest = 0.0
    for step in steps:
        if isinstance(step, Add):
            lowest -= abs(step.factor) * step.bound
        elif isinstance(step, Fill):
            lowest = min(lowest, step.value)
        elif isinstance(step, Floor):
            lowest = max(lowest, step.value)
        elif lowest < 0:
            lowest = -torch.inf  # the factor may be any number
    return lowest < torch.finfo(torch.float32).min
