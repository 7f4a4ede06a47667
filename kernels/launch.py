"""Launch the Triton kernels: choose grids, and turn tensors into kernel arguments.

Every layer of every decode step calls these functions. Everything that depends only on formats, dtypes and the device
is therefore computed once and cached.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from kvcompile.kernels.attention.call import AttentionCall
from kvcompile.kernels.attention.configs import attention_config, num_splits
from kvcompile.kernels.attention.decode import attention_kernel, combine_kernel
from kvcompile.kernels.attention.launch_prefill import attend_prefill, dequantize_pairs, is_prefill
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import ASSERTING, Launcher, blocks_per_program, ceil_div, precision
from kvcompile.kernels.lang.triton import triton
from kvcompile.kernels.latent.launch import attend_latents, config_of, operand_of, store_latents
from kvcompile.kernels.latent.tiles import LatentOperand
from kvcompile.kernels.layout.operand import PackedOperand, operand_and_scale, packed_operand
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role
from kvcompile.kernels.layout.references import is_reference, strides_of
from kvcompile.kernels.spec.residual import MAX_FEW_TOKENS
from kvcompile.kernels.store.blocks import copy_tags_kernel, place_tokens_kernel, store_blocks_kernel, store_few_kernel
from kvcompile.kernels.store.configs import StoreTiles, store_tiles
from kvcompile.kernels.store.tokens import store_kernel, store_pair_kernel
from kvcompile.kernels.tiles.visible_range import visible_range_kernel, with_four_dimensions

_layout = PackedLayout.parse

RANGES_AT_ONCE = 16
"""The most query positions of a sequence for which the merge of splits reads their visible ranges."""

launch_attention = Launcher(attention_kernel)
launch_combine = Launcher(combine_kernel)
launch_store = Launcher(store_kernel)
launch_store_pair = Launcher(store_pair_kernel)
launch_store_few = Launcher(store_few_kernel)
launch_place_tokens = Launcher(place_tokens_kernel)
launch_copy_tags = Launcher(copy_tags_kernel)
launch_store_blocks = Launcher(store_blocks_kernel)
launch_visible_range = Launcher(visible_range_kernel)


def attention(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    kv_len: int,
    is_causal: bool,
    scale: float,
    softcap: float,
    k_format: str,
    v_format: str,
    v_head_dim: int,
    ranges: Tensor | None = None,
) -> Tensor:
    """:func:`kvcompile.kernels.spec.attention.attend` on a GPU.

    Args:
        query: [batch, num_heads, q_len, head_dim], any float dtype, any strides.
        k_data, v_data: packed keys and values, uint8 [num_blocks, batch, num_kv_heads, block_bytes], or references to
            them. Without ``v_data`` the keys also serve as values.
        mask: bool or float, broadcastable to [batch, num_heads, q_len, kv_len].
        sinks: [num_heads], any float dtype.
        kv_len: the number of tokens to attend to.
        is_causal, scale, softcap: as in ``attend``.
        k_format, v_format: :attr:`PackedLayout.spec` of keys and values.
        v_head_dim: channels of a value.
        ranges: :func:`visible_range` of a bool mask, int32 [batch or 1, q_len, 3]; computed here if it is None.

    Returns:
        [batch, num_heads, q_len, v_head_dim] in the dtype of ``query``, contiguous.
    """
    batch, num_heads, q_len, head_dim = query.shape
    out = query.new_empty((batch, num_heads, q_len, v_head_dim))
    if out.numel() == 0:
        return out
    float32 = query.dtype == torch.float32
    key, key_scale = _operand_and_scale(k_format, "key", head_dim, float32, k_data)
    value, value_scale = key, key_scale
    if v_data is None:
        v_data = k_data
    else:
        value, value_scale = _operand_and_scale(v_format, "value", v_head_dim, float32, v_data)

    mask_kind, mask_data = "none", query
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask_kind, mask_data = "float", mask.expand(batch, num_heads, q_len, kv_len)
        mask_strides = mask_data.stride()
        if mask.dtype == torch.bool:
            mask_kind, mask_data = "bool", mask_data.view(torch.uint8)
            if ranges is None:
                ranges = visible_range(with_four_dimensions(mask, q_len, kv_len))
            ranges = ranges.expand(batch, q_len, 3).contiguous()
    call = AttentionCall(
        query, k_data, v_data, mask_data, mask_strides, mask_kind, ranges, min(kv_len, q_len) if is_causal else kv_len,
        is_causal, scale * math.log2(math.e), softcap * math.log2(math.e), key, value, key_scale,
        value_scale,
    )  # fmt: skip

    tile_tokens = 0
    if isinstance(key, LatentOperand) or is_prefill(call):
        attend = _attend_latents if isinstance(key, LatentOperand) else attend_prefill
        partial, lse, splits = attend(call, out, with_lse=sinks is not None)
        value = packed_operand("bfloat16", "value", v_head_dim, False, 0)  # not rotated: values were dequantized
    else:
        partial, lse, splits, tile_tokens = _attend_decode(call, out, with_lse=sinks is not None)
    if partial is not out:
        _merge_splits(call, partial, lse, splits, tile_tokens, value, sinks, out)
    return out


def _merge_splits(
    call: AttentionCall,
    partial: Tensor,
    lse: Tensor,
    splits: int,
    tile_tokens: int,
    value: PackedOperand,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Merge the splits that :func:`_attend_decode`, or another function like it, has returned, into ``out``."""
    batch, num_heads, q_len, _ = call.query.shape
    num_rows, early = batch * num_heads * q_len, launcher.early_start(call.query.device)
    rows_at_once, splits_at_once = (1, 16 if splits <= 16 else 64) if splits > 1 else (4, 1)
    elements = rows_at_once * splits_at_once * value.padded_head_dim
    ranges, positions = lse, 0
    if call.ranges is not None and tile_tokens > 0 and splits > 1 and q_len <= RANGES_AT_ONCE:
        ranges, positions = call.ranges, RANGES_AT_ONCE
    launch_combine(
        (ceil_div(num_rows, rows_at_once), 1, 1),
        (partial, lse, lse if sinks is None else sinks.contiguous(), ranges, out),
        (),
        (num_rows, splits, num_heads, q_len, tile_tokens),
        (value, sinks is not None, rows_at_once, splits_at_once, positions, bool(early)),
        {"num_warps": max(4 if splits > 1 else 1, elements // 2048), **early},  # up to 64 elements per thread
    )


def _operand_and_scale(spec: str, role: Role, head_dim: int, float32: bool, data: Tensor) -> tuple[Any, float]:
    """The compile-time description of ``data``, a PackedOperand or a LatentOperand, and its static scale."""
    layout = _layout(spec, role, head_dim)
    if not layout.format.has_levels:
        return operand_of(layout, data, float32), 1.0
    ptx = launcher.capability_of(data.device)
    return operand_and_scale(spec, role, head_dim, float32, ptx, is_reference(data))


def _attend_latents(call: AttentionCall, out: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor, int]:
    """Attention on latents; arguments and results are the same as in :func:`attend_prefill`."""
    config = config_of(call)
    rows = call.group_size * call.query.shape[2]
    programs = call.query.shape[0] * call.k_data.shape[2] * ceil_div(rows, config.rows)
    splits = num_splits(config, programs, call.kv_len, launcher.num_sms_of(call.query.device))
    return (*attend_latents(call, out, config, splits, with_lse=with_lse), splits)


def _attend_decode(call: AttentionCall, out: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor, int, int]:
    """Attention on packed tokens, without dequantizing them first.

    Arguments and results are the same as in :func:`attend_prefill`, with two differences. Outputs of splits are in the
    stored basis of values. The last result is the number of tokens of a tile, or 0 if there may be exact blocks: splits
    without a tile may then have results.
    """
    batch, num_heads, q_len, _ = call.query.shape
    num_kv_heads, group_size = call.k_data.shape[2], call.group_size
    device = call.query.device
    mask_per_row = (q_len > 1 and call.mask_strides[2] != 0) or (group_size > 1 and call.mask_strides[1] != 0)
    rows = group_size * q_len
    float32 = call.query.dtype == torch.float32
    config = attention_config(launcher.capability_of(device), call.key, call.value, rows, mask_per_row, float32)
    row_tiles = ceil_div(rows, config.rows)
    splits = num_splits(config, batch * num_kv_heads * row_tiles, call.kv_len, launcher.num_sms_of(device))
    is_partial = splits > 1 or call.value.rotated or with_lse
    partial = lse = out
    if is_partial:
        partial = call.query.new_empty((splits, batch * num_heads * q_len, call.value.head_dim), dtype=torch.float32)
        lse = call.query.new_empty((splits, batch * num_heads * q_len, 2), dtype=torch.float32)
    launch_attention(
        (batch * num_kv_heads, row_tiles, splits),
        (
            call.query, call.k_data, call.v_data, call.mask, call.query if call.ranges is None else call.ranges,
            partial, lse,
        ),
        (call.query.stride(), strides_of(call.k_data), strides_of(call.v_data), call.mask_strides),
        (
            num_kv_heads, q_len, call.kv_len, splits, call.score_scale, call.softcap, call.key_scale, call.value_scale,
        ),
        (
            call.key, call.value, group_size, call.softcap != 0.0, call.mask_kind, mask_per_row, call.is_causal,
            is_partial, precision(device), config.rows, config.tokens, config.num_warps, config.num_stages,
            is_partial and bool(launcher.early_start(device)),
        ),
        config.options,
    )  # fmt: skip
    return partial, lse, splits, 0 if call.key.num_entries + call.value.num_entries else config.tokens


def dequantize(data: Tensor, num_tokens: int, dtype: torch.dtype, spec: str, role: Role, head_dim: int) -> Tensor:
    """:func:`kvcompile.kernels.spec.packing.read_tokens` on a GPU, in ``dtype``; contiguous."""
    # Rotated levels are exact in half precision, and their products are summed in float32.
    float32 = dtype == torch.float32 and not _layout(spec, role, head_dim).format.rotated
    ptx = launcher.capability_of(data.device)
    operand, static_scale = operand_and_scale(spec, role, head_dim, float32, ptx, is_reference(data))
    _, batch, num_kv_heads, _ = data.shape
    out = torch.empty((batch, num_kv_heads, num_tokens, head_dim), dtype=dtype, device=data.device)
    if out.numel() == 0:
        return out
    dequantize_pairs(data, operand, static_scale, out.flatten(0, 1), num_tokens, padded=False)
    return out


def visible_range(mask: Tensor) -> Tensor:
    """:func:`kvcompile.kernels.tiles.visible_range.visible_range` on a GPU, for a mask of four dimensions."""
    batch, num_heads, q_len, kv_len = mask.shape
    out = torch.empty((batch, q_len, 3), dtype=torch.int32, device=mask.device)
    if out.numel():
        launch_visible_range(
            (batch * q_len, 1, 1),
            (mask.view(torch.uint8), out),
            (mask.stride(),),
            (q_len, kv_len, num_heads),
            (2048 if kv_len <= 2048 else 8192,),
            {"num_warps": 8},
        )
    return out


def store(data: Tensor, x: Tensor, positions: Tensor, valid: Tensor | None, spec: str, role: str) -> None:
    """:func:`kvcompile.kernels.spec.packing.write_tokens_` on a GPU.

    A position outside of the cache fails an assertion on the device.

    Args:
        data: packed data, uint8 [num_blocks, batch, num_kv_heads, block_bytes], or a reference to it; changed in place.
        x: [batch, num_kv_heads, num_tokens, head_dim], any float dtype, any strides.
        positions: int64 [num_tokens] or [batch, num_tokens].
        valid: bool of the shape of ``positions``, False for tokens that are not written; None writes all tokens.
        spec: :attr:`PackedLayout.spec` of ``data``.
        role: ``key`` or ``value``.

    Raises:
        ValueError: the format has scales per channel and the layout has no residual.
    """
    batch, _, num_tokens, head_dim = x.shape
    if x.numel() == 0:
        return
    positions = positions.expand(batch, num_tokens)
    has_valid = valid is not None
    written = positions if valid is None else valid.expand(batch, num_tokens).view(torch.uint8)
    layout = _layout(spec, cast(Role, role), head_dim)
    if not layout.format.has_levels:
        store_latents(data, x, positions, written, has_valid, layout)
        return
    operand, static_scale = operand_and_scale(spec, role, head_dim, True, 0, is_reference(data))
    if operand.granularity == "channel" and operand.residual is None:
        raise ValueError(f"{spec}: tokens that share scales can only be written through a residual: use one")
    if operand.residual is None:
        _store_tokens(data, x, positions, written, has_valid, operand, static_scale)
    elif num_tokens <= MAX_FEW_TOKENS:
        _store_few(data, x, positions, written, has_valid, operand, static_scale)
    else:
        _store_blocks(data, x, positions, written, has_valid, operand, static_scale)


# Below, ``written`` [batch, num_tokens] says which tokens are valid if ``has_valid`` is set, and is not read otherwise.


def _store_tokens(
    data: Tensor,
    x: Tensor,
    positions: Tensor,
    written: Tensor,
    has_valid: bool,
    operand: PackedOperand,
    static_scale: float,
) -> None:
    batch, num_kv_heads, num_tokens, _ = x.shape
    tiles = _store_tiles(operand, x)
    launch_store(
        (tiles.programs, num_kv_heads, batch),
        (data, x, positions, written),
        (strides_of(data), x.stride(), positions.stride(), written.stride()),
        (num_tokens, data.shape[0] * operand.block_tokens, tiles.tiles_per_program, static_scale),
        (operand, has_valid, tiles.tokens, precision(data.device)),
        {**tiles.options, **ASSERTING},
    )


def _store_tiles(operand: PackedOperand, x: Tensor) -> StoreTiles:
    batch, num_kv_heads, num_tokens, _ = x.shape
    capability, num_sms = launcher.capability_of(x.device), launcher.num_sms_of(x.device)
    return store_tiles(capability, operand, num_tokens, batch * num_kv_heads, num_sms)


def store_pair(
    k_data: Tensor,
    v_data: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    valid: Tensor | None,
    k_spec: str,
    v_spec: str,
) -> None:
    """:func:`store` of keys and values at the same positions, by one kernel if both have the same tiles.

    Arguments are the same as in :func:`store`, for keys and for values.
    """
    layouts = _layout(k_spec, "key", key.shape[3]), _layout(v_spec, "value", value.shape[3])
    cut_alike = key.numel() > 0 and all(layout.format.has_levels and layout.residual is None for layout in layouts)
    if cut_alike:
        (k_operand, k_scale), (v_operand, v_scale) = (
            operand_and_scale(layout.spec, layout.role, layout.head_dim, True, 0, is_reference(data))
            for layout, data in zip(layouts, (k_data, v_data), strict=True)
        )
        tiles = _store_tiles(k_operand, key)
        cut_alike = tiles == _store_tiles(v_operand, value)
    if not cut_alike:
        store(k_data, key, positions, valid, k_spec, "key")
        store(v_data, value, positions, valid, v_spec, "value")
        return
    batch, num_kv_heads, num_tokens, _ = key.shape
    positions = positions.expand(batch, num_tokens)
    written = positions if valid is None else valid.expand(batch, num_tokens).view(torch.uint8)
    launch_store_pair(
        (tiles.programs, 2 * num_kv_heads, batch),
        (k_data, v_data, key, value, positions, written),
        (
            strides_of(k_data), strides_of(v_data), key.stride(), value.stride(), positions.stride(), written.stride(),
        ),
        (
            num_kv_heads, num_tokens, k_data.shape[0] * k_operand.block_tokens, tiles.tiles_per_program, k_scale,
            v_scale,
        ),
        (k_operand, v_operand, valid is not None, tiles.tokens, precision(key.device)),
        {**tiles.options, **ASSERTING},
    )  # fmt: skip


def _store_few(
    data: Tensor,
    x: Tensor,
    positions: Tensor,
    written: Tensor,
    has_valid: bool,
    operand: PackedOperand,
    static_scale: float,
) -> None:
    batch, num_kv_heads, num_tokens, _ = x.shape
    launch_store_few(
        (batch * num_kv_heads, 1, 1),
        (data, x, positions, written),
        (strides_of(data), x.stride(), positions.stride(), written.stride()),
        (num_kv_heads, num_tokens, (data.shape[0] - operand.header_blocks) * operand.block_tokens, static_scale),
        (operand, has_valid, triton.next_power_of_2(num_tokens), precision(data.device)),
        {"num_warps": 8, **ASSERTING},
    )


def _store_blocks(
    data: Tensor,
    x: Tensor,
    positions: Tensor,
    written: Tensor,
    has_valid: bool,
    operand: PackedOperand,
    static_scale: float,
) -> None:
    batch, num_kv_heads, num_tokens, _ = x.shape
    num_blocks = data.shape[0] - operand.header_blocks
    capacity = num_blocks * operand.block_tokens
    places = torch.full((batch, capacity + operand.num_entries), -1, dtype=torch.int32, device=data.device)
    launch_place_tokens(
        (batch, ceil_div(num_tokens, 256), 1),
        (places, positions, written),
        (positions.stride(), written.stride()),
        (num_tokens, capacity),
        (operand, has_valid, 256),
        {"num_warps": 4, **ASSERTING},
    )
    tags = torch.empty((batch, num_kv_heads, operand.num_entries), dtype=torch.int32, device=data.device)
    launch_copy_tags((batch * num_kv_heads, 1, 1), (data, tags), (strides_of(data),), (num_kv_heads,), (operand,), {})
    at_once = blocks_per_program(operand.rotated, num_blocks, batch * num_kv_heads, data.device)
    launch_store_blocks(
        (batch * num_kv_heads, ceil_div(num_blocks, at_once), 1),
        (data, x, places, tags),
        (strides_of(data), x.stride()),
        (num_kv_heads, capacity, num_blocks, at_once, static_scale),
        (operand, precision(data.device)),
        {"num_warps": 8},
    )
