"""Why an input of a graph was not divided into caches: noted where that is found, read where a site is refused."""

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
