"""Launch the Triton kernels: configurations, grids, and the translation of tensors to kernel arguments.

These functions are called for every layer of every decode step: whatever depends only on formats, dtypes and the device
is computed once and cached.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.attention import attention_kernel, combine_kernel
from kvcompile.kernels.codec import INTERPRETED, PackedOperand, operand_and_scale, triton
from kvcompile.kernels.layout import PackedLayout
from kvcompile.kernels.residual import MAX_FEW_TOKENS
from kvcompile.kernels.store import store_kernel
from kvcompile.kernels.store_blocks import place_tokens_kernel, store_blocks_kernel, store_few_kernel
from kvcompile.kernels.visible_range import visible_range_kernel, with_four_dimensions


@dataclass(frozen=True)
class AttentionConfig:
    """How to run the attention kernel.

    Attributes:
        rows: query rows of a program, a power of two from 8; the rows of a KV head are its query heads times q_len.
        tokens: tokens of a tile, a power of two from 64 and from 16 * num_warps.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        max_registers: cap on registers a thread, or None.
        programs_per_sm: programs that a streaming multiprocessor runs at once; splits aim at this.
    """

    rows: int
    tokens: int
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None
    programs_per_sm: int = 2

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


# Decoding, up to 8 rows: (compute capability, bits of the key in a tile, and of the value) -> configuration. Three
# programs of 128 threads with 168 registers fill a register file, and three times the tiles in flight fit into shared
# memory. In a tile of 128 tokens a thread has one 16-bit scale, too little to copy asynchronously, so that the formats
# with 16-bit scales need tiles of 256.
DECODE = {
    (9, 16, 16): AttentionConfig(8, 64, num_stages=3, programs_per_sm=2),
    (9, 8, 8): AttentionConfig(8, 64, num_stages=4, max_registers=168, programs_per_sm=3),
    (9, 8, 4): AttentionConfig(8, 256, num_stages=3),
    (9, 4, 8): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=3),
    (9, 4, 4): AttentionConfig(8, 256, num_stages=3, max_registers=168, programs_per_sm=3),
    (9, 2, 4): AttentionConfig(8, 128, num_warps=2, num_stages=2, programs_per_sm=6),
    (9, 2, 2): AttentionConfig(8, 128, num_stages=3, max_registers=168, programs_per_sm=3),
    (8, 8, 8): AttentionConfig(8, 128, num_stages=2, max_registers=168, programs_per_sm=3),
    (8, 8, 4): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=2),
    (8, 4, 8): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=2),
    (8, 4, 4): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=3),
}
PORTABLE = AttentionConfig(8, 64)
FLOAT32 = AttentionConfig(16, 64, num_stages=1)


@functools.cache
def attention_config(
    capability: int, key: PackedOperand, value: PackedOperand, rows: int, mask_per_row: bool, float32: bool
) -> AttentionConfig:
    """The configuration for a device of compute capability ``capability`` (major) and ``rows`` query rows a KV head."""
    if float32:
        return FLOAT32
    padded_head_dim = max(key.padded_head_dim, value.padded_head_dim)
    if rows > 8:
        # Tensor core products of 16 rows and more hold a whole unpacked tile in registers on Hopper.
        most = 32 if mask_per_row or padded_head_dim > 128 else 64
        return AttentionConfig(min(triton.next_power_of_2(rows), most), 64)
    if padded_head_dim > 128:
        return PORTABLE
    config = DECODE.get((capability, key.tile_bits, value.tile_bits), PORTABLE)
    if key.granularity == "channel" and config.tokens not in (key.block_tokens, key.block_tokens * config.num_warps):
        return PORTABLE  # a tile has one block for every warp, or is a block
    return config


def num_splits(config: AttentionConfig, programs: int, kv_len: int, num_sms: int) -> int:
    """Splits of the tokens for a grid of ``programs`` without splits: one wave of programs, no split without a tile."""
    tiles = max(1, _ceil_div(kv_len, config.tokens))
    splits = max(1, min(tiles, config.programs_per_sm * num_sms // programs))
    return _ceil_div(tiles, _ceil_div(tiles, splits))


class Launcher:
    """Launches one Triton kernel, and remembers its compiled versions.

    Triton looks for the compiled version anew at every launch, with some 15 us of Python. The key here is shorter: the
    kernels name every integer that is no stride as ``do_not_specialize``, so that a version depends only on constants,
    on the dtypes and the alignment of tensors, and on which strides are 1 or divisible by 16.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        strides: tuple[tuple[int, ...], ...],
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        options: dict[str, int],
    ) -> None:
        """Run the kernel; its parameters are ``tensors``, ``strides``, ``numbers`` and ``constants``, in this order."""
        device = tensors[0].device
        key = (
            device,
            *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors],
            *[_stride_classes(stride) for stride in strides],
            constants,
        )
        arguments = (*tensors, *strides, *numbers, *constants)
        # Triton launches on the current device: make it the one of the tensors.
        with contextlib.nullcontext() if INTERPRETED else torch.cuda.device(device):
            compiled = self.compiled.get(key)
            if compiled is None:
                self.compiled[key] = self.kernel[grid](*arguments, **options)
            else:
                compiled[grid](*arguments)


# Triton leaves assertions out of kernels without ``debug``, which would also check every integer sum for overflow.
ASSERTING = {"debug": True, "sanitize_overflow": False}

launch_attention = Launcher(attention_kernel)
launch_combine = Launcher(combine_kernel)
launch_store = Launcher(store_kernel)
launch_store_few = Launcher(store_few_kernel)
launch_place_tokens = Launcher(place_tokens_kernel)
launch_store_blocks = Launcher(store_blocks_kernel)
launch_visible_range = Launcher(visible_range_kernel)


@functools.lru_cache(maxsize=4096)
def _stride_classes(strides: tuple[int, ...]) -> tuple[tuple[bool, bool, bool], ...]:
    """What Triton specializes a kernel for, of every stride: whether it is 1, divisible by 16, and wider than int32."""
    return tuple((stride == 1, stride % 16 == 0, stride >= 2**31) for stride in strides)


def attention(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor,
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
    """:func:`kvcompile.kernels.reference_attention.attend` on a GPU; the output is contiguous.

    ``ranges`` is :func:`visible_range` of a bool mask, if it is known.
    """
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads = k_data.shape[2]
    group_size = num_heads // num_kv_heads
    out = query.new_empty((batch, num_heads, q_len, v_head_dim))
    if out.numel() == 0:
        return out
    capability, num_sms, has_ptx = _device(query.device)
    float32 = query.dtype == torch.float32
    key, key_scale = operand_and_scale(k_format, "key", head_dim, float32, has_ptx)
    value, value_scale = operand_and_scale(v_format, "value", v_head_dim, float32, has_ptx)

    mask_kind, mask_per_row, mask_data = "none", False, query
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask_data = mask.expand(batch, num_heads, q_len, kv_len)
        mask_strides = mask_data.stride()
        mask_per_row = (q_len > 1 and mask_strides[2] != 0) or (group_size > 1 and mask_strides[1] != 0)
        mask_kind = "float"
        if mask.dtype == torch.bool:
            mask_kind, mask_data = "bool", mask_data.view(torch.uint8)
            if ranges is None:
                ranges = visible_range(with_four_dimensions(mask, q_len, kv_len))
            ranges = ranges.expand(batch, q_len, 3).contiguous()

    rows = group_size * q_len
    config = attention_config(capability, key, value, rows, mask_per_row, float32)
    row_tiles = _ceil_div(rows, config.rows)
    splits = num_splits(config, batch * num_kv_heads * row_tiles, kv_len, num_sms)
    is_partial = splits > 1 or value.rotated or sinks is not None
    if is_partial:
        partial = query.new_empty((splits, batch * num_heads * q_len, v_head_dim), dtype=torch.float32)
        lse = query.new_empty((splits, batch * num_heads * q_len), dtype=torch.float32)
    else:
        partial = lse = out
    launch_attention(
        (batch * num_kv_heads, row_tiles, splits),
        (query, k_data, v_data, mask_data, query if ranges is None else ranges, partial, lse),
        (query.stride(), k_data.stride()[:3], v_data.stride()[:3], mask_strides),
        (
            num_kv_heads, q_len, kv_len, splits, scale * math.log2(math.e), softcap * math.log2(math.e), key_scale,
            value_scale,
        ),
        (
            key, value, group_size, softcap != 0.0, mask_kind, mask_per_row, is_causal, is_partial,
            _precision(has_ptx),
            config.rows, config.tokens, config.num_warps, config.num_stages,
        ),
        config.options,
    )  # fmt: skip
    if is_partial:
        num_rows = batch * num_heads * q_len
        rows_at_once, splits_at_once = (1, 16) if splits > 1 else (4, 1)
        launch_combine(
            (_ceil_div(num_rows, rows_at_once), 1, 1),
            (partial, lse, lse if sinks is None else sinks.contiguous(), out),
            (),
            (num_rows, splits, num_heads, q_len),
            (value, sinks is not None, rows_at_once, splits_at_once),
            {"num_warps": 4 if splits > 1 else 1},
        )
    return out


def visible_range(mask: Tensor) -> Tensor:
    """:func:`kvcompile.kernels.visible_range.visible_range` on a GPU."""
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
    """:func:`kvcompile.kernels.packing.write_tokens_` on a GPU. A position outside the cache is an assertion there."""
    batch, _, num_tokens, head_dim = x.shape
    if x.numel() == 0:
        return
    operand, static_scale = operand_and_scale(spec, role, head_dim, True, False)
    if operand.granularity == "channel" and operand.residual is None:
        raise ValueError(f"{spec}: tokens that share scales are written through a residual; the layout has none")
    positions = positions.expand(batch, num_tokens)
    has_valid = valid is not None
    written = positions if valid is None else valid.expand(batch, num_tokens).view(torch.uint8)
    if operand.residual is None:
        _store_tokens(data, x, positions, written, has_valid, operand, static_scale)
    elif num_tokens <= MAX_FEW_TOKENS:
        _store_few(data, x, positions, written, has_valid, operand, static_scale)
    else:
        tags = PackedLayout.parse(spec, role, head_dim).tags(data)
        _store_blocks(data, x, positions, written, has_valid, operand, static_scale, tags)


# Below, ``written`` is what says which tokens are valid if ``has_valid``, and stands in for it otherwise.


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
    _, num_sms, has_ptx = _device(data.device)
    tokens, num_warps = (1, 1) if num_tokens == 1 else (operand.block_tokens if operand.rotated else 32, 4)
    num_tiles = _ceil_div(num_tokens, tokens) * batch * num_kv_heads
    # Programs of several tiles make their rotation matrix once; enough programs to fill the device come first.
    tiles_per_program = max(1, min(16, num_tiles // (8 * num_sms))) if operand.rotated else 1
    launch_store(
        (_ceil_div(num_tiles, tiles_per_program), 1, 1),
        (data, x, positions, written),
        (data.stride()[:3], x.stride(), positions.stride(), written.stride()),
        (num_kv_heads, num_tokens, data.shape[0] * operand.block_tokens, num_tiles, tiles_per_program, static_scale),
        (operand, has_valid, tokens, _precision(has_ptx)),
        {"num_warps": num_warps, **ASSERTING},
    )


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
    _, _, has_ptx = _device(data.device)
    launch_store_few(
        (batch * num_kv_heads, 1, 1),
        (data, x, positions, written),
        (data.stride()[:3], x.stride(), positions.stride(), written.stride()),
        (num_kv_heads, num_tokens, (data.shape[0] - operand.header_blocks) * operand.block_tokens, static_scale),
        (operand, has_valid, triton.next_power_of_2(num_tokens), _precision(has_ptx)),
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
    tags: Tensor,
) -> None:
    batch, num_kv_heads, num_tokens, _ = x.shape
    _, num_sms, has_ptx = _device(data.device)
    num_blocks = data.shape[0] - operand.header_blocks
    num_slots = num_blocks * operand.block_tokens
    places = torch.full((batch, num_slots + operand.num_slots), -1, dtype=torch.int32, device=data.device)
    launch_place_tokens(
        (batch, _ceil_div(num_tokens, 256), 1),
        (places, positions, written),
        (positions.stride(), written.stride()),
        (num_tokens, num_slots),
        (operand, has_valid, 256),
        {"num_warps": 4, **ASSERTING},
    )
    # As for tiles of tokens; and a grid has at most 65535 programs in its second dimension.
    blocks_per_program = max(1, min(16, num_blocks * batch * num_kv_heads // (8 * num_sms))) if operand.rotated else 1
    blocks_per_program = max(blocks_per_program, _ceil_div(num_blocks, 65535))
    launch_store_blocks(
        (batch * num_kv_heads, _ceil_div(num_blocks, blocks_per_program), 1),
        (data, x, places, tags.clone(memory_format=torch.contiguous_format)),
        (data.stride()[:3], x.stride()),
        (num_kv_heads, num_slots, num_blocks, blocks_per_program, static_scale),
        (operand, _precision(has_ptx)),
        {"num_warps": 8},
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def _device(device: torch.device) -> tuple[int, int, bool]:
    """Major compute capability, streaming multiprocessors, whether inline PTX can run. The interpreter has two SMs."""
    if INTERPRETED:
        return 0, 2, False
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count, torch.version.hip is None


def _precision(has_ptx: bool) -> str:
    """How products of float32 are computed: in three parts on NVIDIA's tensor cores, or as they are."""
    return "tf32x3" if has_ptx else "ieee"
