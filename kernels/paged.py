"""The operator ``kvcompile::paged_attention``: the step of one layer on a paged cache that all layers share.

The operator quantizes the new keys and values of a continuous batch into the pool and attends to the packed tokens. It
mutates ``pool``, and nothing else. Its schema says this, so a graph that calls the operator for every layer passes one
pool along, and Inductor updates the pool in place. :mod:`kvcompile.kernels.layout.pages` has the bytes of the pool, and
:mod:`kvcompile.kernels.spec.pages` the form of a continuous batch.

Attention also reads the packed bytes of the new tokens. All queries therefore see a token in the same form, whether it
was computed in this batch, in an earlier one, or by another sequence with the same prefix.

There are two kinds of batches:

- With ``block_table`` each sequence has one new token. The pages of a sequence are gathered, and it attends to them.
- Without it, ``write_slots`` and ``read_slots`` name the slots of the new and of the visible tokens. Without
  ``read_slots`` all visible tokens are new. All tokens are gathered as one sequence, and a mask hides the
  tokens of other sequences.

Gathering copies packed bytes (``kvcompile::gather``). The operator is made of the operators of
:mod:`kvcompile.kernels.ops`, so that plain PyTorch runs on a CPU, and Triton kernels run on a GPU. It reads no value of
a GPU on the host, and CUDA graphs can record it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels import ops  # noqa: F401 - defines the operators
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, num_blocks
from kvcompile.kernels.layout.pages import data_of_layer
from kvcompile.kernels.spec.pages import places_of_new_tokens, slots_of_pages, visible_tokens

MASK_ELEMENTS = 1 << 28
"""The most elements of a mask; queries that need a larger mask attend one part after the other."""

GATHERED_BYTES = 1 << 29
"""The most bytes of keys, or of values, that are gathered for the sequences of a block table at once."""

_library = torch.library.Library("kvcompile", "FRAGMENT")
_library.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) pool, Tensor? write_slots, Tensor? read_slots, "
    "Tensor? block_table, Tensor cu_seq_lens_q, Tensor cu_seq_lens_k, Tensor? sinks, int block_bytes, int first_byte, "
    "int page_size, int window, float scale, float softcap, str k_format, str v_format) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@dataclass(frozen=True)
class _Layer:
    """The packed data of a layer in a pool, and how its attention is computed."""

    keys: Tensor
    values: Tensor
    key: PackedLayout
    value: PackedLayout
    sinks: Tensor | None
    scale: float
    softcap: float

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The packed keys and values of the tokens in ``slots`` [batch, num_tokens]."""
        gather = torch.ops.kvcompile.gather
        return (
            gather(self.keys, slots, self.key.spec, "key", self.key.head_dim),
            gather(self.values, slots, self.value.spec, "value", self.value.head_dim),
        )

    def empty(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Packed keys and values of one sequence of zeros, with room for ``num_tokens`` tokens."""
        blocks = num_blocks(num_tokens)
        return tuple(x.new_zeros((blocks, *x.shape[1:])) for x in (self.keys, self.values))  # type: ignore[return-value]

    def store(
        self, data: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], slots: Tensor, valid: Tensor | None
    ) -> None:
        """Quantize the keys and values ``new`` [1, num_kv_heads, num_tokens, head_dim] into packed ``data``."""
        torch.ops.kvcompile.store_pair(*data, *new, slots, valid, self.key.spec, self.value.spec)

    def attend(self, query: Tensor, data: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attention of ``query`` [batch, num_heads, q_len, head_dim] on packed ``data`` under a bool ``mask``."""
        return torch.ops.kvcompile.attention(
            query, *data, mask, self.sinks, mask.shape[-1], False, self.scale, self.softcap, self.key.spec,
            self.value.spec, self.value.head_dim,
        )  # fmt: skip


def _paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    write_slots: Tensor | None,
    read_slots: Tensor | None,
    block_table: Tensor | None,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    sinks: Tensor | None,
    block_bytes: int,
    first_byte: int,
    page_size: int,
    window: int,
    scale: float,
    softcap: float,
    k_format: str,
    v_format: str,
) -> Tensor:
    """One layer of a continuous batch.

    Args:
        query: [1, num_heads, num_queries, head_dim], any float dtype.
        key, value: the new tokens, [1, num_kv_heads, num_queries, head_dim].
        pool: uint8 [num_bytes], the paged cache; changed in place. No sequence has slot 0, which holds zeros.
        write_slots: int64 [num_queries], the slot of each new token. Padding may share a slot that no token uses.
        read_slots: int64 [num_tokens], the slots of the visible tokens, with padding; None or empty if all visible
            tokens are new. With a window the slots of the new tokens have no meaning.
        block_table: int [num_queries, max_pages], the pages of each sequence; takes the place of the slots.
        cu_seq_lens_q, cu_seq_lens_k: int [num_sequences + 1].
        sinks: [num_heads], attention sinks; None without.
        block_bytes, first_byte: see :class:`~kvcompile.kernels.layout.pages.PagedLayer`.
        page_size: tokens of a page, a multiple of BLOCK_TOKENS.
        window: tokens of a sliding window, whose old tokens the new tokens overwrite; 0 without a window.
        scale, softcap: as in :func:`~kvcompile.kernels.spec.attention.attend`.
        k_format, v_format: the formats of keys and values, without a residual.

    Returns:
        [1, num_heads, num_queries, head_dim of values] in the dtype of ``query``; zeros for padding.

    Raises:
        ValueError: the tensors do not fit, or the arguments name neither slots nor pages.
    """
    layouts = PackedLayout.parse(k_format, "key", key.shape[3]), PackedLayout.parse(v_format, "value", value.shape[3])
    _check(query, key, value, pool, layouts, block_bytes, page_size)
    data = data_of_layer(pool, *layouts, key.shape[1], first_byte, block_bytes)
    layer = _Layer(*data, *layouts, sinks, scale, softcap)
    if block_table is not None:
        return _attend_pages(layer, query, (key, value), block_table, cu_seq_lens_k, page_size)
    if write_slots is None or write_slots.shape[0] != query.shape[2]:
        raise ValueError("kvcompile::paged_attention: pass block_table, or write_slots with one slot for each query")
    if read_slots is not None and read_slots.shape[0] == 0:
        read_slots = None
    if window:
        seen = _with_old_tokens(layer, (key, value), read_slots, cu_seq_lens_q, cu_seq_lens_k)
    else:
        seen = _with_stored_tokens(layer, (key, value), write_slots, read_slots)
    num_tokens = query.shape[2] if read_slots is None else read_slots.shape[0]
    out = _attend_slots(layer, query, seen, num_tokens, cu_seq_lens_q, cu_seq_lens_k, window)
    if window:
        layer.store(data, (key, value), write_slots, None)
    return out


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    layouts: tuple[PackedLayout, PackedLayout],
    block_bytes: int,
    page_size: int,
) -> None:
    """Raise ValueError for tensors that the other operators would not refuse by themselves."""
    if query.shape[0] != 1 or key.shape[0] != 1 or key.shape[:3] != value.shape[:3] or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"kvcompile::paged_attention: query {list(query.shape)}, key {list(key.shape)} and value "
            f"{list(value.shape)} must be [1, heads, num_queries, head_dim] with the same number of queries"
        )
    if pool.dtype != torch.uint8 or pool.dim() != 1 or pool.shape[0] % block_bytes:
        raise ValueError(
            f"kvcompile::paged_attention: pool must be uint8 [num_bytes], whole blocks of {block_bytes} bytes, but is "
            f"{pool.dtype} {list(pool.shape)}"
        )
    if page_size % BLOCK_TOKENS or any(layout.residual is not None for layout in layouts):
        raise ValueError(
            f"kvcompile::paged_attention: page_size {page_size} must be a multiple of {BLOCK_TOKENS}, and the formats "
            f"{layouts[0].spec} and {layouts[1].spec} must keep no tokens in full precision"
        )


def _with_stored_tokens(
    layer: _Layer, new: tuple[Tensor, Tensor], write_slots: Tensor, read_slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The visible tokens as packed data, after a store of the new ones."""
    layer.store((layer.keys, layer.values), new, write_slots, None)
    return layer.gather((write_slots if read_slots is None else read_slots)[None])


def _with_old_tokens(
    layer: _Layer,
    new: tuple[Tensor, Tensor],
    read_slots: Tensor | None,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
) -> tuple[Tensor, Tensor]:
    """The visible tokens of a sliding window as packed data, before new tokens overwrite old ones in the pool."""
    num_queries = new[0].shape[2]
    places, valid = places_of_new_tokens(cu_seq_lens_q, cu_seq_lens_k, num_queries)
    seen = layer.empty(num_queries) if read_slots is None else layer.gather(read_slots[None])
    layer.store(seen, new, places, valid)
    return seen


def _attend_slots(
    layer: _Layer,
    query: Tensor,
    seen: tuple[Tensor, Tensor],
    num_tokens: int,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    window: int,
) -> Tensor:
    """Attention on tokens of all sequences, gathered as one sequence."""
    at_once = max(BLOCK_TOKENS, MASK_ELEMENTS // max(num_tokens, 1))
    parts, begin = [], 0
    for part in query.split(at_once, 2):
        queries = torch.arange(begin, begin + part.shape[2], device=query.device)
        mask = visible_tokens(cu_seq_lens_q, cu_seq_lens_k, queries, num_tokens, window)
        parts.append(layer.attend(part, seen, mask[None, None]))
        begin += part.shape[2]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _attend_pages(
    layer: _Layer,
    query: Tensor,
    new: tuple[Tensor, Tensor],
    block_table: Tensor,
    cu_seq_lens_k: Tensor,
    page_size: int,
) -> Tensor:
    """The step of sequences with one new token each; a sequence of length 0 is padding."""
    lengths = cu_seq_lens_k.diff().long()
    position = (lengths - 1).clamp_min(0)
    page = block_table.long().gather(1, (position // page_size)[:, None])[:, 0].clamp_min(0)
    layer.store((layer.keys, layer.values), new, page * page_size + position % page_size, lengths > 0)

    kv_len = block_table.shape[1] * page_size
    if not lengths.is_cuda:
        kv_len = min(kv_len, max(int(lengths.max()), 1))
    widest = max(layer.keys.shape[2] * layer.keys.shape[3], layer.values.shape[2] * layer.values.shape[3])
    at_once = max(1, GATHERED_BYTES // (num_blocks(kv_len) * widest))
    token = torch.arange(kv_len, device=query.device)
    queries, parts = query[0].transpose(0, 1).unsqueeze(2), []
    for part, table, length in zip(
        queries.split(at_once), block_table.split(at_once), lengths.split(at_once), strict=True
    ):
        visible = token < length[:, None]
        slots = slots_of_pages(table, page_size, kv_len)
        seen = layer.gather(torch.where(visible, slots, 0))  # hidden slots may hold NaN, and slot 0 holds zeros
        parts.append(layer.attend(part, seen, visible[:, None, None]))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.squeeze(2).transpose(0, 1)[None].contiguous()


def _paged_attention_fake(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


for _device in ("CPU", "CUDA"):
    _library.impl("paged_attention", _paged_attention, _device)
torch.library.register_fake("kvcompile::paged_attention", _paged_attention_fake, lib=_library)
