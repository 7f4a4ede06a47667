"""Write tokens into a packed cache in Triton: rotate, quantize and pack in one pass, one kernel for every format."""

from __future__ import annotations

from kvcompile.kernels.codec import hadamard, halves, jit, tl


@jit(do_not_specialize=["num_kv_heads", "num_tokens", "num_slots"])
def store_kernel(
    data_ptr, x_ptr, positions_ptr, valid_ptr, data_strides, x_strides, position_strides, valid_strides,
    num_kv_heads, num_tokens, num_slots,
    OPERAND: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens of one head. Grid (ceil(num_tokens / TOKENS) * batch * num_kv_heads,).

    Args:
        data_ptr: packed data, uint8, strides (block, batch, head) in bytes; changed in place.
        x_ptr: [batch, num_kv_heads, num_tokens, head_dim], any float dtype, strides (batch, head, token, channel).
        positions_ptr: int64 [batch, num_tokens], strides (batch, token). A position outside [0, num_slots) fails an
            assertion, as in the indexing kernels of PyTorch, and reaches no memory.
        valid_ptr: with HAS_VALID uint8 [batch, num_tokens]; 0: the token is not written.
    """
    num_tiles = tl.cdiv(num_tokens, TOKENS)
    batch = (tl.program_id(0) // num_tiles // num_kv_heads).to(tl.int64)
    head = (tl.program_id(0) // num_tiles % num_kv_heads).to(tl.int64)
    token = ((tl.program_id(0) % num_tiles) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    in_bounds = token < num_tokens
    wanted = in_bounds
    if HAS_VALID:
        valid_ptrs = valid_ptr + batch * valid_strides[0] + token * valid_strides[1]
        wanted = wanted & (tl.load(valid_ptrs, mask=in_bounds, other=0) != 0)
    position = tl.load(positions_ptr + batch * position_strides[0] + token * position_strides[1], mask=wanted, other=0)
    in_cache = (position >= 0) & (position < num_slots)
    tl.device_assert(in_cache, "kvcompile::store: a position is outside of the cache")
    written = wanted & in_cache

    channel = tl.arange(0, OPERAND.padded_head_dim)[None, :]
    in_head = channel < OPERAND.head_dim
    x_ptrs = x_ptr + batch * x_strides[0] + head * x_strides[1] + (token * x_strides[2])[:, None]
    x = tl.load(x_ptrs + channel * x_strides[3], mask=written[:, None] & in_head, other=0.0).to(tl.float32)
    if OPERAND.rotated:
        x = hadamard(x, OPERAND.head_dim)
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) != 0
    codes, scale, zero = OPERAND.codec.encode(tl.where(finite[:, None], x, 0.0), in_head, OPERAND)
    scale = tl.where(finite, scale, float("nan"))
    if OPERAND.channels_per_byte == 2:
        low, high = halves(codes, OPERAND.head_dim, OPERAND.padded_width)
        codes = low | (high << 4)

    slot = position % OPERAND.block_tokens
    data_ptr += batch * data_strides[1] + head * data_strides[2]
    block_ptrs = data_ptr + (position // OPERAND.block_tokens) * data_strides[0]
    byte = tl.arange(0, OPERAND.padded_width)
    if OPERAND.column_major:
        code_ptrs = (block_ptrs + slot)[:, None] + (byte * OPERAND.block_tokens)[None, :]
    else:
        code_ptrs = (block_ptrs + slot * OPERAND.width)[:, None] + byte[None, :]
    tl.store(code_ptrs, codes.to(tl.uint8), mask=written[:, None] & (byte < OPERAND.width)[None, :])
    scale_ptrs = (block_ptrs + OPERAND.scale_offset).to(tl.pointer_type(OPERAND.scale_dtype)) + slot
    tl.store(scale_ptrs, scale.to(OPERAND.scale_dtype), mask=written)
    if OPERAND.has_zero:
        zero_ptrs = (block_ptrs + OPERAND.zero_offset).to(tl.pointer_type(OPERAND.zero_dtype)) + slot
        tl.store(zero_ptrs, zero.to(OPERAND.zero_dtype), mask=written)
