"""Launch the kernels that write tokens to packed caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import ASSERTING, Launcher, blocks_per_program, ceil_div, precision
from kvcompile.kernels.lang.triton import triton
from kvcompile.kernels.layout.operand import PackedOperand, operand_and_scale
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.layout.references import is_reference, strides_of
from kvcompile.kernels.spec.residual import MAX_FEW_TOKENS
from kvcompile.kernels.store.append import appends_tokens
from kvcompile.kernels.store.blocks import copy_tags_kernel, place_tokens_kernel, store_blocks_kernel
from kvcompile.kernels.store.configs import StoreTiles, store_tiles
from kvcompile.kernels.store.few import store_few_kernel, store_few_pair_kernel
from kvcompile.kernels.store.headers import last_token_kernel, store_header_kernel
from kvcompile.kernels.store.tokens import store_kernel, store_pair_kernel

launch_store = Launcher(store_kernel, writes=("data_ptr",))
launch_store_pair = Launcher(store_pair_kernel, writes=("k_data_ptr", "v_data_ptr"))
launch_store_few = Launcher(store_few_kernel, writes=("data_ptr",))
launch_store_few_pair = Launcher(store_few_pair_kernel, writes=("k_data_ptr", "v_data_ptr"))
launch_place_tokens = Launcher(place_tokens_kernel, writes=("places_ptr",))
launch_copy_tags = Launcher(copy_tags_kernel, writes=("tags_ptr",))
launch_store_blocks = Launcher(store_blocks_kernel, writes=("data_ptr",))
launch_last_token = Launcher(last_token_kernel, writes=("last_ptr",))
launch_store_header = Launcher(store_header_kernel, writes=("data_ptr",))


class Positions(NamedTuple):
    """Where tokens are written: positions [batch, num_tokens], and which of them are valid.

    ``written`` is uint8 [batch, num_tokens] if ``has_valid`` is set. Otherwise all are valid, and it is not read.
    """

    position: Tensor
    written: Tensor
    has_valid: bool

    @classmethod
    def of(cls, positions: Tensor, valid: Tensor | None, x: Tensor) -> Positions:
        """The positions of the tokens ``x``, from arguments that may broadcast over the batch."""
        size = x.shape[0], x.shape[2]
        positions = positions.expand(size)
        return cls(positions, positions if valid is None else valid.expand(size).view(torch.uint8), valid is not None)


class _Write(NamedTuple):
    """A write of ``x`` [batch, num_kv_heads, num_tokens, head_dim] to ``data``, which ``operand`` describes."""

    data: Tensor
    x: Tensor
    operand: PackedOperand
    static_scale: float

    @classmethod
    def of(cls, data: Tensor, x: Tensor, layout: PackedLayout) -> _Write:
        """The write to a cache with this layout.

        Raises:
            ValueError: the format has scales per channel and the layout has no residual.
        """
        if layout.format.granularity == "channel" and layout.residual is None:
            raise ValueError(
                f"{layout.spec}: tokens that share scales are written through a residual; give the layout one"
            )
        ref = is_reference(data)
        return cls(data, x, *operand_and_scale(layout.spec, layout.role, layout.head_dim, True, 0, ref))

    @property
    def capacity(self) -> int:
        return (self.data.shape[0] - self.operand.header_blocks) * self.operand.block_tokens

    @property
    def tiles(self) -> StoreTiles:
        batch, num_kv_heads, num_tokens, _ = self.x.shape
        capability, num_sms = launcher.capability_of(self.x.device), launcher.num_sms_of(self.x.device)
        return store_tiles(capability, self.operand, num_tokens, batch * num_kv_heads, num_sms)


def store(data: Tensor, x: Tensor, positions: Tensor, valid: Tensor | None, layout: PackedLayout) -> None:
    """:func:`kvcompile.kernels.launch.store` for a format with levels and at least one element."""
    write, where = _Write.of(data, x, layout), Positions.of(positions, valid, x)
    if layout.residual is None:
        _store_tokens(write, where)
    elif x.shape[2] <= MAX_FEW_TOKENS:
        _store_few(write, where)
    else:
        _store_blocks(write, where)


def store_pair(
    k_data: Tensor,
    v_data: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    valid: Tensor | None,
    k_layout: PackedLayout,
    v_layout: PackedLayout,
) -> None:
    """:func:`store` of keys and values at the same positions, by one launch if one kernel serves both."""
    writes = _Write.of(k_data, key, k_layout), _Write.of(v_data, value, v_layout)
    launch = _pair_launch(*writes)
    if launch is not None:
        launch(*writes, Positions.of(positions, valid, key))
        return
    store(k_data, key, positions, valid, k_layout)
    store(v_data, value, positions, valid, v_layout)


def _pair_launch(key: _Write, value: _Write) -> Callable[[_Write, _Write, Positions], None] | None:
    """The launch that writes keys and values together; None if each needs its own."""
    if key.capacity != value.capacity:
        return None
    if key.operand.residual is not None or value.operand.residual is not None:
        return _store_few_pair if key.x.shape[2] <= MAX_FEW_TOKENS else None
    return _store_tokens_of_pair if key.tiles == value.tiles else None


def _store_tokens(write: _Write, where: Positions) -> None:
    batch, num_kv_heads, num_tokens, _ = write.x.shape
    tiles = write.tiles
    launch_store(
        (tiles.programs, num_kv_heads, batch),
        (write.data, write.x, where.position, where.written),
        (strides_of(write.data), write.x.stride(), where.position.stride(), where.written.stride()),
        (num_tokens, write.capacity, tiles.tiles_per_program, write.static_scale),
        (write.operand, where.has_valid, tiles.tokens, precision(write.data.device)),
        {**tiles.options, **ASSERTING},
    )


def _store_tokens_of_pair(key: _Write, value: _Write, where: Positions) -> None:
    batch, num_kv_heads, num_tokens, _ = key.x.shape
    tiles = key.tiles
    launch_store_pair(
        (tiles.programs, 2 * num_kv_heads, batch),
        (key.data, value.data, key.x, value.x, where.position, where.written),
        _strides_of_pair(key, value, where),
        (
            num_kv_heads, num_tokens, key.capacity, tiles.tiles_per_program, key.static_scale, value.static_scale,
        ),
        (key.operand, value.operand, where.has_valid, tiles.tokens, precision(key.data.device)),
        {**tiles.options, **ASSERTING},
    )  # fmt: skip


def _strides_of_pair(key: _Write, value: _Write, where: Positions) -> tuple[tuple[int, ...], ...]:
    return (
        strides_of(key.data), strides_of(value.data), key.x.stride(), value.x.stride(), where.position.stride(),
        where.written.stride(),
    )  # fmt: skip


def _store_few(write: _Write, where: Positions) -> None:
    batch, num_kv_heads, num_tokens, _ = write.x.shape
    launch_store_few(
        (num_tokens, num_kv_heads, batch),
        (write.data, write.x, where.position, where.written),
        (strides_of(write.data), write.x.stride(), where.position.stride(), where.written.stride()),
        (num_tokens, write.capacity, write.static_scale),
        (write.operand, where.has_valid, triton.next_power_of_2(num_tokens), precision(write.data.device)),
        {"num_warps": _few_warps(write), **ASSERTING},
    )


def _store_few_pair(key: _Write, value: _Write, where: Positions) -> None:
    batch, num_kv_heads, num_tokens, _ = key.x.shape
    launch_store_few_pair(
        (num_tokens, 2 * num_kv_heads, batch),
        (key.data, value.data, key.x, value.x, where.position, where.written),
        _strides_of_pair(key, value, where),
        (num_kv_heads, num_tokens, key.capacity, key.static_scale, value.static_scale),
        (key.operand, value.operand, where.has_valid, triton.next_power_of_2(num_tokens), precision(key.data.device)),
        {"num_warps": max(_few_warps(key), _few_warps(value)), **ASSERTING},
    )


def _few_warps(write: _Write) -> int:
    """Warps of a program: with scales per channel it encodes a whole block, otherwise one token."""
    if write.operand.granularity != "channel":
        return 1
    return 4 if write.x.shape[2] == 1 and appends_tokens(write.operand) else 8


def _store_blocks(write: _Write, where: Positions) -> None:
    data, operand = write.data, write.operand
    batch, num_kv_heads, num_tokens, _ = write.x.shape
    num_blocks = write.capacity // operand.block_tokens
    places = torch.full((batch, write.capacity + operand.num_entries), -1, dtype=torch.int32, device=data.device)
    launch_place_tokens(
        (batch, ceil_div(num_tokens, 256), 1),
        (places, where.position, where.written),
        (where.position.stride(), where.written.stride()),
        (num_tokens, write.capacity),
        (operand, where.has_valid, 256),
        {"num_warps": 4, **ASSERTING},
    )
    tags = torch.empty((batch, num_kv_heads, operand.num_entries), dtype=torch.int32, device=data.device)
    launch_copy_tags((batch * num_kv_heads, 1, 1), (data, tags), (strides_of(data),), (num_kv_heads,), (operand,), {})
    at_once = blocks_per_program(operand.rotated, num_blocks, batch * num_kv_heads, data.device)
    launch_store_blocks(
        (batch * num_kv_heads, ceil_div(num_blocks, at_once), 1),
        (data, write.x, places, tags),
        (strides_of(data), write.x.stride()),
        (num_kv_heads, write.capacity, num_blocks, at_once, write.static_scale),
        (operand, precision(data.device)),
        {"num_warps": 8},
    )


def store_whole_blocks(data: Tensor, x: Tensor, layout: PackedLayout) -> None:
    """Write tokens to the first blocks of a cache in any format, without reading the blocks.

    Args:
        data: packed data without a header, uint8 [num_blocks, batch, num_kv_heads, block_bytes]; changed in place.
        x: [batch, num_kv_heads, num_tokens, head_dim], any float dtype, any strides; num_tokens is a multiple of the
            tokens of a block.
        layout: the layout of ``data``, without a residual.
    """
    operand, static_scale = operand_and_scale(layout.spec, layout.role, layout.head_dim, True, 0, False)
    positions = torch.arange(x.shape[2], device=x.device)
    _store_tokens(_Write(data, x, operand, static_scale), Positions.of(positions, None, x))


def store_header(data: Tensor, x: Tensor, num_written: Tensor | None, layout: PackedLayout) -> None:
    """Write the header of a cache that holds exactly the tokens ``x``.

    The specification is :func:`kvcompile.kernels.spec.residual.header_of`.

    Args:
        data: packed data with a residual, uint8 [num_blocks, batch, num_kv_heads, block_bytes]; changed in place.
        x: [batch, num_kv_heads, num_tokens, head_dim], any float dtype, any strides, at least one element.
        num_written: as in ``header_of``, int64 [] or [batch] on any device.
        layout: the layout of ``data``.
    """
    operand = _Write.of(data, x, layout).operand
    batch, num_kv_heads, num_tokens, _ = x.shape
    last = torch.full((batch, num_kv_heads), -1, dtype=torch.int32, device=x.device)
    tokens = operand.block_tokens
    launch_last_token(
        (batch * num_kv_heads, ceil_div(num_tokens, tokens), 1), (x, last), (x.stride(),), (num_kv_heads, num_tokens),
        (operand, tokens), {"num_warps": 4},
    )  # fmt: skip
    known = last if num_written is None else num_written.to(x.device).reshape(-1).expand(batch)
    launch_store_header(
        (batch * num_kv_heads, operand.num_entries, 1),
        (data, x, last, known),
        (strides_of(data), x.stride(), known.stride()),
        (num_kv_heads, num_tokens),
        (operand, num_written is not None),
        {"num_warps": 4},
    )
