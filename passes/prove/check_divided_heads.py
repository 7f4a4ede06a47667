"""Refuse sites whose caches had heads and channels in one dimension, if later passes see them in another order.

The caller's tensor keeps all heads of a token in its last dimension. Its order must thus end in heads and channels.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcompile.passes.canonical.divide_last import Divided
from kvcompile.passes.prove.candidate import Candidate
from kvcompile.passes.prove.reads import channels_not_last


def check_divided_heads(candidates: Sequence[Candidate], divided: Divided) -> None:
    """Refuse each accepted site with a cache in ``divided`` whose order does not end in heads and channels."""
    changed = {*divided.inputs, *divided.outputs.values()}
    for candidate in candidates:
        caches = candidate.caches if candidate.accepted else ()
        for cache in caches:
            if (cache.base in changed or cache.returned in changed) and not cache.axes.endswith("hd"):
                candidate.site.refuse(channels_not_last(cache.base, cache.role, "several heads"))
                break
