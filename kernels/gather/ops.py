"""The operators ``kvcompile::gather``, ``kvcompile::reorder`` and ``kvcompile::move``, which copy packed bytes.

``gather`` gathers tokens of a packed pool by their slots, as packed data of sequences. Its specification,
:func:`kvcompile.kernels.spec.gather.gather_tokens`, runs on a CPU. A Triton kernel that agrees with it runs on a GPU. A
slot outside of the pool raises an IndexError on a CPU, and fails an assertion on a GPU.

``reorder`` gives the packed data whose sequence ``i`` is sequence ``sequences[i]`` of ``data``, with its exact blocks.
``move`` gives the packed data whose token ``i`` is token ``source[i]`` of ``data``
(:func:`kvcompile.kernels.spec.packing.move_tokens`).

Tensors that do not fit raise a ValueError. Importing this module needs neither Triton nor a GPU.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kvcompile.kernels.gather import kernel
from kvcompile.kernels.gather.words import select
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role, num_blocks
from kvcompile.kernels.spec.gather import gather_tokens
from kvcompile.kernels.spec.packing import move_tokens

_library = torch.library.Library("kvcompile", "FRAGMENT")
_library.define(
    "gather(Tensor data, Tensor slots, str format, str role, int head_dim) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define("reorder(Tensor data, Tensor sequences) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    "move(Tensor data, Tensor source, str format, str role, int head_dim) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _gather(data: Tensor, slots: Tensor, format: str, role: str, head_dim: int) -> Tensor:
    layout = PackedLayout.parse(format, cast(Role, role), head_dim)
    if data.dtype != torch.uint8 or data.dim() != 4 or data.shape[1] != 1 or data.shape[3] != layout.block_bytes:
        raise ValueError(
            f"kvcompile::gather: data must be uint8 [num_blocks, 1, num_kv_heads, {layout.block_bytes}], a pool of "
            f"{layout.spec} with head_dim {head_dim}, but is {data.dtype} {list(data.shape)}"
        )
    if slots.dtype != torch.int64 or slots.dim() != 2 or slots.device != data.device:
        raise ValueError(
            f"kvcompile::gather: slots must be int64 [batch, num_tokens] on {data.device}, but is {slots.dtype} "
            f"{list(slots.shape)} on {slots.device}"
        )
    if layout.residual is None and data.is_cuda:
        return kernel.gather(data, layout, slots)
    return gather_tokens(data, layout, slots).contiguous()


def _gather_fake(data: Tensor, slots: Tensor, format: str, role: str, head_dim: int) -> Tensor:
    return data.new_empty((num_blocks(slots.shape[1]), slots.shape[0], *data.shape[2:]))


def _reorder(data: Tensor, sequences: Tensor) -> Tensor:
    if data.dtype != torch.uint8 or data.dim() != 4:
        raise ValueError(
            f"kvcompile::reorder: data must be uint8 [num_blocks, batch, num_kv_heads, block_bytes], but is "
            f"{data.dtype} {list(data.shape)}"
        )
    if sequences.dtype != torch.int64 or sequences.dim() != 1 or sequences.device != data.device:
        raise ValueError(
            f"kvcompile::reorder: sequences must be int64 [n] on {data.device}, but is {sequences.dtype} "
            f"{list(sequences.shape)} on {sequences.device}"
        )
    return select(data, 1, sequences)


def _reorder_fake(data: Tensor, sequences: Tensor) -> Tensor:
    return data.new_empty((data.shape[0], sequences.shape[0], *data.shape[2:]))


def _move(data: Tensor, source: Tensor, format: str, role: str, head_dim: int) -> Tensor:
    layout = PackedLayout.parse(format, cast(Role, role), head_dim)
    if data.dtype != torch.uint8 or data.dim() != 4 or data.shape[3] != layout.block_bytes:
        raise ValueError(
            f"kvcompile::move: data must be uint8 [num_blocks, batch, num_kv_heads, {layout.block_bytes}], a cache in "
            f"{layout.spec} with head_dim {head_dim}, but is {data.dtype} {list(data.shape)}"
        )
    if source.dtype != torch.int64 or source.dim() != 1 or source.device != data.device:
        raise ValueError(
            f"kvcompile::move: source must be int64 [n] on {data.device}, but is {source.dtype} {list(source.shape)} "
            f"on {source.device}"
        )
    return move_tokens(data, layout, source)


def _move_fake(data: Tensor, source: Tensor, format: str, role: str, head_dim: int) -> Tensor:
    return data.new_empty(data.shape)


for _device in ("CPU", "CUDA"):
    _library.impl("gather", _gather, _device)
    _library.impl("reorder", _reorder, _device)
    _library.impl("move", _move, _device)
torch.library.register_fake("kvcompile::gather", _gather_fake, lib=_library)
torch.library.register_fake("kvcompile::reorder", _reorder_fake, lib=_library)
torch.library.register_fake("kvcompile::move", _move_fake, lib=_library)
