"""Scores of queries on packed keys, computed on their levels; helpers that read levels, scales and zero points.

This file is a part of the specification of attention (:mod:`kvcompile.kernels.spec.attention`). Everything has block
form: the first dimension is the block, and the last but one, or the last, is the token in its block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format, computed_once
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.spec.key_factors import KeyFactors
from kvcompile.kernels.spec.residual import exact_blocks, holding_entries


def scores_of(q: Tensor, data: Tensor, layout: PackedLayout) -> Tensor:
    """``q . k`` in block form for queries [batch, num_kv_heads, rows, head_dim]."""
    fmt = layout.format
    scores = _packed_scores(fmt.query_in_stored_basis(q), data, layout)
    if fmt.is_calibrated:
        of_mean = (q * fmt.mean(q)).sum(-1, keepdim=True)
        scores = scores + torch.where(is_written(data, layout), of_mean, 0.0)
    if layout.residual is None:
        return scores
    # The same products with the tokens of all entries; exact blocks then take the scores of their entry.
    keys = layout.rows(data).float().unsqueeze(3)
    of_entries = (keys * computed_once(q)[:, :, None, :, None]).sum(-1)
    entry, exact = holding_entries(data, layout)
    exact_scores = of_entries[:, :, entry].permute(2, 0, 1, 3, 4)
    return torch.where(exact[..., None, None], exact_scores, scores)


def _packed_scores(q: Tensor, data: Tensor, layout: PackedLayout) -> Tensor:
    """``q . k`` in block form for queries in the stored basis."""
    sections, fmt = layout.split(data), layout.format
    levels = levels_of(sections, fmt, transposed=False)
    q = times_static_scale(q, fmt)
    zero_scores = None
    if fmt.granularity == "channel":
        if "zero" in sections:
            zero_scores = (sections["zero"].float() * q).sum(-1, keepdim=True)
        q = sections["scale"].float() * q
    # One reduction per row, over the same bytes: Inductor fuses them into one loop, which decodes a byte once.
    rows = []
    for row in computed_once(q).unsqueeze(-2).unbind(-3):
        products = [level * plane for level, plane in zip(levels, row.chunk(len(levels), dim=-1), strict=True)]
        if fmt.granularity == "plane":
            products = [
                product.sum(-1, keepdim=True) * scale
                for product, scale in zip(products, scales_of_planes(sections, fmt), strict=True)
            ]
        rows.append(sum(products[1:], products[0]).sum(-1))
    scores = torch.stack(rows, 3)
    if zero_scores is not None:
        scores = scores + zero_scores
    if fmt.granularity != "token":
        return scores
    if "scale" in sections:
        scores = scores * per_token(sections["scale"])
    if "zero" in sections:
        scores = scores + per_token(sections["zero"]) * q.sum(-1, keepdim=True)
    return scores


def scores_with_factors(q: Tensor, factors: KeyFactors, data: Tensor, layout: PackedLayout) -> Tensor:
    """The scores of :class:`KeyFactors` in block form, for a format that is neither rotated nor calibrated.

    Args:
        q: scaled queries, float32 [batch, num_kv_heads, rows, head_dim].
        factors: its ``paired`` has the shape and the scale of ``q``. Its tokens fill the blocks of ``data``.
        data: packed keys.
        layout: the layout of ``data``.
    """
    # One reduction per row, as in _packed_scores. The query of a row differs between tokens.
    of_blocks = factors.factors.float().unflatten(1, (-1, 1, 1, BLOCK_TOKENS))
    pairs = [
        (row.unsqueeze(-2), paired.unsqueeze(-2))
        for row, paired in zip(computed_once(q).unbind(2), computed_once(factors.paired).unbind(2), strict=True)
    ]
    scores = torch.stack([_packed_score(of_blocks, pair, data, layout) for pair in pairs], 3)
    if layout.residual is None:
        return scores
    keys, (block, _) = layout.rows(data).float(), exact_blocks(data, layout)
    of_entries = of_blocks[:, :, 0, 0][:, block]  # [2, batch, heads, entries, 64, head_dim]
    rows = [(keys * _query_of_tokens(of_entries, [x.unsqueeze(2) for x in pair])).sum(-1) for pair in pairs]
    entry, exact = holding_entries(data, layout)
    exact_scores = torch.stack(rows, 3)[:, :, entry].permute(2, 0, 1, 3, 4)
    return torch.where(exact[..., None, None], exact_scores, scores)


def _query_of_tokens(factors: Tensor, pair: Sequence[Tensor]) -> Tensor:
    """The query by which the keys of each token are multiplied."""
    return factors[0] * pair[0] + factors[1] * pair[1]


def _packed_score(factors: Tensor, pair: Sequence[Tensor], data: Tensor, layout: PackedLayout) -> Tensor:
    """The scores of one query row, [num_blocks, batch, num_kv_heads, BLOCK_TOKENS]."""
    sections, fmt = layout.split(data), layout.format
    levels = levels_of(sections, fmt, transposed=False)
    row = times_static_scale(_query_of_tokens(factors, pair), fmt)
    scaled = sections["scale"].float() * row if fmt.granularity == "channel" else row
    products = [level * plane for level, plane in zip(levels, scaled.chunk(len(levels), dim=-1), strict=True)]
    if fmt.granularity == "plane":
        products = [
            product.sum(-1, keepdim=True) * scale
            for product, scale in zip(products, scales_of_planes(sections, fmt), strict=True)
        ]
    scores: Tensor = sum(products[1:], products[0]).sum(-1)
    if fmt.granularity == "token" and "scale" in sections:
        scores = scores * sections["scale"].float().squeeze(-1)
    if fmt.granularity in ("token", "channel") and "zero" in sections:
        scores = scores + (sections["zero"].float() * row).sum(-1)
    return scores


def is_written(data: Tensor, layout: PackedLayout) -> Tensor:
    """:meth:`Format.is_written` of all tokens, bool that broadcasts to scores in block form."""
    return layout.format.is_written(layout.split(data)).squeeze(-1).unsqueeze(3)


def times_static_scale(x: Tensor, fmt: Format) -> Tensor:
    """``x``, of any shape, times the static scale of a format."""
    return x if fmt.static_scale == 1.0 else x * fmt.static_scale


def levels_of(sections: dict[str, Tensor], fmt: Format, *, transposed: bool) -> list[Tensor]:
    """The levels of each plane, [..., BLOCK_TOKENS, width], or [..., width, BLOCK_TOKENS] if ``transposed``.

    With scales per group the results are dequantized values, because these scales cannot be taken out of the products.
    """
    levels = [fmt.levels(codes, i) for i, codes in enumerate(fmt.packing.planes(sections))]
    if fmt.granularity == "group":
        for name in ("scale", "zero"):
            if name in sections:
                channels = sum(level.shape[-1] for level in levels)
                metadata = fmt.per_channel(sections[name], channels).chunk(len(levels), dim=-1)
                levels = [
                    level * plane if name == "scale" else level + plane
                    for level, plane in zip(levels, metadata, strict=True)
                ]
    return [level.transpose(-1, -2) for level in levels] if transposed else levels


def scales_of_planes(sections: dict[str, Tensor], fmt: Format) -> tuple[Tensor, ...]:
    """Scales per plane [num_blocks, batch, num_kv_heads, BLOCK_TOKENS, 1], a tensor for each plane."""
    return fmt.metadata_of(sections["scale"]).split(1, dim=-1)


def per_token(section: Tensor) -> Tensor:
    """Scales or zero points [num_blocks, batch, num_kv_heads, BLOCK_TOKENS, 1] as float32 that broadcasts to scores."""
    return section.float().squeeze(-1).unsqueeze(3)
