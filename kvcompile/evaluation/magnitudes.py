"""The largest keys and values of each layer, from which static scales follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import listen
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.site import Site
from kvcompile.policy.static_scales import Numbers


def largest_magnitudes(
    model: Any,
    windows: Tensor,
    on_progress: Callable[[str, int, int], None] = lambda doing, done, total: None,
    on_window: Callable[[Numbers], None] = lambda largest: None,
) -> Numbers:
    """The largest magnitude of the keys and the values of every module that computes attention.

    Args:
        model: a Hugging Face causal language model.
        windows: int64 [num_windows, n], the tokens that the model reads.
        on_progress: called with a description, the number of finished windows, and the number of all windows.
        on_window: called after each window with the magnitudes so far.

    Raises:
        EvaluationError: a key or value is not finite.
    """
    largest: Numbers = {}

    def look(site: Site, call: AttentionCall) -> None:
        operands: tuple[tuple[Role, Tensor], ...] = (("key", call.key), ("value", call.value))
        for role, x in operands:
            if not x.isfinite().all():
                place = site.module or "attention at top level"
                raise EvaluationError(f"{place}: its {role}s are not finite; give a --dtype with a larger range")
            known = largest.setdefault(site.module, {})
            known[role] = max(known.get(role, 0.0), x.abs().max().item())

    for done, window in enumerate(windows):
        on_progress("reading", done, len(windows))
        listen(model, window, look)
        on_window({module: dict(sizes) for module, sizes in largest.items()})
    return largest
