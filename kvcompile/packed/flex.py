"""``flex_attention`` on packed tensors, in eager code and in code that Dynamo traces.

Higher-order operators do not reach ``__torch_dispatch__``: each has an implementation for each type of tensor. While
Dynamo traces, it calls the implementation for fake tensors, which accepts no other type.

Eager code whose ``score_mod`` changes nothing attends to the packed bytes, with the mask that ``mask_mod`` describes.
All other calls dequantize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_mask

from kvcompile.compat.operators import flex_attention
from kvcompile.compat.pytree import tree_map_only
from kvcompile.compat.tracing import FakeTensorMode
from kvcompile.packed.attention import attend, packed_caches
from kvcompile.packed.live_view import LiveView
from kvcompile.packed.repeated_heads import RepeatedHeads
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor


def let_flex_attention_read(packed_type: type[PackedSubclass]) -> None:
    """Make ``flex_attention`` accept tensors of ``packed_type``."""
    of_fake_tensors = flex_attention.python_key_table[FakeTensorMode]

    def read_fake(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            args, kwargs = tree_map_only(packed_type, packed_type.dequantize, (args, kwargs))
        return of_fake_tensors(mode, *args, **kwargs)

    flex_attention.py_impl(packed_type)(_read)
    flex_attention.python_key_table[FakeTensorMode] = read_fake


def _read(*args: Any, **kwargs: Any) -> Any:
    result = _attended(*args, **kwargs)
    if result is not None:
        return result
    args, kwargs = tree_map_only(PackedSubclass, lambda x: x.dequantize(), (args, kwargs))
    return flex_attention(*args, **kwargs)


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> Any:
    """The results of ``flex_attention``, with NaN for a log-sum-exp and maxima that were not requested; None if
    attention on packed data cannot compute them."""
    wants_more = any(kernel_options.get(name, False) for name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX"))
    if wants_more or not _changes_nothing(score_mod):
        return None
    caches = packed_caches(query, key, value)
    if caches is None:
        return None

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return block_mask[-1](b, h, q, kv, *mask_mod_other_buffers)

    batch, num_heads, q_len, _ = query.shape
    mask = create_mask(mask_mod, batch, num_heads, q_len, key.shape[2], query.device)
    missing = query.new_full(query.shape[:3], torch.nan, dtype=torch.float32)
    return attend(query, caches, mask, scale=scale), missing, missing


def _changes_nothing(score_mod: Callable[..., Any]) -> bool:
    """Whether a traced ``score_mod`` returns the score that it gets."""
    if not isinstance(score_mod, GraphModule):
        return False
    score = next(iter(score_mod.graph.find_nodes(op="placeholder")))
    return score_mod.graph.output_node().args[0] is score


for _packed_type in (PackedTensor, LiveView, RepeatedHeads):
    let_flex_attention_read(_packed_type)
