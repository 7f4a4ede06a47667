"""Note why an input cannot be divided into caches, where that is found; the refusal of a site takes the reason."""

from __future__ import annotations

from torch.fx import Node

from kvcompile.passes.refusal import Refusal

_KEY = "kvcompile_refusal"


def note_refusal(placeholder: Node, refusal: Refusal) -> None:
    """Note why ``placeholder`` stays one input. The refusal need not know a site."""
    placeholder.meta[_KEY] = refusal.with_traceback(None)


def noted_refusal(placeholder: Node) -> Refusal | None:
    """The refusal that was noted for ``placeholder``."""
    refusal: Refusal | None = placeholder.meta.get(_KEY)
    return refusal
