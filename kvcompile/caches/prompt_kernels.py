"""Compile in parallel the kernels that read a prompt, before the model's first layer needs them.

``generate()`` reads a prompt in eager code, which would compile each kernel at its first launch, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcompile.caches.blockwise_window import is_blockwise
from kvcompile.caches.prompt import expects_first_prompt, takes_pairs_of_prompt
from kvcompile.compat.tracing import FakeTensorMode
from kvcompile.kernels.precompile import precompile
from kvcompile.kernels.spec.new_tokens import NewTokens
from kvcompile.packed.attention import attention_arguments
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.writes import takes_pairs


def precompile_prompt(layers: list[Any], prompt: Tensor, num_heads: int | None, *, exact: bool) -> None:
    """Start to compile the kernels of a prompt without padding; does nothing on a CPU.

    Args:
        layers: the layers of a static cache whose keys and values are packed.
        prompt: token ids, [batch, num_tokens].
        num_heads: query heads of every layer; None if unknown, or if attention does not read the layers. Its kernel is
            then compiled when it is needed.
        exact: whether attention to many new tokens is exact.
    """
    if not prompt.is_cuda:
        return
    for layer in layers:
        num_tokens, caches = prompt.shape[1], (layer.keys, layer.values)
        stores_pair = expects_first_prompt([layer], num_tokens) and takes_pairs_of_prompt(layer, *prompt.shape)
        if is_blockwise(layer) and num_tokens > layer.max_cache_len:
            num_tokens, stores_pair = layer.window, takes_pairs(*caches)
        data, specs = zip(*((cache.packed, cache.packed_layout.spec) for cache in caches), strict=True)
        new = [_of_projection(cache, cache.shape[1], num_tokens) for cache in caches]
        positions = prompt.new_empty(num_tokens)
        if stores_pair:
            precompile(torch.ops.kvcompile.store_pair.default, (*data, *new, positions, None, *specs), {})
        else:
            for cache, *store in zip(caches, data, new, strict=True):
                layout = cache.packed_layout
                precompile(torch.ops.kvcompile.store.default, (*store, positions, None, layout.spec, layout.role), {})
        if num_heads is not None:
            query = _of_projection(layer.keys, num_heads, num_tokens)
            if exact:
                caches = tuple(
                    cache.with_new_tokens(NewTokens(x, positions)) for cache, x in zip(caches, new, strict=True)
                )
            arguments = attention_arguments(query, caches, num_tokens, None, True, None)
            precompile(torch.ops.kvcompile.attention.default, (), arguments)


def _of_projection(cache: PackedTensor, num_heads: int, num_tokens: int) -> Tensor:
    """A fake tensor [batch, num_heads, num_tokens, head_dim] with the strides of a projection."""
    shape = (cache.shape[0], num_tokens, num_heads, cache.packed_layout.head_dim)
    with FakeTensorMode():
        return torch.empty(shape, dtype=cache.dtype, device=cache.device).transpose(1, 2)
