"""Put the new tokens of a prompt in the place of dequantized tokens, in Triton."""

from __future__ import annotations

from torch import Tensor

from kvcompile.kernels.lang.launcher import Launcher, ceil_div
from kvcompile.kernels.lang.rounding import finite_at
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.spec.new_tokens import NewTokens

TOKENS = 32
"""New tokens of a program."""


@jit(do_not_specialize=["first_pair", "num_kv_heads", "num_new", "num_tokens", "rows"])
def new_tokens_kernel(
    x_ptr, slots_ptr, out_ptr, x_strides, slot_strides, first_pair, num_kv_heads, num_new, num_tokens, rows,
    HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr, ROW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Copy new tokens of some KV heads. Grid (pairs, ceil(num_new / TOKENS)); a pair is a KV head of a sequence.

    Args:
        x_ptr: new tokens, any float dtype, strides (batch, head, token, channel).
        slots_ptr: int64, strides (batch, token): the row of the output for each new token.
        out_ptr: [pairs, rows, ROW], any float dtype.
        first_pair: the pair of the first program, ``batch * num_kv_heads + kv_head``.
        num_new: new tokens of a pair.
        num_tokens: tokens with a slot outside of 0 <= slot < num_tokens are skipped.
    """
    pair = tl.program_id(0) + first_pair
    batch = (pair // num_kv_heads).to(tl.int64)
    head = (pair % num_kv_heads).to(tl.int64)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    slot = tl.load(slots_ptr + batch * slot_strides[0] + token * slot_strides[1], mask=token < num_new, other=-1)
    channel = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    copied = ((slot >= 0) & (slot < num_tokens))[:, None] & (channel < HEAD_DIM)
    row_ptrs = x_ptr + batch * x_strides[0] + head * x_strides[1] + token * x_strides[2]
    x = tl.load(row_ptrs[:, None] + channel * x_strides[3], mask=copied, other=0.0).to(tl.float32)
    out_ptr += tl.program_id(0).to(tl.int64) * rows * ROW
    tl.store(out_ptr + slot[:, None] * ROW + channel, finite_at(out_ptr, x), mask=copied)


def put_new_tokens(out: Tensor, new: NewTokens, num_tokens: int, first_pair: int = 0) -> None:
    """:func:`kvcompile.kernels.spec.new_tokens.with_new_tokens` on a GPU, in place, for some KV heads.

    Args:
        out: dequantized tokens, contiguous [pairs, rows, channels], with at least ``num_tokens`` rows and ``head_dim``
            channels.
        new: the new tokens.
        num_tokens: the number of tokens in ``out``.
        first_pair: the index of the first pair of ``out`` among the KV heads of all sequences.
    """
    batch, num_kv_heads, num_new, head_dim = new.x.shape
    slots = new.slots.expand(batch, num_new)
    launch_new_tokens(
        (out.shape[0], ceil_div(num_new, TOKENS), 1),
        (new.x, slots, out),
        (new.x.stride(), slots.stride()),
        (first_pair, num_kv_heads, num_new, num_tokens, out.shape[1]),
        (head_dim, 1 << (head_dim - 1).bit_length(), out.shape[2], TOKENS),
        {"num_warps": 4},
    )


launch_new_tokens = Launcher(new_tokens_kernel, writes=("out_ptr",))
