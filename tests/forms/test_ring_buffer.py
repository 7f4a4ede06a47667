"""A ring buffer of a hand-written model is a packed cache. Its positions wrap, and the model makes the mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor

from kvcompile import last_report
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, SLOTS = 2, 4, 2, 64, 70

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")

Write = Callable[[Tensor, Tensor, int], None]
"""Writes vectors [batch, heads, n, head_dim] from a position on."""


def assign_at_positions(ring: Tensor, x: Tensor, position: int) -> None:
    ring[:, torch.arange(position, position + x.shape[2]) % SLOTS] = x.transpose(1, 2)


def copy_to_positions(ring: Tensor, x: Tensor, position: int) -> None:
    ring.index_copy_(2, torch.arange(position, position + x.shape[2]) % SLOTS, x)


def copy_up_to_the_end_and_then_the_rest(ring: Tensor, x: Tensor, position: int) -> None:
    first = position % SLOTS
    n = min(x.shape[2], SLOTS - first)
    ring[:, :, first : first + n] = x[:, :, :n]
    if n < x.shape[2]:
        ring[:, :, : x.shape[2] - n] = x[:, :, n:]


def visible(position: int, q_len: int) -> Tensor:
    """The slots that the queries from ``position`` on may see, bool [q_len, SLOTS]."""
    query = torch.arange(position, position + q_len)[:, None]
    last = position + q_len - 1
    held = last - (last - torch.arange(SLOTS)) % SLOTS
    return (held <= query) & (held > query - SLOTS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("write", "axes", "policy"),
    [
        (assign_at_positions, "bthd", "int8_per_token_head"),
        (copy_to_positions, "bhtd", "int4"),  # keys with scales per channel, whose blocks are written repeatedly
        (copy_up_to_the_end_and_then_the_rest, "bhtd", "turboquant_4bit_nc"),
    ],
)
def test_a_ring_buffer_is_written_packed_where_it_wraps_and_read_as_a_whole(
    write: Write, axes: str, policy: str
) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
        write(keys, k, position)
        write(values, v, position)
        read = (x.transpose(1, 2) if axes == "bthd" else x for x in (keys, values))
        return F.scaled_dot_product_attention(q, *read, attn_mask=visible(position, q.shape[2]), enable_gqa=True)

    formats = Policy.load(policy).formats_for("", 0, 1)
    assert formats is not None
    sizes = {"b": BATCH, "h": NUM_KV_HEADS, "t": SLOTS, "d": HEAD_DIM}
    shape = [sizes[axis] for axis in axes]
    keys, values = torch.randn(shape), torch.randn(shape)
    expected = [
        PackedTensor.from_dense(x, formats.layout(role, HEAD_DIM, x.dtype), axes)
        for x, role in ((keys, "key"), (values, "value"))
    ]
    compiled = torch.compile(
        step, backend="kvquant", options={"policy": reading_packed(policy), "on_unsupported": "error"}
    )
    position = 3 * SLOTS - 2
    for tokens in (1, 5):  # up to the last slot but one, and past the end
        q = torch.randn(BATCH, NUM_HEADS, tokens, HEAD_DIM)
        k, v = torch.randn(2, BATCH, NUM_KV_HEADS, tokens, HEAD_DIM).unbind()
        out = compiled(q, k, v, keys, values, position)
        torch.testing.assert_close(out, step(q, k, v, *expected, position), rtol=1e-4, atol=1e-5)
        for ring, other in zip((keys, values), expected, strict=True):
            assert isinstance(ring, PackedTensor)
            assert torch.equal(ring.dequantize(), other.dequantize())
        position += tokens
    assert {cache.kind for cache in last_report().sites[0].caches} == {"static"}
