"""What a bool mask shows, as a range of tokens for every query position: computed once a step, used by all layers.

A static cache is mostly not yet filled, and a sliding window hides most of a long one. With the ranges known, attention
visits only what is visible, and where a range has no holes (causal masks, padding, windows) it does not read the mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.lang.triton import jit, tl

NOTHING = 1 << 30
"""Begin of the range of a query position that sees nothing."""


def visible_range(mask: Tensor) -> Tensor:
    """Ranges of tokens that a mask shows, the specification of the kernel.

    Args:
        mask: bool [batch, num_heads, q_len, kv_len], True where a query sees a token; any of the first three may be 1.

    Returns:
        int32 [batch, q_len, 3]: the first token that any head sees, the one after the last, and 1 if some head does not
        see all tokens between them, else 0. (NOTHING, 0, 0) where nothing is visible.
    """
    seen = F.pad(mask.any(1), (0, 1))  # one token that nobody sees: there is a least and a greatest of no tokens, too
    token = torch.arange(seen.shape[-1], device=mask.device)
    begin = torch.where(seen, token, NOTHING).amin(-1)
    end = torch.where(seen, token + 1, 0).amax(-1)
    count = mask.sum((1, -1))
    holes = (end > 0) & (count < (end - begin) * mask.shape[1])
    return torch.stack([begin, end, holes.long()], dim=-1).int()


def with_four_dimensions(mask: Tensor, q_len: int, kv_len: int) -> Tensor:
    """A mask of scores, [batch or 1, num_heads or 1, q_len, kv_len], from one that only broadcasts to that."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    return mask.expand(*mask.shape[:2], q_len, kv_len)


@jit(do_not_specialize=["q_len", "kv_len", "num_heads"])
def visible_range_kernel(mask_ptr, out_ptr, mask_strides, q_len, kv_len, num_heads, TOKENS: tl.constexpr):
    """One program: one query position of one sequence. Grid (batch * q_len,).

    Args:
        mask_ptr: uint8 [batch, num_heads, q_len, kv_len], any strides.
        out_ptr: int32 [batch, q_len, 3].
    """
    batch = (tl.program_id(0) // q_len).to(tl.int64)
    position = (tl.program_id(0) % q_len).to(tl.int64)
    mask_ptr += batch * mask_strides[0] + position * mask_strides[2]
    begin = tl.full([TOKENS], 1 << 30, tl.int32)
    end = tl.full([TOKENS], 0, tl.int32)
    count = tl.full([TOKENS], 0, tl.int32)
    for _ in range(num_heads):
        for start in range(0, kv_len, TOKENS):
            token = start + tl.arange(0, TOKENS)
            ptrs = mask_ptr + token.to(tl.int64) * mask_strides[3]
            seen = tl.load(ptrs, mask=token < kv_len, other=0) != 0
            begin = tl.minimum(begin, tl.where(seen, token, 1 << 30))
            end = tl.maximum(end, tl.where(seen, token + 1, 0))
            count += seen.to(tl.int32)
        mask_ptr += mask_strides[1]
    first, last = tl.min(begin, 0), tl.max(end, 0)
    out_ptr += tl.program_id(0).to(tl.int64) * 3
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, last)
    tl.store(out_ptr + 2, ((last > 0) & (tl.sum(count, 0) < (last - first) * num_heads)).to(tl.int32))


@jit
def visible_tokens(
    first_row, in_query, range_ptrs, q_len, kv_len,
    GROUP_SIZE: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What the rows of a program see.

    Args:
        first_row: of the ROWS query rows, GROUP_SIZE to a position.
        in_query: bool [ROWS].
        range_ptrs: [ROWS], with a bool mask the ranges of the rows' positions.

    Returns:
        (begin, end, all_begin, all_end): no row sees a token outside [begin, end), and all rows see those of
        [all_begin, all_end), of which nothing is known under a float mask;
        (row_begin, row_end, holes): [ROWS], [ROWS] and a scalar, of a bool mask.
    """
    begin, end = 0, kv_len
    all_begin, all_end = 0, kv_len
    row_begin, row_end, holes = 0, 0, 0
    if IS_CAUSAL:
        end = min(kv_len, min((first_row + ROWS - 1) // GROUP_SIZE, q_len - 1) + 1)
        all_end = min(kv_len, first_row // GROUP_SIZE + 1)
    if MASK == "bool":
        row_begin = tl.load(range_ptrs, mask=in_query, other=1 << 30)
        row_end = tl.load(range_ptrs + 1, mask=in_query, other=0)
        holes = tl.max(tl.load(range_ptrs + 2, mask=in_query, other=0), 0)
        begin = tl.min(row_begin, 0)
        end = tl.minimum(end, tl.max(row_end, 0))
        all_begin = tl.max(tl.where(in_query, row_begin, 0), 0)
        all_end = tl.minimum(all_end, tl.min(tl.where(in_query, row_end, 1 << 30), 0))
        all_end = tl.where(holes != 0, 0, all_end)
    elif MASK == "float":
        all_end = 0
    return (begin, end, all_begin, all_end), (row_begin, row_end, holes)


@jit
def num_visible_tiles(range_ptr, q_len, tile_tokens, POSITIONS: tl.constexpr):
    """Tiles of ``tile_tokens`` tokens from the first that any of the ``q_len``, at most POSITIONS, query positions of a
    sequence sees to the last one; their ranges are at ``range_ptr``."""
    position = tl.arange(0, POSITIONS)
    begin = tl.load(range_ptr + 3 * position, mask=position < q_len, other=1 << 30)
    end = tl.load(range_ptr + 3 * position + 1, mask=position < q_len, other=0)
    return tl.maximum(tl.cdiv(tl.max(end, 0), tile_tokens) - tl.min(begin, 0) // tile_tokens, 0)
