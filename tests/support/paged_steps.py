"""Steps of hand-written models with paged caches, their pools, and the arguments of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.tensor import PackedTensor

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 4, 2, 64, 16, 37
POLICY = "int8_per_token_head"


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def slots_of(block_table: Tensor) -> Tensor:
    """The slots of all tokens, [batch, tokens], from a block table, [batch, blocks]."""
    return (block_table[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=block_table.device)).flatten(1)


Step = Callable[..., Tensor]


def index_copy_and_index(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys.index_copy_(0, slots.flatten(), k.flatten(0, 1))
    values.index_copy_(0, slots.flatten(), v.flatten(0, 1))
    read = slots_of(table)
    return attend(q, keys[read].transpose(1, 2), values[read].transpose(1, 2), mask)


def assignment_and_index_select(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys[slots], values[slots] = k, v
    read = slots_of(table)
    gathered = (x.index_select(0, read.flatten()).view(*read.shape, -1, HEAD_DIM) for x in (keys, values))
    return attend(q, *(x.transpose(1, 2) for x in gathered), mask)


def repeated_heads_and_other_dtype(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys.index_put_((slots - keys.shape[0],), k), values.index_put_((slots,), v)
    read = slots_of(table)
    groups = q.shape[1] // keys.shape[1]
    k, v = (x[read].double().transpose(1, 2).repeat_interleave(groups, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask).to(q.dtype)


def written_out_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys[slots], values[slots] = k, v
    read = slots_of(table)
    groups = q.shape[1] // keys.shape[1]
    k, v = (x[read].repeat_interleave(groups, 2) for x in (keys, values))
    scores = torch.einsum("bhqd,bthd->bhqt", q, k) * HEAD_DIM**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhqt,bthd->bhqd", weights, v)


def all_sequences_as_one(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    """Continuous batching: the queries of all sequences in one row, and a mask with one block for each sequence."""
    keys[slots], values[slots] = k, v
    batch, num_heads, q_len, _ = q.shape
    read = slots_of(table).flatten()
    own = torch.eye(batch, dtype=torch.bool)[:, None, :, None]
    mask = (mask[:, 0, :, None] & own).reshape(batch * q_len, -1)
    gathered = (x.index_select(0, read).transpose(0, 1)[None] for x in (keys, values))
    out = attend(q.transpose(0, 1).reshape(1, num_heads, -1, HEAD_DIM), *gathered, mask)
    return out.view(num_heads, batch, q_len, HEAD_DIM).transpose(0, 1)


def blocks_viewed_as_slots(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys.view(-1, *keys.shape[2:]).index_copy_(0, slots.flatten(), k.flatten(0, 1))
    values.flatten(0, 1)[slots] = v
    k, v = (x[table].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    return attend(q, k, v, mask)


def blocks_and_offsets(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    keys[block, offset] = k
    values[block - values.shape[0], offset - BLOCK_SIZE] = v
    gathered = (x.index_select(0, table.flatten()).view(table.shape[0], -1, *x.shape[2:]) for x in (keys, values))
    return attend(q, *(x.transpose(1, 2) for x in gathered), mask)


def blocks_of_which_the_first_tokens_are_read(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = k
    values[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = v
    read = 2 * BLOCK_SIZE + 5
    k, v = (x[table.int()].permute(0, 3, 1, 2, 4).flatten(2, 3)[:, :, :read] for x in (keys, values))
    return attend(q, k, v, mask[..., :read])


def heads_before_tokens(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    keys[block, :, offset] = k
    values[block - values.shape[0], :, offset - BLOCK_SIZE] = v
    k = keys[table].permute(0, 2, 1, 3, 4).flatten(2, 3)
    read = slots_of(table)
    return attend(q, k, values[read // BLOCK_SIZE, :, read % BLOCK_SIZE].transpose(1, 2), mask)


def heads_before_tokens_exchanged(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    keys.transpose(1, 2)[block, offset] = k
    values.permute(0, 2, 1, 3).index_put_((block, offset), v)
    k = keys.transpose(1, 2)[table].flatten(1, 2).transpose(1, 2)
    v = values.index_select(0, table.flatten()).unflatten(0, table.shape).transpose(1, 2).flatten(2, 3)
    return attend(q, k, v, mask)


FORMS: dict[Step, str] = {
    index_copy_and_index: "slots",
    assignment_and_index_select: "slots",
    repeated_heads_and_other_dtype: "slots",
    written_out_attention: "slots",
    all_sequences_as_one: "slots",
    blocks_viewed_as_slots: "blocks",
    blocks_and_offsets: "blocks",
    blocks_of_which_the_first_tokens_are_read: "blocks",
    heads_before_tokens: "blocks with heads first",
    heads_before_tokens_exchanged: "blocks with heads first",
}
"""Ways to write and read paged caches, with the shapes of their pools."""

_SHAPES = {
    "slots": (NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM),
    "blocks": (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM),
    "blocks with heads first": (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM),
}


def plain_pools(fn: Step, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(_SHAPES[FORMS[fn]], device=device) for _ in range(2))


def packed_pool(x: Tensor, role: str, format_name: str = POLICY) -> PackedPool | PackedTensor:
    layout = PackedLayout(format_name, role, x.shape[-1])
    if x.dim() == 3:
        return PackedTensor.from_dense(x, layout, "thd")
    return PackedPool.from_dense(x, layout, heads_first=x.shape == _SHAPES["blocks with heads first"])


def reference_pools(pools: tuple[Tensor, Tensor], format_name: str = POLICY) -> list[Any]:
    return [packed_pool(x.clone(), role, format_name) for x, role in zip(pools, ("key", "value"), strict=True)]


def inputs(q_len: int, num_blocks: int, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """Query, keys and values of new tokens; slot mapping, block table and mask.

    A row of the block table is padded with block 0, which other sequences use.
    """
    q = torch.randn(BATCH, NUM_HEADS, q_len, HEAD_DIM)
    k, v = torch.randn(2, BATCH, q_len, NUM_KV_HEADS, HEAD_DIM).unbind()
    table = 1 + torch.randperm(NUM_BLOCKS - 1)[: BATCH * num_blocks].view(BATCH, num_blocks)
    first = torch.tensor([[BLOCK_SIZE + 3], [num_blocks * BLOCK_SIZE - q_len - 2]])
    positions = first + torch.arange(q_len)
    slots = table.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    table[0, 1 + (BLOCK_SIZE + 3 + q_len) // BLOCK_SIZE :] = 0
    mask = (torch.arange(num_blocks * BLOCK_SIZE) <= positions[:, :, None])[:, None]
    return [x.to(device) for x in (q, k, v)], [x.to(device) for x in (slots, table, mask)]


def compiled(
    fn: Step, policy: Any = POLICY, on_unsupported: str = "error", options: dict[str, Any] | None = None, **kwargs: Any
) -> Step:
    torch._dynamo.reset()
    options = {"policy": policy, "on_unsupported": on_unsupported, **(options or {})}
    return torch.compile(fn, backend="kvquant", fullgraph=True, options=options, **kwargs)


def assert_close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
