"""Compute attention to the last tokens of a cache as attention to all its tokens, with a mask that hides the first.

A window that begins at another token in each step (``keys[:, :, -window:]``) needs no copy. Kernels read only the
blocks in which a bool mask shows a token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Graph

from kvcompile.passes.graph.aten import Size, shape_of
from kvcompile.passes.graph.inline import inline, size_node
from kvcompile.passes.marker import Marker


def hide_first_tokens(graph: Graph, marker: Marker, first_token: Size, num_tokens: Size) -> Marker:
    """``marker``, with a mask for all tokens up to the last token that it reads.

    Args:
        graph: the graph; nodes go to its insertion point.
        marker: an attention to ``num_tokens`` tokens.
        first_token: the first token that it reads, which is the number of hidden tokens.
        num_tokens: the number of tokens that it reads.
    """
    first, num = (size_node(graph, size) for size in (first_token, num_tokens))
    if marker.mask is not None:
        return replace(marker, mask=inline(graph, _behind_hidden, marker.mask, first, num))
    q_len = size_node(graph, shape_of(marker.query)[2] if marker.is_causal else 1)
    device, is_causal = marker.query.meta["val"].device, marker.is_causal

    def new_mask(first: int, num: int, q_len: int) -> Tensor:
        shown = torch.ones(q_len, num, dtype=torch.bool, device=device)
        return _behind_hidden(shown.tril() if is_causal else shown, first, num)

    return replace(marker, mask=inline(graph, new_mask, first, num, q_len), is_causal=False)


def _behind_hidden(mask: Tensor, first: int, num: int) -> Tensor:
    """``mask``, bool or float, whose last dimension broadcasts to ``num``, behind ``first`` hidden tokens."""
    mask = mask.expand(*mask.shape[:-1], num)
    hidden = mask.new_full((*mask.shape[:-1], first), False if mask.dtype == torch.bool else -torch.inf)
    return torch.cat([hidden, mask], -1)
