"""Notes of refusals at inputs that cannot be divided into caches, for the sites that read them."""

from __future__ import annotations

from torch.fx import Node

from kvcompile.passes.refusal import Reason, Refusal

_KEY = "kvcompile_refusals"


def note_refusal(placeholder: Node, refusal: Refusal) -> None:
    """Note why ``placeholder`` stays one input. The refusal may lack the particulars of a site."""
    placeholder.meta.setdefault(_KEY, {})[refusal.reason] = refusal.with_traceback(None)


def noted_refusal(placeholder: Node, reason: Reason) -> Refusal | None:
    """The refusal with this ``reason`` that was noted for ``placeholder``."""
    notes: dict[Reason, Refusal] = placeholder.meta.get(_KEY, {})
    return notes.get(reason)
