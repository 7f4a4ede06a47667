"""Products of vectors that have several scales: one for each group of channels, or for each plane of words.

Scales cannot be taken out of the product of a whole vector. The product of each plane, or of each group, has its own.
"""

from __future__ import annotations

from kvcompile.kernels.attention.query import columns_of, first_columns, sum_of_digits
from kvcompile.kernels.lang.tiles import exp2_of_each
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.tiles.packed import groups_of_plane, in_group


@jit
def scaled_products_of(
    levels, scale, q_planes, ROWS: tl.constexpr, KEY: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``sum of scale * (level . q)`` over planes or groups with separate scales, float32 [tokens, ROWS]."""
    products = tl.full([levels[0].shape[0], ROWS], 0.0, tl.float32)
    NUM_PLANES: tl.constexpr = KEY.num_planes
    for plane in tl.static_range(NUM_PLANES):
        products = _add_scaled_products(products, levels[plane], scale, q_planes[plane], plane, KEY, PRECISION)
    return products


@jit
def scaled_scores_of_digits(integers, scale, query, KEY: tl.constexpr):
    """``sum of scale * (level . q)`` over planes in the units of the scores, float32 [tokens, rows].

    The query is in digits. ``integers`` are the integers of the key's levels, a tile [tokens, width] for each plane.
    """
    operand, factor, _ = query
    planes, _ = operand
    scores = tl.full([integers[0].shape[0], factor.shape[0]], 0.0, tl.float32)
    NUM_PLANES: tl.constexpr = KEY.num_planes
    for plane in tl.static_range(NUM_PLANES):
        product = sum_of_digits(tl.dot(integers[plane], planes[plane], out_dtype=tl.int32))
        scores = tl.fma(product, tl.broadcast_to(scale[plane][:, None], product.shape), scores)
    return scores * factor[None, :]


@jit
def _add_scaled_products(
    products, level, scale, q, PLANE: tl.constexpr, KEY: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add ``scale * (level . q)`` of a plane, summed over its groups, to ``products``, float32 [tokens, rows].

    If a plane has several groups, its levels are multiplied by the query of each group, which is 0 elsewhere.
    """
    GROUPS: tl.constexpr = groups_of_plane(KEY, PLANE)
    ROWS: tl.constexpr = products.shape[1]
    column = tl.arange(0, KEY.padded_width)[:, None]
    for i in tl.static_range(len(GROUPS)):
        of_group = q
        if len(GROUPS) > 1:
            of_group = tl.where(in_group(column, PLANE, GROUPS[i], KEY), q, 0.0).to(q.dtype)
        product = first_columns(tl.dot(level, of_group, input_precision=PRECISION), ROWS)
        products = tl.fma(product, tl.broadcast_to(scale[GROUPS[i]][:, None], product.shape), products)
    return products


@jit
def accumulate_planes(
    accs, levels, weight, scales, largest_log2, decay, VALUE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The accumulated outputs of each plane after one more tile of values.

    Args:
        accs: the outputs before, a tile [padded_width, columns] for each plane.
        levels: a tile [width, tokens] for each plane.
        weight: softmax weights that contain the largest scale of each token, [tokens, rows].
        scales: the scales of tokens, a tuple of [tokens].
        largest_log2: the base-2 logarithm of the largest of them.
        decay: the factor of ``accs``, [rows].
    """
    inverse = exp2_of_each(-largest_log2, VALUE.unpack_ptx is not None)
    new_accs = ()
    NUM_PLANES: tl.constexpr = VALUE.num_planes
    decay = columns_of(decay[None, :], accs[0].shape[1])
    for plane in tl.static_range(NUM_PLANES):
        product = _weighed_plane(levels[plane], weight, scales, inverse, plane, VALUE, PRECISION)
        new_accs = new_accs + (tl.fma(accs[plane], tl.broadcast_to(decay, product.shape), product),)  # noqa: RUF005
    return new_accs


@jit
def _weighed_plane(
    level, weight, scales, inverse, PLANE: tl.constexpr, VALUE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The product of a plane with weights that are multiplied by its scale and by ``inverse``, [width, columns].

    If a plane has several groups, its levels are multiplied by the weights of each group.
    """
    GROUPS: tl.constexpr = groups_of_plane(VALUE, PLANE)
    product = _product_of_scale(level, weight, scales[GROUPS[0]] * inverse, PRECISION)
    column = tl.arange(0, VALUE.padded_width)[:, None]
    for i in tl.static_range(1, len(GROUPS)):
        other = _product_of_scale(level, weight, scales[GROUPS[i]] * inverse, PRECISION)
        product = tl.where(in_group(column, PLANE, GROUPS[i], VALUE), other, product)
    return product


@jit
def _product_of_scale(level, weight, relative, PRECISION: tl.constexpr):
    """The product of levels [width, tokens] with weights that are multiplied by ``relative``, [tokens]."""
    weight = (weight.to(tl.float32) * relative[:, None]).to(weight.dtype)
    weight = columns_of(weight, max(8, weight.shape[1]))
    return tl.dot(level, weight, input_precision=PRECISION)
