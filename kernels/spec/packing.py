"""The plain-PyTorch specification of a packed cache: writing and reading tokens. Tests compare each fast path with it.

All functions are traceable: no Python depends on data, and sizes may be symbolic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.spec.residual import (
    Update,
    all_entries,
    entry_of,
    entry_scatter,
    header_of,
    is_few,
    token_update,
    vector_update,
    with_exact_blocks,
)


def write_tokens(
    data: Tensor,
    layout: PackedLayout,
    x: Tensor,
    positions: Tensor,
    valid: Tensor | None = None,
    first_sequence: int | None = None,
) -> Tensor:
    """A copy of ``data`` with the tokens ``x`` encoded at ``positions``.

    Args:
        data: uint8 [num_blocks, batch, num_kv_heads, block_bytes]; not changed.
        layout: the layout of ``data``.
        x: [batch, num_kv_heads, n, head_dim], any float dtype, any strides.
        positions: int64 [n], or [batch, n] if sequences have different positions. Positions lie within the cache, and
            the positions of a sequence are distinct, or tokens at equal positions are equal.
        valid: bool, of the same shape as ``positions``: where False, the token at the position keeps its bytes. None
            writes all tokens.
        first_sequence: if ``data`` has more sequences than ``x``, the sequence of ``data`` to which the first sequence
            of ``x`` is written; the others follow.

    Raises:
        ValueError: the format has scales per channel and the layout has no residual.
        IndexError, RuntimeError: a position is outside of the cache.
    """

    if layout.residual is None:
        return put_tokens(data, layout, encoded_tokens(layout, x), positions, valid, first_sequence)
    if is_few(x) and x.shape[2]:
        *index, values = few_tokens(data, layout, x, positions, valid, first_sequence)
        return data.index_put(tuple(index), values)
    data = data.clone()
    write_tokens_(_written(data, x, first_sequence), layout, x, positions, valid)
    return data


def _written(data: Tensor, x: Tensor, first_sequence: int | None) -> Tensor:
    """The sequences of ``data`` to which ``x`` is written."""
    return data if first_sequence is None else data.narrow(1, first_sequence, x.shape[0])


def encoded_tokens(layout: PackedLayout, x: Tensor) -> Tensor:
    """The first half of :func:`write_tokens` without a residual: tokens as bytes.

    Args:
        layout: a layout without a residual.
        x: [batch, num_kv_heads, n, head_dim], any float dtype.

    Returns:
        uint8 [batch, num_kv_heads, n, bytes_per_token].

    Raises:
        ValueError: the format has scales per channel.
    """
    if layout.format.granularity == "channel":
        raise ValueError(f"{layout.spec}: tokens that share scales are written through a residual; give the layout one")
    # With four dimensions Inductor would concatenate with channels first, and copy the result.
    sections = {name: section.flatten(0, 1) for name, section in layout.format.encode(x).items()}
    return layout.token_bytes(sections).unflatten(0, x.shape[:2])


def put_tokens(
    data: Tensor,
    layout: PackedLayout,
    encoded: Tensor,
    positions: Tensor,
    valid: Tensor | None = None,
    first_sequence: int | None = None,
) -> Tensor:
    """The second half of :func:`write_tokens` without a residual: a copy of ``data`` with the tokens ``encoded``.

    The other arguments are as in :func:`write_tokens`.
    """
    index, values = _byte_update(_written(data, encoded, first_sequence), layout, encoded, positions, valid)
    return data.index_put(_from_sequence(index, first_sequence), values)


def few_tokens(
    data: Tensor,
    layout: PackedLayout,
    x: Tensor,
    positions: Tensor,
    valid: Tensor | None = None,
    first_sequence: int | None = None,
) -> tuple[Tensor, ...]:
    """The bytes that :func:`write_tokens` changes with a residual, for few tokens; arguments as there.

    Returns:
        int64 indices of blocks; indices of sequences, if the sequences change different blocks; indices of heads and
        bytes, unless whole blocks change; and the new bytes, uint8. They are the arguments of an ``index_put`` on
        ``data``.
    """
    written = _written(data, x, first_sequence)
    index, values = token_update(written, layout, x, positions, valid).scatter(written, layout)
    if len(index) == 1 and first_sequence is not None:  # all sequences of x, by their numbers
        index = (index[0][:, None], torch.arange(x.shape[0], device=data.device))
    return *_from_sequence(index, first_sequence), values


def _from_sequence(index: tuple[Tensor, ...], first_sequence: int | None) -> tuple[Tensor, ...]:
    """An index into some sequences as an index into all of them."""
    if first_sequence is None:
        return index
    block, sequence, *places = index
    return block, sequence + first_sequence, *places


def write_tokens_(
    data: Tensor,
    layout: PackedLayout,
    x: Tensor,
    positions: Tensor,
    valid: Tensor | None = None,
    blocks: Tensor | None = None,
) -> None:
    """:func:`write_tokens` in place; without tokens it does nothing.

    With a residual, a write of many tokens encodes all blocks of the cache. A caller who knows the blocks in which the
    positions lie may pass them as ``blocks``, int64 [k], distinct; then only these are encoded.
    """
    if layout.residual is None:
        data.index_put_(*_byte_update(data, layout, encoded_tokens(layout, x), positions, valid))
    elif is_few(x):
        if x.shape[2]:
            data.index_put_(*token_update(data, layout, x, positions, valid).scatter(data, layout))
    else:
        _apply(data, layout, token_update(data, layout, x, positions, valid, blocks), blocks)


def move_tokens(data: Tensor, layout: PackedLayout, source: Tensor, target: Tensor | None = None) -> Tensor:
    """A copy of ``target`` in which token ``i`` has the bytes of token ``source[i]`` of ``data``.

    Args:
        data: uint8 [num_blocks, batch, num_kv_heads, block_bytes]; not changed.
        layout: the layout of ``data`` and ``target``, without a residual.
        source: int64 [n], positions in ``data``.
        target: packed data with the same batch and heads as ``data``; not changed. None stands for ``data``.

    Raises:
        ValueError: the layout has a residual; exact tokens are not part of the bytes of a token.
    """
    if layout.residual is not None:
        raise ValueError(f"{layout.spec}: tokens of a cache with a residual cannot be moved; give it no residual")
    sequence = torch.arange(data.shape[1], device=data.device)[:, None, None]
    head = torch.arange(data.shape[2], device=data.device)[None, :, None]
    place = torch.arange(source.shape[0], device=data.device)
    moved = data[byte_index(layout, sequence, head, source)]
    return (data if target is None else target).index_put(byte_index(layout, sequence, head, place), moved)


def write_vectors_(
    data: Tensor,
    layout: PackedLayout,
    vectors: Tensor,
    sequence: Tensor,
    head: Tensor,
    position: Tensor,
    valid: Tensor | None = None,
    blocks: Tensor | None = None,
) -> None:
    """Write single vectors to a cache with a residual, in place.

    Args:
        data: uint8 [num_blocks, batch, num_kv_heads, block_bytes]; changed in place.
        layout: the layout of ``data``, with a residual.
        vectors: [*N, head_dim], any float dtype.
        sequence, head, position: int64, broadcast to [*N]: the place of each vector. Without vectors nothing happens.
        valid: bool, broadcasts to [*N]: where False, nothing is written. None writes all vectors.
        blocks: as in :func:`write_tokens_`.
    """
    if _is_zero(vectors.numel()) or _is_zero(layout.token_blocks(data)):
        return
    _apply(data, layout, vector_update(data, layout, vectors, sequence, head, position, valid, blocks), blocks)


def _is_zero(extent: int) -> bool:
    """Whether a size is known to be 0; False for a size that is known only at run time."""
    return isinstance(extent, int) and extent == 0


def _apply(data: Tensor, layout: PackedLayout, update: Update, blocks: Tensor | None) -> None:
    """Carry out an update of ``blocks``, or of all blocks of tokens."""
    packed = _blocks_first(update.packed(layout))
    data.index_put_(*update.entry_scatter(layout))
    if blocks is None:
        data[layout.header_blocks :].copy_(packed)
    else:
        data.index_copy_(0, blocks + layout.header_blocks, packed)


def _blocks_first(packed: Tensor) -> Tensor:
    """[batch, num_kv_heads, num_blocks, block_bytes] -> [num_blocks, batch, num_kv_heads, block_bytes]."""
    return packed.permute(2, 0, 1, 3)


def replace_blocks_(data: Tensor, layout: PackedLayout, first: int, last: int, source: Tensor | None = None) -> None:
    """Replace the blocks of tokens from ``first`` to ``last - 1``, in place.

    Args:
        data: uint8 [num_blocks, batch, num_kv_heads, block_bytes]; changed in place.
        layout: the layout of ``data`` and ``source``.
        first: the first block of tokens to replace.
        last: the block of tokens after the last one to replace.
        source: packed data with the same batch and heads. Its blocks are copied byte by byte, with the exact blocks in
            its header. None stands for zeros.
    """
    begin, end = layout.header_blocks + first, layout.header_blocks + last
    if layout.residual is not None:
        tags, rows = layout.tags(data), layout.rows(data)
        tags = torch.where((tags > first) & (tags <= last), 0, tags)
        if source is not None:
            new_tags = layout.tags(source)
            taken = (new_tags > first) & (new_tags <= last)
            tags = torch.where(taken, new_tags, tags)
            rows = torch.where(taken[..., None, None], layout.rows(source), rows)
        data.index_put_(*entry_scatter(layout, all_entries(layout, data), rows, tags))
    if source is None:
        data[begin:end].zero_()
    else:
        data[begin:end].copy_(source[begin:end])


def drop_first_blocks_(data: Tensor, layout: PackedLayout, num_blocks: int) -> None:
    """Drop the first blocks of tokens, in place: block ``num_blocks`` becomes block 0, and zeros follow the last block.

    Bytes move, and nothing is quantized again. Exact blocks stay exact. One that becomes a sink block gets the
    entry of this block.

    Args:
        data: uint8 [num_blocks, batch, num_kv_heads, block_bytes]; changed in place.
        layout: the layout of ``data``.
        num_blocks: the number of blocks to drop, a multiple of the ``recent_blocks`` of a residual.

    Raises:
        ValueError: ``num_blocks`` is not such a multiple.
    """
    if layout.residual is not None:
        if layout.residual.recent_blocks and num_blocks % layout.residual.recent_blocks:
            raise ValueError(f"{num_blocks} blocks are not a multiple of {layout.residual.recent_blocks} recent blocks")
        entry, spare = all_entries(layout, data), layout.residual.num_entries
        block = layout.tags(data).long() - 1 - num_blocks
        moved_to = torch.where(block >= 0, entry_of(layout.residual, block), spare)
        tags = F.pad(block * 0, (0, 1)).scatter(-1, moved_to, block + 1)[..., :spare]
        source = F.pad(entry.expand_as(block), (0, 1)).scatter(-1, moved_to, entry.expand_as(block))[..., :spare]
        rows = layout.rows(data).take_along_dim(source[..., None, None], 2)
        data.index_put_(*entry_scatter(layout, entry, rows, tags))
    blocks = data[layout.header_blocks :]
    kept = blocks[num_blocks:].clone()  # the copy below overlaps it
    blocks[: len(kept)].copy_(kept)
    blocks[len(kept) :].zero_()


def pack_tokens(layout: PackedLayout, x: Tensor) -> Tensor:
    """Packed data of a cache that holds exactly the tokens ``x`` [batch, num_kv_heads, n, head_dim].

    The packed blocks are the same as after :func:`write_tokens` to a cache of zeros. With a residual the header comes
    from :func:`~kvcompile.kernels.spec.residual.header_of`.
    """
    blocks = pack_blocks(layout, x)
    return blocks if layout.residual is None else torch.cat([header_of(layout, x), blocks])


def pack_blocks(layout: PackedLayout, x: Tensor) -> Tensor:
    """The packed blocks of :func:`pack_tokens` without the header, encoded block by block."""
    if layout.residual is not None:
        x = x.to(layout.residual.dtype)
    padding = (0, 0, 0, -x.shape[2] % BLOCK_TOKENS)
    if layout.format.granularity == "channel":
        sections = layout.format.encode(F.pad(x, padding).unflatten(2, (-1, BLOCK_TOKENS)))
    else:
        sections = layout.format.encode(x)
        sections = {
            name: F.pad(section, padding).unflatten(2, (-1, BLOCK_TOKENS)) for name, section in sections.items()
        }
    packed = torch.cat(layout.block_byte_values(sections), -1).to(torch.uint8)
    return _blocks_first(packed).contiguous()


def float_blocks(layout: PackedLayout, x: Tensor) -> Tensor:
    """:func:`pack_tokens` of keys in a format of plain floats, as a view of ``x`` if it has whole blocks of tokens.

    Args:
        layout: a layout of keys in ``bfloat16``, ``float16`` or ``float32``, without a residual.
        x: [batch, num_kv_heads, n, head_dim] in the dtype of the format.

    Returns:
        uint8 [num_blocks, batch, num_kv_heads, block_bytes]. Blocks are contiguous, but lie in the order of ``x``. The
        result is a copy with zeros after the tokens if ``n`` is symbolic or not a multiple of BLOCK_TOKENS; symbolic
        lengths get the blocks of a growing cache, at least MIN_GROWING_BLOCKS.
    """
    n = x.shape[2]
    count = layout.blocks(n) if isinstance(n, int) else layout.growing_blocks(n)
    missing = count * BLOCK_TOKENS - n
    whole = (x if _is_zero(missing) else F.pad(x, (0, 0, 0, missing))).contiguous()
    return _blocks_first(whole.view(torch.uint8).unflatten(2, (count, BLOCK_TOKENS)).flatten(-2))


def _byte_update(
    data: Tensor, layout: PackedLayout, encoded: Tensor, positions: Tensor, valid: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Indices and values, [batch, heads, n, bytes_per_token], of the one ``index_put`` that writes encoded tokens."""
    batch, heads = encoded.shape[:2]
    positions = positions[..., None, :]
    sequence = torch.arange(batch, device=data.device)[:, None, None]
    head = torch.arange(heads, device=data.device)[None, :, None]
    index = byte_index(layout, sequence, head, positions)
    if valid is not None:
        encoded = torch.where(valid[..., None, :, None], encoded, data[index])
    return index, encoded


def byte_index(layout: PackedLayout, sequence: Tensor, head: Tensor, position: Tensor) -> tuple[Tensor, ...]:
    """Index into ``data`` of the bytes of token vectors, in the order of :meth:`PackedLayout.token_bytes`.

    ``sequence``, ``head`` and ``position`` are int64 and broadcast to the vectors [*N]; the returned tensors broadcast
    to [*N, bytes_per_token].
    """
    offsets = layout.byte_offsets(position % BLOCK_TOKENS)
    return (position // BLOCK_TOKENS)[..., None], sequence[..., None], head[..., None], offsets


def read_tokens(data: Tensor, layout: PackedLayout, num_tokens: int) -> Tensor:
    """The first ``num_tokens`` tokens, dequantized: float32 [batch, num_kv_heads, num_tokens, head_dim].

    Tokens of exact blocks are read from the header, as they were written.
    """
    x = _decoded(data, layout)
    return _token_major(x if layout.residual is None else with_exact_blocks(x, data, layout), num_tokens)


def _decoded(data: Tensor, layout: PackedLayout) -> Tensor:
    """The dequantized vectors of all blocks: float32 [num_blocks, batch, num_kv_heads, BLOCK_TOKENS, head_dim]."""
    sections, fmt = layout.split(data), layout.format
    if not fmt.is_calibrated:
        return fmt.decode(sections)
    decoded = fmt.decode({name: section.flatten(0, 1) for name, section in sections.items()})  # heads are dimension 1
    return decoded.unflatten(0, (-1, data.shape[1]))


def to_cache_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantized values ``x`` in the dtype of their cache; finite values stay finite.

    Values of an fp16 cache may dequantize to slightly more than fp16 can hold, and are clamped. Infinities and NaN
    stay, because they were written.
    """
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        x = torch.where(x.isfinite(), x.clamp(-largest, largest), x)
    return x.to(dtype)


def read_stored_tokens(data: Tensor, layout: PackedLayout, num_tokens: int) -> Tensor:
    """:func:`read_tokens` in the stored basis: tokens of a rotated format stay rotated. Not for calibrated formats."""
    x = layout.format.decode_levels(layout.split(data))
    if layout.residual is not None:
        x = with_exact_blocks(x, data, layout, stored_basis=True)
    return _token_major(x, num_tokens)


def _token_major(x: Tensor, num_tokens: int) -> Tensor:
    """[num_blocks, batch, heads, BLOCK_TOKENS, head_dim] -> [batch, heads, num_tokens, head_dim]."""
    token = torch.arange(num_tokens, device=x.device)
    return x[token // BLOCK_TOKENS, :, :, token % BLOCK_TOKENS].permute(1, 2, 0, 3)
