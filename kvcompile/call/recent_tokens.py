"""The recent blocks of a plain cache that holds arbitrary values after its written tokens.

A layout with a residual keeps the blocks written last in full precision. In a cache that was made of zeros and filled
from its start, these blocks end with the last nonzero token. A cache from ``torch.empty`` has arbitrary values after
the written tokens, so its last block would be kept instead of the block that is being filled. If keys share scales
within a block, arbitrary values in the free slots of the block that is being filled would then round away its written
tokens. The first position that the call writes shows where the written tokens end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvcompile.kernels.layout.axes import BLOCK_AXES, SLOT_AXES
from kvcompile.passes.calling import InputAction


def asks_for_written(action: InputAction) -> bool:
    """Whether packing the plain cache of ``action`` needs the number of written tokens, and a call can know it."""
    in_slots = action.axes in (SLOT_AXES, *BLOCK_AXES)
    return action.first_position is not None and action.layout.residual is not None and not in_slots


def num_written(action: InputAction, num_tokens: int, args: Sequence[Any]) -> Tensor | None:
    """The number of tokens written to a plain cache before a call: int64 [] or [batch], 0 where it is not known.

    The result is None if packing the cache does not need the number, or if no call can know it.

    Args:
        action: the action for the cache.
        num_tokens: the size of the cache.
        args: the inputs of the call. Stacks may be whole, because positions are never parts of stacks.
    """
    first_position = action.first_position
    return first_position(args, num_tokens) if first_position is not None and asks_for_written(action) else None
