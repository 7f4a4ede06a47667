"""Attention by cuDNN, which PyTorch reaches through a private operator.

``scaled_dot_product_attention`` under ``sdpa_kernel`` would do the same, but ``sdpa_kernel`` changes a setting of all
threads. Without the operator :func:`cudnn_serves` is false, and the Triton kernel is the fallback.
"""

from __future__ import annotations

import torch
from torch import Tensor

_OPERATOR = getattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", None)


def cudnn_serves(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> bool:
    """Whether :func:`cudnn_attention` takes these arguments, and the user has not switched cuDNN off."""
    if not query.is_cuda:  # PyTorch would look for a device, and raise where there is none
        return False
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, is_causal, True)
    return _OPERATOR is not None and torch.backends.cuda.can_use_cudnn_attention(parameters)


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    """``scaled_dot_product_attention`` without a mask; query heads may share KV heads.

    Args:
        query: [batch, num_heads, q_len, head_dim].
        key: [batch, num_kv_heads, kv_len, head_dim].
        value: [batch, num_kv_heads, kv_len, v_head_dim].
    """
    assert _OPERATOR is not None, "cudnn_serves was asked"
    return _OPERATOR(query, key, value, None, False, 0.0, is_causal, scale=scale)[0]
