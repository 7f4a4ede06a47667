"""The operator ``kvcompile::gather``: it gathers tokens of a packed pool by their slots, as packed data of sequences.

:func:`kvcompile.kernels.spec.gather.gather_tokens` specifies it, and runs on a CPU. A Triton kernel that agrees with
this function runs on a GPU. Tensors that do not fit raise a ValueError. A slot outside of the pool raises an IndexError
on a CPU, and fails an assertion on a GPU. Importing this module needs neither Triton nor a GPU.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kvcompile.kernels.gather import kernel
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role, num_blocks
from kvcompile.kernels.spec.gather import gather_tokens

_library = torch.library.Library("kvcompile", "FRAGMENT")
_library.define(
    "gather(Tensor data, Tensor slots, str format, str role, int head_dim) -> Tensor",
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


for _device in ("CPU", "CUDA"):
    _library.impl("gather", _gather, _device)
torch.library.register_fake("kvcompile::gather", _gather_fake, lib=_library)
