"""Compile the kernels that read a prompt, all at once, before the model's first layer needs them.

``generate()`` reads a prompt in eager code. Each kernel would be compiled when it is launched first, one after the
other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.tracing import FakeTensorMode
from kvcompile.kernels.precompile import precompile
from kvcompile.packed.tensor import PackedTensor


def precompile_prompt(layers: list[Any], prompt: Tensor, num_heads: int | None) -> None:
    """Start to compile the kernels of a prompt without padding; does nothing on a CPU.

    Args:
        layers: the layers of a static cache whose keys and values are packed.
        prompt: token ids, [batch, num_tokens].
        num_heads: query heads of every layer; None if unknown. Attention is then compiled when it runs.
    """
    if not prompt.is_cuda:
        return
    with FakeTensorMode():
        for layer in layers:
            for cache in (layer.keys, layer.values):
                _precompile_store(cache, prompt.shape[1])
            if num_heads is not None:
                _precompile_attention(layer.keys, layer.values, prompt.shape[1], num_heads)


def _precompile_store(cache: PackedTensor, num_tokens: int) -> None:
    layout = cache.packed_layout
    x = _of_projection(cache, cache.shape[1], num_tokens, layout.head_dim)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=cache.device)
    precompile(torch.ops.kvcompile.store.default, (cache.packed, x, positions, None, layout.spec, layout.role), {})


def _precompile_attention(keys: PackedTensor, values: PackedTensor, num_tokens: int, num_heads: int) -> None:
    (k_data, k_layout), (v_data, v_layout) = ((cache.packed, cache.packed_layout) for cache in (keys, values))
    how = {
        "mask": None,
        "sinks": None,
        "kv_len": num_tokens,
        "is_causal": True,
        "scale": k_layout.head_dim**-0.5,
        "softcap": 0.0,
        "k_format": k_layout.spec,
        "v_format": v_layout.spec,
        "v_head_dim": v_layout.head_dim,
    }
    query = _of_projection(keys, num_heads, num_tokens, k_layout.head_dim)
    precompile(torch.ops.kvcompile.attention.default, (query, k_data, v_data), how)


def _of_projection(cache: PackedTensor, num_heads: int, num_tokens: int, head_dim: int) -> Tensor:
    """A fake tensor [batch, num_heads, num_tokens, head_dim] with the strides of a projection."""
    shape = (cache.shape[0], num_tokens, num_heads, head_dim)
    return torch.empty(shape, dtype=cache.dtype, device=cache.device).transpose(1, 2)
