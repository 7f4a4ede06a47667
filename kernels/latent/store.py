"""Write tokens to a packed cache of latents in Triton: one kernel rounds, quantizes and packs them."""

from __future__ import annotations

from kvcompile.kernels.deepseek_v4.tiles import DATA_BYTES, SCALE_BYTES, insert_tokens
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.layout.references import referred
from kvcompile.kernels.store.tokens import load_positions


@jit(do_not_specialize=["num_kv_heads", "num_tokens", "capacity"])
def store_latents_kernel(
    data_ptr, x_ptr, positions_ptr, valid_ptr, data_strides, x_strides, position_strides, valid_strides,
    num_kv_heads, num_tokens, capacity, LATENT: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens of one head. Grid (ceil(num_tokens / TOKENS) * batch * num_kv_heads,).

    Programs write disjoint bytes, because the positions of a sequence are distinct, and read no byte that is written.

    Args:
        data_ptr: packed data, uint8, strides (block, batch, head) in bytes; changed in place.
        x_ptr: [batch, num_kv_heads, num_tokens, LATENT.head_dim], strides (batch, head, token, channel): int16 patterns
            of bfloat16, or other floats.
        positions_ptr, valid_ptr, capacity: as in :func:`kvcompile.kernels.store.tokens.store_kernel`.
    """
    tiles_of_head = tl.cdiv(num_tokens, TOKENS)
    head_of_batch = tl.program_id(0) // tiles_of_head
    batch = (head_of_batch // num_kv_heads).to(tl.int64)
    head = (head_of_batch % num_kv_heads).to(tl.int64)
    token = (tl.program_id(0) % tiles_of_head * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    position, written = load_positions(
        positions_ptr, valid_ptr, batch, token, position_strides, valid_strides, num_tokens, capacity, HAS_VALID
    )
    position = tl.where(written, position, 0)
    block_ptr = referred(data_ptr, LATENT) + batch * data_strides[1] + head * data_strides[2]
    block_ptrs = block_ptr + position // LATENT.block_tokens * data_strides[0]
    row = position % LATENT.block_tokens
    data_ptrs = block_ptrs + row * DATA_BYTES
    scale_ptrs = block_ptrs + LATENT.block_tokens * DATA_BYTES + row * SCALE_BYTES
    x_ptrs = x_ptr + batch * x_strides[0] + head * x_strides[1] + token * x_strides[2]
    insert_tokens(
        data_ptrs[:, None, None], scale_ptrs[:, None, None], x_ptrs[:, None, None], x_strides[3],
        written[:, None, None], LATENT.hardware_fp8,
    )  # fmt: skip
