"""Leftovers of earlier traces, which hold a cache and so prevent the swap of its tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

from torch import Tensor

from kvcompile.call.adoption import AdoptionError
from kvcompile.compat.tracing import forget_in_fake_modes


class Leftovers:
    """Drops what is left of earlier traces, once for a compiled graph, because the searches are slow.

    Garbage may hold a cache: after a graph break, Dynamo's first attempt at a frame is a reference cycle. The fake mode
    of an earlier trace may know a cache, as that of ``torch.export`` knows the buffers of its module.
    """

    def __init__(self) -> None:
        self._may_drop = True

    def retry(self, caches: Sequence[Tensor], work: Callable[[], object]) -> None:
        """Do ``work``; if one of ``caches`` cannot be swapped, drop what is left of earlier traces, and try again."""
        try:
            work()
        except AdoptionError:
            if not self._may_drop:
                raise
            self._may_drop = False
            gc.collect()
            forget_in_fake_modes(caches)
            work()
