"""Find out whether a mask may hide every key from a row of attention.

``F.scaled_dot_product_attention``, ``flex_attention`` and attention on packed caches give zeros for such a row. A
softmax that a model writes out divides zero by zero and gives NaN. A packed site then gives NaN, too, so that the model
can go on to drop or detect such rows.

NaN costs nothing if the graph shows that a mask is finite, as the masks of Transformers are. Otherwise a step reduces
each mask once for all layers that share it. Every output gets one selection, which compilers fuse with the next
operation. The kernels do not change.
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
