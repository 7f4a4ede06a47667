"""Launch prefill attention: dequantize the tokens that queries see, then run flash attention on them.

New tokens of the call replace their dequantized values.

On Hopper and later GPUs cuDNN serves long prompts without a mask, or with a causal one. It reaches 593 TFLOP/s on an
H200. The Triton kernel of :mod:`kvcompile.kernels.attention.prefill`, which serves all other calls, reaches 487.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.compat.attention import cudnn_attention, cudnn_serves
from kvcompile.kernels.attention.call import AttentionCall, Source
from kvcompile.kernels.attention.dequantize import dequantize_kernel
from kvcompile.kernels.attention.new_tokens import put_new_tokens
from kvcompile.kernels.attention.prefill import prefill_attention_kernel
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import Launcher, blocks_per_program, ceil_div, precision
from kvcompile.kernels.lang.triton import INTERPRETED
from kvcompile.kernels.layout.operand import PackedOperand
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.kernels.layout.references import strides_of

PREFILL_ROWS = 128
"""The least number of query rows of a KV head (its query heads times q_len) for which tokens are dequantized first."""

SCRATCH_NBYTES = 1 << 29
"""The most bytes of dequantized tokens that exist at a time, unless a single KV head needs more."""


CUDNN_FLOPS = 4e12
"""The least number of operations for cuDNN. It plans a new shape in 46 ms, a time that 32 layers of this size save."""


@dataclass(frozen=True)
class PrefillConfig:
    """The launch configuration of prefill: query rows of a program, tokens of a tile, warps, and tiles loaded ahead.

    The tokens of a tile divide BLOCK_TOKENS.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int

    def shared_memory(self, padded_head_dim: int, itemsize: int = 2) -> int:
        """The bytes of shared memory that Triton uses before Hopper: queries, tiles that are loaded ahead, weights."""
        vectors = self.rows + 2 * self.tokens * max(1, self.num_stages - 1)
        return itemsize * (vectors * padded_head_dim + self.rows * self.tokens)


HOPPER = PrefillConfig(128, 64, 8, 3)
HOPPER_WIDE = PrefillConfig(128, 64, 8, 2)
"""For a head_dim of more than 128 channels."""
HOPPER_WIDEST = PrefillConfig(64, 32, 8, 2)
"""For a head_dim of more than 256 channels."""

PORTABLE = (PrefillConfig(64, 64, 4, 2), PrefillConfig(64, 32, 4, 2), PrefillConfig(32, 32, 4, 2))
"""For all other devices; the first one that fits into shared memory is taken."""
PORTABLE_WIDE = (PrefillConfig(64, 64, 8, 2), PrefillConfig(64, 32, 8, 2), PrefillConfig(32, 32, 4, 2))
"""The same for a head_dim of more than 128 channels: outputs would spill in four warps."""
PORTABLE_WIDEST = (PrefillConfig(64, 32, 8, 2), PrefillConfig(32, 32, 8, 2), PrefillConfig(32, 16, 4, 2))
"""The same for a head_dim of more than 256 channels."""

HALF = {128: (HOPPER, PORTABLE), 256: (HOPPER_WIDE, PORTABLE_WIDE), 512: (HOPPER_WIDEST, PORTABLE_WIDEST)}
"""The configurations for products in half precision, by the most channels of a head."""
FLOAT32 = (PrefillConfig(32, 32, 4, 2), PrefillConfig(16, 16, 4, 1))
"""For products in float32, on all devices. Only the last one serves a head_dim of more than 256 channels."""


def is_prefill(call: AttentionCall) -> bool:
    """Whether :func:`attend_prefill` handles this call. Without new tokens, float32 always takes the decode kernel."""
    many_rows = call.query.dtype != torch.float32 and call.group_size * call.query.shape[2] >= PREFILL_ROWS
    return many_rows or call.has_new_tokens


def attend_prefill(call: AttentionCall, out: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor, int]:
    """Prefill attention.

    Args:
        call: the arguments.
        out: [batch, num_heads, q_len, v_head_dim]; written if one split is enough and ``with_lse`` is False.
        with_lse: whether the caller needs the log-sum-exp.

    Returns:
        Outputs of the splits, float32 [splits, batch * num_heads * q_len, v_head_dim]; their log-sum-exp, float32
        [splits, batch * num_heads * q_len, 2]; and the number of splits.
        :func:`kvcompile.kernels.attention.splits.combine_kernel` merges them. If ``out`` was written: ``out`` twice,
        and 1.
    """
    batch, num_heads, q_len, _ = call.query.shape
    num_kv_heads, v_head_dim = call.k_data.shape[2], call.value.head_dim
    device = call.query.device
    padded_head_dim = max(call.key.padded_head_dim, call.value.padded_head_dim)
    capability, shared_memory = launcher.capability_of(device), launcher.multiprocessor_of(device).of_program
    config = _config(capability, padded_head_dim, shared_memory, float32=call.query.dtype == torch.float32)
    padded_len = ceil_div(call.kv_len, BLOCK_TOKENS) * BLOCK_TOKENS  # whole blocks are dequantized
    pairs = batch * num_kv_heads
    pairs_at_once = _pairs_at_once(call, padded_len, pairs)
    row_tiles = ceil_div(call.group_size * q_len, config.rows)
    tiles = max(1, padded_len // config.tokens)
    splits = max(1, min(tiles, launcher.num_sms_of(device) // (row_tiles * pairs_at_once)))
    if splits == 1 and not with_lse and _attend_by_cudnn(call, out, pairs_at_once):
        return out, out, 1
    partial = lse = out
    if with_lse or splits > 1:
        partial = call.query.new_empty((splits, batch * num_heads * q_len, v_head_dim), dtype=torch.float32)
        lse = call.query.new_empty((splits, batch * num_heads * q_len, 2), dtype=torch.float32)
    bounds = _bounds(call)
    for first_pair in range(0, pairs, pairs_at_once):
        count = min(pairs_at_once, pairs - first_pair)
        key = value = _dequantize(call, call.keys, first_pair, count, padded_len, bounds)
        if call.value is not call.key:
            value = _dequantize(call, call.values, first_pair, count, padded_len, bounds)
        _launch_attention(call, key, value, first_pair, partial, lse, splits, row_tiles, config)
    return partial, lse, splits


def _config(capability: int, padded_head_dim: int, shared_memory: int, *, float32: bool = False) -> PrefillConfig:
    hopper, portable = next(configs for most, configs in HALF.items() if padded_head_dim <= most)
    if capability == 9 and not float32:
        return hopper
    configs: tuple[PrefillConfig, ...] = portable
    itemsize = 2
    if float32:
        configs, itemsize = FLOAT32 if padded_head_dim <= 256 else FLOAT32[-1:], 4
    fitting = (config for config in configs if config.shared_memory(padded_head_dim, itemsize) <= shared_memory)
    return next(fitting, configs[-1])


def _pairs_at_once(call: AttentionCall, padded_len: int, pairs: int) -> int:
    itemsize = call.query.dtype.itemsize
    nbytes = padded_len * (call.key.padded_head_dim + call.value.padded_head_dim) * itemsize
    rounds = ceil_div(pairs, max(1, SCRATCH_NBYTES // max(1, nbytes)))
    return ceil_div(pairs, rounds)


def has_fast_cudnn(device: torch.device) -> bool:
    """Whether attention of cuDNN is faster than the Triton kernel, as it is on Hopper and later GPUs."""
    return launcher.capability_of(device) >= 9


def _attend_by_cudnn(call: AttentionCall, out: Tensor, pairs_at_once: int) -> bool:
    """Write the result into ``out`` and return True; return False if cuDNN cannot serve the call or would be slower."""
    is_square = call.query.shape[2] == call.kv_len or not call.is_causal
    if not has_fast_cudnn(out.device) or call.mask_kind != "none" or call.softcap != 0.0 or not is_square:
        return False
    if 4 * call.query.numel() * call.kv_len / (2 if call.is_causal else 1) < CUDNN_FLOPS:
        return False
    batch, num_kv_heads = call.query.shape[0], call.k_data.shape[2]
    heads = min(num_kv_heads, pairs_at_once)  # of a round; a round with several sequences has all of their heads
    sequences = max(1, pairs_at_once // num_kv_heads)
    scale = call.score_scale * math.log(2.0)
    for first, head in itertools.product(range(0, batch, sequences), range(0, num_kv_heads, heads)):
        part = slice(first, first + sequences), slice(head * call.group_size, (head + heads) * call.group_size)
        query, size = call.query[part], (min(sequences, batch - first), min(heads, num_kv_heads - head))
        keys, values = (
            _dequantized(call, source, first * num_kv_heads + head, size) for source in (call.keys, call.values)
        )
        if not cudnn_serves(query, keys, values, is_causal=call.is_causal):
            return False  # already in the first round, as rounds differ only in the number of heads
        out[part].copy_(cudnn_attention(query, keys, values, is_causal=call.is_causal, scale=scale))
    return True


def _dequantized(call: AttentionCall, source: Source, first_pair: int, size: tuple[int, int]) -> Tensor:
    """The values of ``size`` sequences and KV heads from ``first_pair`` on, [*size, kv_len, head_dim]."""
    out = call.query.new_empty((*size, call.kv_len, source.operand.head_dim))
    _read_pairs(source, out.flatten(0, 1), call.kv_len, first_pair, padded=False)
    return out


def _bounds(call: AttentionCall) -> Tensor | None:
    """The first token that any query of a sequence sees, and the token after the last such token: int32 [batch, 2]."""
    if call.ranges is None:
        return None
    return torch.stack([call.ranges[..., 0].amin(1), call.ranges[..., 1].amax(1)], 1)


def _dequantize(
    call: AttentionCall,
    source: Source,
    first_pair: int,
    count: int,
    padded_len: int,
    bounds: Tensor | None,
) -> Tensor:
    """The dequantized tokens of ``count`` KV heads, [count, padded_len, padded_head_dim]."""
    operand = source.operand
    make = torch.empty if operand.padded_head_dim == operand.head_dim else torch.zeros
    dtype = torch.float32 if INTERPRETED else call.query.dtype  # the interpreter multiplies bit patterns
    out = make((count, padded_len, operand.padded_head_dim), dtype=dtype, device=source.data.device)
    _read_pairs(source, out, call.kv_len, first_pair, bounds, padded=True)
    return out


def _read_pairs(
    source: Source,
    out: Tensor,
    num_tokens: int,
    first_pair: int,
    bounds: Tensor | None = None,
    *,
    padded: bool,
) -> None:
    """Dequantize tokens as :func:`dequantize_pairs` does, then put the new tokens in their places in ``out``."""
    dequantize_pairs(
        source.data, source.operand, source.static_scale, out, num_tokens, first_pair, bounds, padded=padded
    )
    if source.new is not None:
        put_new_tokens(out, source.new, num_tokens, first_pair)


def dequantize_pairs(
    data: Tensor,
    operand: PackedOperand,
    static_scale: float,
    out: Tensor,
    num_tokens: int,
    first_pair: int = 0,
    bounds: Tensor | None = None,
    *,
    padded: bool,
) -> None:
    """Launch the kernel for as many KV heads as ``out`` has; the arguments go to :func:`dequantize_kernel`."""
    pairs, num_blocks = out.shape[0], ceil_div(out.shape[1], operand.block_tokens)
    at_once = blocks_per_program(operand.rotated, num_blocks, pairs, data.device)
    launch_dequantize(
        (pairs, ceil_div(num_blocks, at_once), 1),
        (data, data if bounds is None else bounds, out),
        (strides_of(data),),
        (first_pair, data.shape[2], num_tokens, num_blocks, at_once, static_scale),
        (operand, bounds is not None, precision(data.device), padded),
        _dequantize_options(operand, launcher.capability_of(data.device)),
    )


def _dequantize_options(operand: PackedOperand, capability: int) -> dict[str, int]:
    """Triton's launch options of the kernel that dequantizes.

    On Hopper, a limit on the registers makes rotated formats up to a fifth faster. A multiprocessor then has room for
    20 warps, or for 12 where a head has more than 128 channels, so that a warp has twice the numbers. Four warps spill
    with more than 256 channels.
    """
    if operand.padded_head_dim > 256:
        return {"num_warps": 8}
    if capability != 9 or not operand.rotated:
        return {"num_warps": 4}
    return {"num_warps": 4, "maxnreg": 96 if operand.padded_head_dim <= 128 else 160}


def _launch_attention(
    call: AttentionCall,
    key: Tensor,
    value: Tensor,
    first_pair: int,
    out: Tensor,
    lse: Tensor,
    splits: int,
    row_tiles: int,
    config: PrefillConfig,
) -> None:
    batch, num_heads, q_len, _ = call.query.shape
    launch_prefill_attention(
        (row_tiles, key.shape[0], splits),
        (call.query, key, value, call.mask, call.query if call.ranges is None else call.ranges, out, lse),
        (call.query.stride(), call.mask_strides),
        (
            first_pair, call.k_data.shape[2], q_len, call.kv_len, key.shape[1], splits, batch * num_heads * q_len,
            call.score_scale, call.softcap,
        ),
        (
            call.key.head_dim, call.key.padded_head_dim, call.value.head_dim, call.value.padded_head_dim,
            call.group_size, call.softcap != 0.0, call.mask_kind, call.is_causal, lse is not out,
            precision(call.query.device),
            config.rows, config.tokens, config.num_stages,
        ),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
    )  # fmt: skip


launch_dequantize = Launcher(dequantize_kernel, writes=("out_ptr",))
launch_prefill_attention = Launcher(prefill_attention_kernel, writes=("out_ptr", "lse_ptr"))
