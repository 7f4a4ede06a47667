"""The recent blocks of a plain cache that holds arbitrary values after its written tokens.

A layout with a residual keeps the blocks written last in full precision. When a cache of zeros is packed that was
filled from its start, these blocks end with the last token that is not zero. A cache from ``torch.empty`` has values
after the written tokens, so its last block would be kept in place of the block that is being filled. If the keys of
that block share their scales, the values in its free slots would then round the written tokens away. The first position
that the call writes tells where the written tokens end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvcompile.kernels.layout.axes import BLOCK_AXES, SLOT_AXES, divided, divided_axes, heads_first
from kvcompile.kernels.spec.residual import header_of
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.calling import InputAction

Headers = list[tuple[int, Tensor]]
"""The headers of caches, by the number of the input."""


def headers_of(caches: Sequence[InputAction], args: Sequence[Any]) -> Headers:
    """The headers of the caches among ``args`` that are still plain and have a residual.

    Caches are left out if the call does not know the first position that it writes.
    """
    static = [action for action in caches if action.kind == "static"]
    return [(action.index, header) for action in static if (header := header_of_plain(action, args)) is not None]


def put_headers(args: Sequence[Any], headers: Headers) -> None:
    """Put headers into the caches, which are packed now."""
    for index, header in headers:
        put_header(args[index], header)


def put_header(cache: PackedTensor, header: Tensor) -> None:
    """Replace the header of a packed cache."""
    cache.packed[: header.shape[0]].copy_(header)


def header_of_plain(action: InputAction, args: Sequence[Any]) -> Tensor | None:
    """The header of a cache among ``args``; None if it is packed, has no residual, or its length is not known."""
    plain, layout = args[action.index], action.layout
    if isinstance(plain, PackedSubclass) or layout.residual is None:
        return None
    if action.first_position is None or action.axes in (SLOT_AXES, *BLOCK_AXES):
        return None
    x = heads_first(divided(plain.detach(), action.axes, layout.head_dim), divided_axes(action.axes))
    return header_of(layout, x, action.first_position(args, x.shape[2]))
