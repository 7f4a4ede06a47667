"""The range of tokens that a bool mask shows to each query position.

A step computes the ranges once, and all its layers use them. Most of a static cache may be empty, and a sliding window
hides most of a long cache. Attention then visits only the visible range. If a range has no holes (causal masks,
padding, windows), attention does not read the mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.lang.triton import jit, tl

NOTHING = 1 << 30
"""The start of the range of a query position that sees no token."""


def visible_range(mask: Tensor) -> Tensor:
    """The ranges of tokens that a mask shows; the specification of the kernel.

    Args:
        mask: bool [batch, num_heads, q_len, kv_len], True where a query sees a token. Any of the first three sizes may
            be 1.

    Returns:
        int32 [batch, q_len, 3]: the first token that any head sees; the token after the last one that any head sees;
        and 1 if some head does not see all tokens between them, else 0. (NOTHING, 0, 0) for a position that sees no
        token.
    """
    seen = F.pad(mask.any(1), (0, 1))  # one more token, which is hidden: amin and amax need one
    token = torch.arange(seen.shape[-1], device=mask.device)
    begin = torch.where(seen, token, NOTHING).amin(-1)
    end = torch.where(seen, token + 1, 0).amax(-1)
    count = mask.sum((1, -1))
    holes = (end > 0) & (count < (end - begin) * mask.shape[1])
    return torch.stack([begin, end, holes.long()], dim=-1).int()


def with_four_dimensions(mask: Tensor, q_len: int, kv_len: int) -> Tensor:
    """The mask [batch or 1, num_heads or 1, q_len, kv_len] from a mask that broadcasts to this shape."""
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
    # A thread loads LOADED tokens at once and reduces them before it adds them to its sums, which thus stay few.
    LOADED: tl.constexpr = 16
    tokens = tl.arange(0, TOKENS // LOADED)[:, None] * LOADED + tl.arange(0, LOADED)[None, :]
    begin = tl.full([TOKENS // LOADED], 1 << 30, tl.int32)
    end = tl.full([TOKENS // LOADED], 0, tl.int32)
    count = tl.full([TOKENS // LOADED], 0, tl.int32)
    whole = kv_len // TOKENS * TOKENS  # loads without a bound are wide
    for head in range(num_heads):
        ptrs = mask_ptr + tl.cast(head, tl.int64) * mask_strides[1] + tokens.to(tl.int64) * mask_strides[3]
        for start in tl.range(0, whole, TOKENS, num_stages=3):
            token = start + tokens
            seen = tl.load(ptrs + tl.cast(start, tl.int64) * mask_strides[3]) != 0
            begin, end, count = _extended(begin, end, count, token, seen)
        if whole < kv_len:
            token = whole + tokens
            seen = tl.load(ptrs + whole.to(tl.int64) * mask_strides[3], mask=token < kv_len, other=0) != 0
            begin, end, count = _extended(begin, end, count, token, seen)
    first, last = tl.min(begin, 0), tl.max(end, 0)
    out_ptr += tl.program_id(0).to(tl.int64) * 3
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, last)
    tl.store(out_ptr + 2, ((last > 0) & (tl.sum(count, 0) < (last - first) * num_heads)).to(tl.int32))


@jit
def _extended(begin, end, count, token, seen):
    """The ranges and the number of visible tokens in each group of tokens, after another tile [groups, tokens]."""
    begin = tl.minimum(begin, tl.min(tl.where(seen, token, 1 << 30), 1))
    end = tl.maximum(end, tl.max(tl.where(seen, token + 1, 0), 1))
    return begin, end, count + tl.sum(seen.to(tl.int32), 1)


@jit
def visible_tokens(
    first_row, in_query, range_ptrs, q_len, kv_len,
    GROUP_SIZE: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The tokens that the rows of a program see.

    Args:
        first_row: the first of the ROWS query rows; GROUP_SIZE rows share a position.
        in_query: bool [ROWS], whether a row exists.
        range_ptrs: [ROWS], pointers to the ranges of the rows' positions; read only for a bool mask.

    Returns:
        (begin, end, all_begin, all_end): no row sees a token outside [begin, end), and every row sees all tokens of
        [all_begin, all_end). The second range is empty for a float mask, about which nothing is known.
        (row_begin, row_end, holes): the ranges of a bool mask, [ROWS] and [ROWS], and a scalar that is not 0 if any
        range has holes.
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
    """The number of tiles of ``tile_tokens`` tokens between the first and the last token that a sequence sees.

    The ranges of its ``q_len`` query positions, at most POSITIONS, are at ``range_ptr``.
    """
    position = tl.arange(0, POSITIONS)
    begin = tl.load(range_ptr + 3 * position, mask=position < q_len, other=1 << 30)
    end = tl.load(range_ptr + 3 * position + 1, mask=position < q_len, other=0)
    return tl.maximum(tl.cdiv(tl.max(end, 0), tile_tokens) - tl.min(begin, 0) // tile_tokens, 0)
