"""The slots that the queries of a continuous batch write, and the tokens that they see, in plain PyTorch.

A continuous batch holds new tokens of several sequences in one row. ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int
[num_sequences + 1], say where the new tokens and the visible tokens of each sequence begin; the last entries are the
totals. The last visible tokens of a sequence are its new tokens. A batch may be padded: sequences at the end may be
empty, and tokens after the totals belong to no sequence. No function reads a value on the host, so that CUDA graphs can
record all functions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequences_of(cu_seq_lens: Tensor, index: Tensor) -> Tensor:
    """The sequence to which each token belongs, int64 of the shape of ``index``; num_sequences for padding."""
    return torch.searchsorted(cu_seq_lens[1:].to(index.dtype), index, right=True)


def visible_tokens(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, queries: Tensor, num_tokens: int, window: int = 0
) -> Tensor:
    """Which tokens each query sees: bool [num_queries, num_tokens].

    A query sees the tokens of its sequence up to itself, and no more than the last ``window`` of them.

    Args:
        cu_seq_lens_q, cu_seq_lens_k: see the file's docstring.
        queries: int64 [num_queries], indices of new tokens.
        num_tokens: the number of visible tokens of all sequences, with padding.
        window: tokens of a sliding window, the query's own token included; 0 without a window.
    """
    ends_q, starts_k = cu_seq_lens_q[1:].long(), cu_seq_lens_k[:-1].long()
    tokens = torch.arange(num_tokens, device=queries.device)
    query_sequence, token_sequence = sequences_of(cu_seq_lens_q, queries), sequences_of(cu_seq_lens_k, tokens)
    last = ends_q.shape[0] - 1
    query_row, token_row = query_sequence.clamp_max(last), token_sequence.clamp_max(last)
    lengths = cu_seq_lens_k.diff().long()
    query_position = (queries - ends_q[query_row] + lengths[query_row])[:, None]
    token_position = tokens - starts_k[token_row]
    same = (query_sequence[:, None] == token_sequence) & (query_sequence <= last)[:, None]
    visible = same & (token_position <= query_position)
    return visible & (token_position > query_position - window) if window else visible


def places_of_new_tokens(cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
    """The places of the new tokens among the visible tokens: int64 [num_queries], and which of them are not padding."""
    queries = torch.arange(num_queries, device=cu_seq_lens_q.device)
    sequence = sequences_of(cu_seq_lens_q, queries)
    last = cu_seq_lens_q.shape[0] - 2
    row = sequence.clamp_max(last)
    places = queries + (cu_seq_lens_k[1:].long() - cu_seq_lens_q[1:].long())[row]
    valid = sequence <= last
    return torch.where(valid, places, 0), valid


def slots_of_pages(block_table: Tensor, page_size: int, num_tokens: int) -> Tensor:
    """The slots of the first ``num_tokens`` tokens of each sequence: int64 [num_sequences, num_tokens].

    Args:
        block_table: int [num_sequences, max_pages], the pages of each sequence; -1 stands for no page, and slots of the
            first page take its place.
        page_size: tokens of a page.
        num_tokens: at most ``max_pages * page_size``.
    """
    token = torch.arange(num_tokens, device=block_table.device)
    return block_table.long().clamp_min(0)[:, token // page_size] * page_size + token % page_size
