"""The K cache of DeepSeek-V4: its layout, and the plain-PyTorch specification of writing and reading it.

A token has one K vector of HEAD_DIM channels, the same for all heads. Its first NOPE_DIM channels are e4m3 floats with
one power-of-two scale for each quantization block of QUANT_BLOCK channels. Its last ROPE_DIM channels, which carry the
rotary embedding, stay bfloat16. The cache is paged. A page holds ``block_size`` tokens: first the DATA_BYTES of each
token, then the SCALE_BYTES of each token:

    [block_size][NOPE_DIM e4m3 | ROPE_DIM bfloat16, little-endian]   [block_size][NUM_SCALES UE8M0 | 1 padding byte]

A scale byte ``s`` is UE8M0: the scale is ``2**(s - 127)``. It is the least power of two that keeps a quantization block
within the e4m3 range, ``2**ceil(log2(max(amax, MIN_AMAX) / 448))``. Dividing by it is exact; only e4m3 rounds. The
pages of a request may lie anywhere: ``block_table`` has one page number for every ``block_size`` positions. Slot ``n``
is token ``n % block_size`` of page ``n // block_size``.

The Triton kernels agree with these functions bit for bit, except that any NaN may stand for any other. They are
traceable: no Python depends on data. They trust their arguments; :mod:`kvcompile.kernels.deepseek_v4.ops` checks them.

Source: vLLM's kernels for DeepSeek-V4, vllm-project/vllm#42236 (arguments, layout and meaning); OCP Microscaling
Formats (MX) Specification 1.0 (E8M0).
"""

from __future__ import annotations

import torch
from torch import Tensor

NOPE_DIM = 448
ROPE_DIM = 64
HEAD_DIM = NOPE_DIM + ROPE_DIM
QUANT_BLOCK = 64
NUM_SCALES = NOPE_DIM // QUANT_BLOCK

DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = NUM_SCALES + 1
TOKEN_BYTES = DATA_BYTES + SCALE_BYTES

MIN_AMAX = 1e-4
"""The least magnitude that determines a scale. Quantization blocks of smaller numbers get its scale."""

E4M3_NAN = 0x7F
E8M0_NAN = 0xFF

# 448 is 1.75 * 2**8. The exponent of the scale is the exponent of amax minus 8, plus 1 if the mantissa of amax is above
# 1.75. In this case, and no other, adding MANTISSA_CARRY to the float32 pattern of amax carries into the exponent.
E4M3_MAX_EXPONENT = 8
MANTISSA_CARRY = (1 << 23) - 1 - (3 << 21)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize vectors to e4m3 with a UE8M0 scale per quantization block.

    A quantization block with a channel that is not finite becomes NaN as a whole: all its codes are E4M3_NAN, and its
    scale is E8M0_NAN. Zeros keep their sign. Magnitudes below half of the least e4m3 number times the scale become
    zero.

    Args:
        x: bfloat16 [..., NOPE_DIM].

    Returns:
        Codes uint8 [..., NOPE_DIM] and scale bytes uint8 [..., NUM_SCALES].
    """
    blocks = x.float().unflatten(-1, (NUM_SCALES, QUANT_BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    finite = amax.isfinite()
    amax = torch.where(finite, amax.clamp(min=MIN_AMAX), 1.0)
    scales = ((amax.view(torch.int32) + MANTISSA_CARRY) >> 23) - E4M3_MAX_EXPONENT
    inverse = ((254 - scales) << 23).view(torch.float32)
    codes = (blocks * inverse).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(finite, codes, E4M3_NAN).flatten(-2)
    return codes, torch.where(finite, scales, E8M0_NAN).squeeze(-1).to(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of :func:`quantize` up to the rounding to e4m3, defined for all bytes.

    The product of code and scale is exact in float32. Rounding it to bfloat16 changes only subnormal numbers and
    numbers that overflow to infinity. The scale byte 255 counts as infinity, the code E4M3_NAN as NaN.

    Args:
        codes: uint8 [..., NOPE_DIM].
        scales: uint8 [..., NUM_SCALES].

    Returns:
        bfloat16 [..., NOPE_DIM].
    """
    # The exponent field of a float32 holds 2**(s - 127), except that s = 0 is the subnormal 2**-127.
    scale = (scales.int() << 23).clamp(min=1 << 22).view(torch.float32)
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (NUM_SCALES, QUANT_BLOCK))
    return (values * scale[..., None]).flatten(-2).to(torch.bfloat16)


def quantize_and_insert_k_cache(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    """Quantize tokens and write each to its slot of the cache, in place.

    The padding byte of a token is written as 0. No other byte of the cache changes.

    Args:
        k: bfloat16 [num_tokens, HEAD_DIM], any strides. Tokens beyond ``num_slots`` are padding.
        k_cache: uint8 [num_blocks, block_size, TOKEN_BYTES] or [num_blocks, block_size * TOKEN_BYTES], each page
            contiguous; changed in place.
        slot_mapping: int32 or int64 [num_slots], the slot of each token. A token with a negative slot is not inserted.
            The other slots are distinct and less than ``num_blocks * block_size``.
        block_size: tokens of a page.
    """
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0 or k_cache.numel() == 0:
        return
    inserted = slot_mapping >= 0
    # Indexing cannot skip a token. A skipped token repeats the write of an inserted token: the same bytes to the same
    # slot. If no token is inserted, all of them write the bytes of slot 0 to slot 0.
    source = torch.where(inserted, torch.arange(num_tokens, device=k.device), inserted.int().argmax())
    inserted, slots = inserted[source, None], slot_mapping.long()[source].clamp(min=0)
    index = slots // block_size, slots % block_size
    codes, scales = quantize(k[:num_tokens, :NOPE_DIM])
    new_data = torch.cat([codes, bytes_of_bfloat16(k[:num_tokens, NOPE_DIM:])], -1)[source]
    new_scales = torch.nn.functional.pad(scales, (0, SCALE_BYTES - NUM_SCALES))[source]
    data, scale_section = _page_sections(k_cache, block_size)
    data.index_put_(index, torch.where(inserted, new_data, data[index]))
    scale_section.index_put_(index, torch.where(inserted, new_scales, scale_section[index]))


def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
) -> None:
    """Dequantize the last tokens of every request into ``out``, in place.

    ``out[r, offset + i]`` becomes token ``seq_lens[r] - gather_lens[r] + i`` of request ``r``, for ``i`` from 0 to
    ``gather_lens[r] - 1``. All other rows of ``out`` keep their values, and the pages of other tokens are not read.

    Args:
        out: bfloat16 [at least num_reqs, max_num_tokens, HEAD_DIM], any strides; changed in place.
        k_cache: as in :func:`quantize_and_insert_k_cache`.
        seq_lens: int32 or int64 [num_reqs], tokens of each request in the cache.
        gather_lens: int32 or int64 [num_reqs], how many of these tokens to gather, at most ``max_num_tokens - offset``.
            None gathers all tokens.
        block_table: int32 or int64 [at least num_reqs, max_blocks_per_seq], page numbers. Page numbers of positions
            that are not gathered may be anything.
        block_size: tokens of a page.
        offset: the first row of ``out`` that is written.
    """
    num_reqs = seq_lens.shape[0]
    rows = out[:num_reqs, offset:]
    if rows.numel() == 0 or k_cache.numel() == 0 or block_table.numel() == 0:
        return
    seq_lens = seq_lens.long()[:, None]
    gather_lens = seq_lens if gather_lens is None else gather_lens.long()[:, None]
    row = torch.arange(rows.shape[1], device=out.device)
    gathered = row < gather_lens
    position = torch.where(gathered, seq_lens - gather_lens + row, 0)
    page = torch.where(gathered, block_table[:num_reqs].long().gather(1, position // block_size), 0)
    index = page, position % block_size
    data, scales = (section[index] for section in _page_sections(k_cache, block_size))
    nope = dequantize(data[..., :NOPE_DIM], scales[..., :NUM_SCALES])
    tokens = torch.cat([nope, bfloat16_of_bytes(data[..., NOPE_DIM:])], -1)
    rows.copy_(torch.where(gathered[..., None], tokens, rows))


def _page_sections(k_cache: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Views of the two sections of all pages: [num_blocks, block_size, DATA_BYTES] and [..., SCALE_BYTES]."""
    pages = k_cache.view(k_cache.shape[0], block_size * TOKEN_BYTES)
    data, scales = pages.split([block_size * DATA_BYTES, block_size * SCALE_BYTES], dim=1)
    return data.unflatten(1, (block_size, DATA_BYTES)), scales.unflatten(1, (block_size, SCALE_BYTES))


def bytes_of_bfloat16(x: Tensor) -> Tensor:
    """bfloat16 [..., n] -> little-endian bytes, uint8 [..., 2 * n]."""
    bits = x.view(torch.int16).int()
    return torch.stack([bits & 0xFF, (bits >> 8) & 0xFF], -1).to(torch.uint8).flatten(-2)


def bfloat16_of_bytes(x: Tensor) -> Tensor:
    """Inverse of :func:`bytes_of_bfloat16`."""
    low, high = x.unflatten(-1, (-1, 2)).int().unbind(-1)
    return (low | (high << 8)).to(torch.int16).view(torch.bfloat16)
