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

from kvcompile.kernels.layout.axes import BLOCK_AXES, SLOT_AXES
from kvcompile.passes.calling import InputAction


def asks_for_written(action: InputAction) -> bool:
    """Whether packing the plain cache of ``action`` uses the number of its written tokens, and a call can know it."""
    in_slots = action.axes in (SLOT_AXES, *BLOCK_AXES)
    return action.first_position is not None and action.layout.residual is not None and not in_slots


def num_written(action: InputAction, num_tokens: int, args: Sequence[Any]) -> Tensor | None:
    """How many tokens of a plain cache are written before a call: int64 [] or [batch], 0 where this is not known.

    None if packing the cache does not use the number, or if no call can know it.

    Args:
        action: the duty for the cache.
        num_tokens: the size of the cache.
        args: the inputs of the call. Positions are no parts of stacks, so stacks may be whole.
    """
    first_position = action.first_position
    return first_position(args, num_tokens) if first_position is not None and asks_for_written(action) else None
