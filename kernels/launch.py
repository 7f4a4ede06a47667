"""Launch the Triton kernels: choose grids, and turn tensors into kernel arguments.

Every layer of every decode step calls these functions. Everything that depends only on formats, dtypes and the device
is therefore computed once and cached.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kvcompile.kernels.attention.call import AttentionCall
from kvcompile.kernels.attention.configs import attention_config, config_with_factors
from kvcompile.kernels.attention.decode import attention_kernel, attention_with_factors_kernel
from kvcompile.kernels.attention.divisions import division_of, exact_programs_of, num_splits
from kvcompile.kernels.attention.exact_blocks import num_items
from kvcompile.kernels.attention.launch_prefill import attend_prefill, dequantize_pairs, is_prefill
from kvcompile.kernels.attention.splits import combine_kernel
from kvcompile.kernels.attention.tuned import AttentionConfig
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import Launcher, ceil_div, exact_precision, precision
from kvcompile.kernels.lang.triton import tl, triton
from kvcompile.kernels.latent.launch import attend_latents, config_of, operand_of, store_latents
from kvcompile.kernels.latent.tiles import LatentOperand
from kvcompile.kernels.layout.operand import PackedOperand, for_decode, operand_and_scale, packed_operand
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role
from kvcompile.kernels.layout.references import is_reference, strides_of
from kvcompile.kernels.spec.key_factors import KeyFactors
from kvcompile.kernels.spec.new_tokens import NewTokens
from kvcompile.kernels.store import launch as store_launch
from kvcompile.kernels.store.launch import Positions
from kvcompile.kernels.tiles.visible_range import visible_range_kernel, with_four_dimensions

_layout = PackedLayout.parse

RANGES_AT_ONCE = 16
"""The most query positions of a sequence for which the merge of splits reads their visible ranges."""

MANY_ROWS = 128
"""The least query rows of which a program of the merge takes four. Fewer were not measured."""

launch_attention = Launcher(attention_kernel, writes=("out_ptr", "lse_ptr"))
launch_attention_with_factors = Launcher(attention_with_factors_kernel, writes=("out_ptr", "lse_ptr"))
launch_combine = Launcher(combine_kernel, writes=("out_ptr", "out_lse_ptr"))
launch_visible_range = Launcher(visible_range_kernel, writes=("out_ptr",))


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
    out_lse: Tensor | None = None,
    new_keys: NewTokens | None = None,
    new_values: NewTokens | None = None,
    key_factors: KeyFactors | None = None,
) -> Tensor:
    """:func:`kvcompile.kernels.spec.attention.attend` on a GPU, or ``attend_part`` with ``out_lse``.

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
        out_lse: float32 [batch, num_heads, q_len, 2], which takes the log-sum-exp; None if it is not needed.
        new_keys, new_values: tokens that the same call has written, for layouts that take them. Attention reads these
            tokens in full precision. Without ``v_data`` both are the same.
        key_factors: the factors of pre-RoPE keys; excludes new keys. Its tensors may have any strides.

    Returns:
        [batch, num_heads, q_len, v_head_dim] in the dtype of ``query``, in float32 with ``out_lse``; contiguous.
    """
    batch, num_heads, q_len, head_dim = query.shape
    dtype = query.dtype if out_lse is None else torch.float32
    out = query.new_empty((batch, num_heads, q_len, v_head_dim), dtype=dtype)
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
            if ranges.shape[0] != batch or not ranges.is_contiguous():
                ranges = ranges.expand(batch, q_len, 3).contiguous()
    call = AttentionCall(
        query, k_data, v_data, mask_data, mask_strides, mask_kind, ranges, min(kv_len, q_len) if is_causal else kv_len,
        is_causal, scale * math.log2(math.e), softcap * math.log2(math.e), key, value, key_scale,
        value_scale, new_keys, new_values, key_factors,
    )  # fmt: skip

    with_lse = sinks is not None or out_lse is not None
    is_latent = isinstance(key, LatentOperand)
    if key_factors is not None:
        decode = config_of_factors(query, k_data, None if value is key else v_data, k_format, v_format, v_head_dim)
        if decode is None:
            raise ValueError(f"kvcompile::attention: no kernel on this device takes key_factors for {k_format}")
    else:
        decode = None
        if not is_latent and not is_prefill(call):
            decode_call = _for_decode(call)
            decode = _decode_config(decode_call)
            call = call if decode is None else decode_call
    if decode is not None:
        partial, lse, splits = _attend_decode(call, out, decode, with_lse=with_lse)
    else:
        attend = _attend_latents if is_latent else attend_prefill
        if float32 and not is_latent:
            call = _dequantizing(call, k_format, v_format)
        partial, lse, count = attend(call, out, with_lse=with_lse)
        splits = Splits(count)
        value = packed_operand("bfloat16", "value", v_head_dim, False, 0)  # not rotated: values were dequantized
    if partial is not out:
        _merge_splits(call, partial, lse, splits, value, sinks, out, out_lse)
    return out


class Splits(NamedTuple):
    """The splits of an attention launch, whose outputs are merged.

    Attributes:
        packed: splits of the packed tokens. Their outputs are in the stored basis of values.
        tile_tokens: tokens of a tile; 0 if splits do not take turns at tiles.
        exact: splits of the exact blocks. Their outputs are in the original basis.
        exact_of_whole: the same of the first ``whole_rows`` query rows.
        own_items: items of exact blocks that the packed splits share out among themselves before the tiles.
        whole_rows: the first query rows, whose packed tokens are not split.
    """

    packed: int
    tile_tokens: int = 0
    exact: int = 0
    exact_of_whole: int = 0
    own_items: int = 0
    whole_rows: int = 0


def _merge_splits(
    call: AttentionCall,
    partial: Tensor,
    lse: Tensor,
    splits: Splits,
    value: PackedOperand,
    sinks: Tensor | None,
    out: Tensor,
    out_lse: Tensor | None,
) -> None:
    """Write the merged splits of a decode kernel, such as :func:`_attend_decode` returns, into ``out``.

    Their common log-sum-exp goes into ``out_lse`` if it is given.
    """
    batch, num_heads, q_len, _ = call.query.shape
    num_rows, early = batch * num_heads * q_len, launcher.early_start(call.query.device)
    one_split = splits.packed == 1
    rows_at_once, splits_at_once, channels = _tile_of_merge(splits, num_rows, num_heads * q_len, value)
    elements = rows_at_once * splits_at_once * channels
    ranges, positions = lse, 0
    if call.ranges is not None and splits.tile_tokens > 0 and not one_split and q_len <= RANGES_AT_ONCE:
        ranges, positions = call.ranges, RANGES_AT_ONCE
    launch_combine(
        (ceil_div(num_rows, rows_at_once), ceil_div(value.head_dim, channels), 1),
        (partial, lse, lse if sinks is None else sinks.contiguous(), ranges, out, lse if out_lse is None else out_lse),
        (),
        (
            num_rows, splits.whole_rows, splits.packed, splits.exact, splits.exact_of_whole, splits.own_items,
            num_heads, q_len, splits.tile_tokens,
        ),
        (value, sinks is not None, rows_at_once, splits_at_once, channels, positions, bool(early), out_lse is not None),
        {"num_warps": max(1 if one_split else 4, elements // 2048), **early},  # up to 64 elements per thread
    )  # fmt: skip


def _tile_of_merge(splits: Splits, num_rows: int, rows_of_sequence: int, value: PackedOperand) -> tuple[int, int, int]:
    """Rows, splits and channels that a program of the merge reads at once.

    Rows with few splits run best in few programs, because each program waits for its loads. More than 64 splits are
    outputs of few rows. Their channels are then divided among programs, so that more of the device takes part.
    Undoing a rotation needs all channels.
    """
    at_once = triton.next_power_of_2(splits.packed)
    if at_once == 1:
        return 4, 1, value.padded_head_dim
    if at_once <= 8 and num_rows >= MANY_ROWS and rows_of_sequence % 4 == 0 and splits.whole_rows % 4 == 0:
        return 4, at_once, value.padded_head_dim
    channels = value.padded_head_dim if value.rotated or at_once <= 64 else min(32, value.padded_head_dim)
    return 1, min(max(16, at_once), 128), channels


def _operand_and_scale(spec: str, role: Role, head_dim: int, float32: bool, data: Tensor) -> tuple[Any, float]:
    """The compile-time description of ``data``, a PackedOperand or a LatentOperand, and its static scale."""
    layout = _layout(spec, role, head_dim)
    if not layout.format.has_levels:
        return operand_of(layout, data, float32), 1.0
    ptx = launcher.capability_of(data.device)
    return operand_and_scale(spec, role, head_dim, float32, ptx, is_reference(data))


def _dequantizing(call: AttentionCall, k_format: str, v_format: str) -> AttentionCall:
    """A call in float32, with descriptions of its caches for :func:`attend_prefill`."""
    key = value = _operand_to_read(k_format, "key", call.key.head_dim, torch.float32, call.k_data)[0]
    if call.value is not call.key:
        value = _operand_to_read(v_format, "value", call.value.head_dim, torch.float32, call.v_data)[0]
    return call._replace(key=key, value=value)


def _operand_to_read(
    spec: str, role: Role, head_dim: int, dtype: torch.dtype, data: Tensor
) -> tuple[PackedOperand, float]:
    """The description of ``data`` for dequantizing it to ``dtype``, and its static scale.

    Rotated levels are exact in half precision, and their products are summed in float32. A matrix in float32 would take
    more shared memory than a GPU has, if it rotates 256 channels.
    """
    float32 = dtype == torch.float32 and not _layout(spec, role, head_dim).format.rotated
    return operand_and_scale(spec, role, head_dim, float32, launcher.capability_of(data.device), is_reference(data))


def _attend_latents(call: AttentionCall, out: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor, int]:
    """Attention on latents; arguments and results are the same as in :func:`attend_prefill`."""
    config = config_of(call)
    rows = call.group_size * call.query.shape[2]
    programs = call.query.shape[0] * call.k_data.shape[2] * ceil_div(rows, config.rows)
    splits = num_splits(config, programs, call.kv_len, launcher.num_sms_of(call.query.device))
    return (*attend_latents(call, out, config, splits, with_lse=with_lse), splits)


def _for_decode(call: AttentionCall) -> AttentionCall:
    """The call with descriptions of its caches for decode attention. One tensor of keys and values stays whole."""
    return call if call.value is call.key else call._replace(key=for_decode(call.key), value=for_decode(call.value))


def _decode_config(call: AttentionCall) -> AttentionConfig | None:
    """The configuration of :func:`_attend_decode`; None if the device has too little shared memory."""
    device, rows = call.query.device, call.group_size * call.query.shape[2]
    return attention_config(
        launcher.capability_of(device), launcher.multiprocessor_of(device), call.key, call.value, rows,
        call.mask_kind if _has_mask_per_row(call) else "none", call.query.dtype == torch.float32,
    )  # fmt: skip


def config_of_factors(
    query: Tensor, k_data: Tensor, v_data: Tensor | None, k_format: str, v_format: str, v_head_dim: int
) -> AttentionConfig | None:
    """The configuration of the decode kernel that takes key factors, for arguments of :func:`attention`.

    None if these formats have no levels, so that no kernel serves them, or if the device has too little shared memory.
    """
    head_dim, float32 = query.shape[3], query.dtype == torch.float32
    key_layout, value_layout = _layout(k_format, "key", head_dim), _layout(v_format, "value", v_head_dim)
    if not (key_layout.format.has_levels and value_layout.format.has_levels):
        return None
    key, _ = _operand_and_scale(k_format, "key", head_dim, float32, k_data)
    value = key if v_data is None else _operand_and_scale(v_format, "value", v_head_dim, float32, v_data)[0]
    rows = query.shape[1] // k_data.shape[2] * query.shape[2]
    return config_with_factors(launcher.multiprocessor_of(query.device), key, value, rows, float32)


def _has_mask_per_row(call: AttentionCall) -> bool:
    """Whether a mask differs between the query rows of a KV head."""
    q_len, strides = call.query.shape[2], call.mask_strides
    return (q_len > 1 and strides[2] != 0) or (call.group_size > 1 and strides[1] != 0)


def _attend_decode(
    call: AttentionCall, out: Tensor, config: AttentionConfig, *, with_lse: bool
) -> tuple[Tensor, Tensor, Splits]:
    """Attention on packed tokens, without dequantizing them first.

    Arguments and results are the same as in :func:`attend_prefill`, apart from the configuration and the splits.
    """
    batch, _, q_len, _ = call.query.shape
    num_kv_heads, group_size = call.k_data.shape[2], call.group_size
    device = call.query.device
    rows = group_size * q_len
    float32 = call.query.dtype == torch.float32
    row_tiles = ceil_div(rows, config.rows)
    num_sms = launcher.num_sms_of(device)
    num_whole, splits = division_of(config, batch * num_kv_heads, row_tiles, call.kv_len, num_sms)
    num_divided = batch * num_kv_heads // (num_whole + 1)
    num_entries = max(call.key.num_entries, call.value.num_entries)
    items = num_items(num_entries, call.key.block_tokens, config.num_warps)
    exact_key, exact_value = _exact_operands(call.key, call.value, call.query.dtype) if items else (None, None)
    exact_programs = exact_programs_of(
        config, items, call.key.num_entries != call.value.num_entries, batch * num_kv_heads * row_tiles,
        (num_whole + splits) * num_divided * row_tiles,
        ceil_div(call.kv_len, config.tokens * (1 if num_whole else splits)), num_sms,
    )  # fmt: skip
    exact_splits, exact_of_whole, own_items = exact_programs, exact_programs, 0
    if exact_programs == 0:
        exact_splits, exact_of_whole, own_items = min(splits, items), min(1, items), items
    is_partial = splits > 1 or call.value.rotated or with_lse or items > 0
    partial = lse = out
    rows_of_divided = num_divided * rows
    whole_rows = num_whole * rows_of_divided
    if is_partial:
        outputs = rows_of_divided * splits + whole_rows + (rows_of_divided + whole_rows) * exact_splits
        partial = call.query.new_empty((outputs, call.value.head_dim), dtype=torch.float32)
        lse = call.query.new_empty((outputs, 2), dtype=torch.float32)
    launch = launch_attention
    queries: tuple[Tensor, ...] = (call.query,)
    query_strides: tuple[tuple[int, ...], ...] = (call.query.stride(),)
    lengths: tuple[int, ...] = (call.kv_len,)
    if call.key_factors is not None:
        paired, factors = call.key_factors.paired, call.key_factors.factors.contiguous()
        launch, queries = launch_attention_with_factors, (call.query, paired, factors)
        query_strides, lengths = (call.query.stride(), paired.stride()), (call.kv_len, factors.shape[1])
    launch(
        (num_divided, row_tiles, num_whole + splits + (num_whole + 1) * exact_programs),
        (
            *queries, call.k_data, call.v_data, call.mask, call.query if call.ranges is None else call.ranges,
            partial, lse,
        ),
        (*query_strides, strides_of(call.k_data), strides_of(call.v_data), call.mask_strides),
        (
            num_kv_heads, q_len, *lengths, num_whole, splits, exact_programs, call.score_scale, call.softcap,
            call.key_scale, call.value_scale,
        ),
        (
            call.key, call.value, group_size, call.softcap != 0.0, call.mask_kind, _has_mask_per_row(call),
            call.is_causal, is_partial, precision(device), config.rows, config.tokens, config.num_warps,
            config.num_stages, is_partial and bool(launcher.early_start(device)), exact_key, exact_value, items,
            exact_precision(device, float32=float32), config.exact_stages, exact_programs > 0,
        ),
        config.options,
    )  # fmt: skip
    return partial, lse, Splits(splits, config.tokens, exact_splits, exact_of_whole, own_items, whole_rows)


@functools.cache
def _exact_operands(
    key: PackedOperand, value: PackedOperand, dtype: torch.dtype
) -> tuple[PackedOperand, PackedOperand]:
    """The descriptions of the vectors of exact blocks, for queries of ``dtype``.

    They are bfloat16 if both queries and exact blocks are bfloat16. Products in bfloat16 take fewer instructions than
    products in float32, and round softmax weights as attention on bfloat16 caches does.
    """
    exact = {operand.residual.dtype for operand in (key, value) if operand.residual is not None}
    is_bfloat16 = dtype == torch.bfloat16 and exact == {tl.bfloat16}
    spec = "bfloat16" if is_bfloat16 else "float32"
    return (
        packed_operand(spec, "key", key.head_dim, not is_bfloat16, 0),
        packed_operand(spec, "value", value.head_dim, not is_bfloat16, 0),
    )


def dequantize(data: Tensor, num_tokens: int, dtype: torch.dtype, spec: str, role: Role, head_dim: int) -> Tensor:
    """:func:`kvcompile.kernels.spec.packing.read_tokens` on a GPU, in ``dtype``; contiguous."""
    operand, static_scale = _operand_to_read(spec, role, head_dim, dtype, data)
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
        # Many rows fill the device, and run best in small programs. A few long rows do not fill it, so each row gets a
        # large program.
        few_and_long = batch * q_len < 4 * launcher.num_sms_of(mask.device) and kv_len > 4096
        launch_visible_range(
            (batch * q_len, 1, 1),
            (mask.view(torch.uint8), out),
            (mask.stride(),),
            (q_len, kv_len, num_heads),
            (16384 if few_and_long else 2048,),
            {"num_warps": 32 if few_and_long else 4},
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
    if x.numel() == 0:
        return
    layout = _layout(spec, cast(Role, role), x.shape[3])
    if layout.format.has_levels:
        store_launch.store(data, x, positions, valid, layout)
    else:
        store_latents(data, x, *Positions.of(positions, valid, x), layout)


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
    """:func:`store` of keys and values at the same positions, by one launch if one kernel serves both.

    Arguments are the same as in :func:`store`, for keys and for values.
    """
    k_layout, v_layout = _layout(k_spec, "key", key.shape[3]), _layout(v_spec, "value", value.shape[3])
    if key.numel() > 0 and k_layout.format.has_levels and v_layout.format.has_levels:
        store_launch.store_pair(k_data, v_data, key, value, positions, valid, k_layout, v_layout)
        return
    store(k_data, key, positions, valid, k_spec, "key")
    store(v_data, value, positions, valid, v_spec, "value")
