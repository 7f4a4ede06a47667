"""Scores of pre-RoPE keys, which are multiplied by key factors (:mod:`kvcompile.kernels.spec.key_factors`).

    score[n, r] = sum_j k[n, j] * (f[0, n, j] * q[r, j] + f[1, n, j] * paired[r, j])

A program decodes a tile of packed keys in registers, and multiplies it by each of its two tiles of factors. Two tensor
core products follow, with the query and with the paired query. Scales and zero points are applied to the tile before
the factors, unless each token has one scale and no zero point. In that case the scale multiplies the scores.

Levels of a rotated format are first rotated to the original basis, by another tensor core product. The signs of the
rotation are applied to both queries.

Products are computed in the dtype of the query, in which the model would apply RoPE to keys. A factor may therefore be
as large, or as small, as in the model. (Triton's interpreter multiplies in float32 for bfloat16.)
"""

from __future__ import annotations

from kvcompile.kernels.attention.query import first_columns, load_query_rows
from kvcompile.kernels.lang.planes import planes_of
from kvcompile.kernels.lang.tiles import transposed
from kvcompile.kernels.lang.triton import INTERPRETED, constexpr_function, jit, tl
from kvcompile.kernels.tiles.levels import unpack
from kvcompile.kernels.tiles.packed import has_several_scales, of_plane
from kvcompile.kernels.tiles.rotation import hadamard_ones, with_random_signs
from kvcompile.kernels.tiles.runs import unrotate_levels, unrotation_matrix


@constexpr_function
def dtype_of_products(query_dtype):
    """The dtype in which keys with factors are multiplied, for queries of a dtype."""
    return tl.float32 if INTERPRETED and query_dtype == tl.bfloat16 else query_dtype


@jit
def load_paired_rows(factors, program, head, position, in_query, KEY: tl.constexpr):
    """Load the rows of the paired query, [rows, padded_head_dim].

    Args:
        factors: (pointer to the paired query, its four strides, pointer to the factors, number of tokens of the
            factors). Triton 3.6 loses constants in tuples of tuples, so the strides are not in a tuple of their own.
        program, head, position, in_query: as in :func:`kvcompile.kernels.attention.query.rows_of_program`.
    """
    row_ptrs = factors[0] + program[1] * factors[1] + head * factors[2] + position * factors[3]
    return load_query_rows(row_ptrs, in_query, factors[4], KEY)


@constexpr_function
def planes_in_products(key):
    """The planes of the products with factors: (number, width, padded width).

    A rotated format has one plane with all channels, because its levels are first rotated to the original basis.
    """
    if key.rotated:
        return 1, key.head_dim, key.padded_head_dim
    return key.num_planes, key.width, key.padded_width


@jit
def query_with_pairs(q, paired, score_scale, KEY: tl.constexpr):
    """The second operands of both products, from query rows and paired query rows [rows, padded_head_dim].

    Returns:
        operand: for each product a tuple of tiles [padded_width, columns], one for each plane of the products.
        factor: [rows], the factor of the scores.
        matrix: the result of :func:`kvcompile.kernels.tiles.runs.unrotation_matrix`.
    """
    DTYPE: tl.constexpr = dtype_of_products(q.dtype)
    factor = tl.full([q.shape[0]], 1.0, tl.float32) * score_scale
    if KEY.rotated:
        q, paired = with_random_signs(q, KEY), with_random_signs(paired, KEY)
        if not KEY.has_zero:
            factor = factor * KEY.largest_gain
    return (_columns(q.to(DTYPE), KEY), _columns(paired.to(DTYPE), KEY)), factor, unrotation_matrix(KEY)


@jit
def _columns(q, KEY: tl.constexpr):
    """Query rows as columns: each row once, or twice side by side if there are fewer than 8.

    Rows are doubled before they become columns. Triton 3.9 cannot reshape the transposed rows in shared memory.
    """
    if q.shape[0] < 8:
        q = tl.reshape(tl.permute(tl.join(q, q), (0, 2, 1)), [2 * q.shape[0], q.shape[1]])
    return (tl.trans(q),) if KEY.rotated else transposed(planes_of(q, KEY), KEY)


@jit
def scores_with_factors(
    keys, query, factors, token, kv_len, KEY: tl.constexpr, PRECISION: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Scores of a tile of packed keys in units of log2, float32 [tokens, rows].

    Args:
        keys: the result of :func:`kvcompile.kernels.tiles.packed.load_packed`.
        query: the result of :func:`query_with_pairs`.
        factors: the argument of :func:`load_paired_rows`.
        token: [TOKENS], positions in the cache.
        kv_len: the number of tokens in the cache; later tokens get the factor 0.
    """
    packed, scale, zero = keys
    levels = unpack(packed, KEY)
    if KEY.rotated:
        vectors = (_unrotated(levels, scale, zero, query[2], KEY, PRECISION),)
    else:
        vectors = ()
        NUM_PLANES: tl.constexpr = KEY.num_planes
        for plane in tl.static_range(NUM_PLANES):
            vectors = vectors + (_decoded(levels[plane], scale, zero, plane, KEY, TOKENS),)  # noqa: RUF005
    scores = products_with_factors(vectors, query, factors, token, kv_len, KEY, PRECISION)
    if scales_scores(KEY):
        scores = scale[:, None] * scores
    return scores


@jit
def _unrotated(levels, scale, zero, matrix, KEY: tl.constexpr, PRECISION: tl.constexpr):
    """A tile of keys in the original basis, without the signs of the rotation: [TOKENS, padded_head_dim].

    If keys have no zero point, gain and scale are not applied either, because they multiply the scores.
    """
    tl.static_assert(KEY.granularity == "token")
    x = unrotate_levels(levels, matrix, KEY, PRECISION)
    if KEY.has_zero:
        x = x * (scale * KEY.largest_gain)[:, None] + zero[:, None] * hadamard_ones(KEY)[None, :]
    return x


@constexpr_function
def scales_scores(key):
    """Whether the scale of a token multiplies the scores of the token, and not the channels of its key."""
    return key.granularity == "token" and key.has_scale and not key.has_zero


@jit
def _decoded(level, scale, zero, PLANE: tl.constexpr, KEY: tl.constexpr, TOKENS: tl.constexpr):
    """A plane of a tile of keys, [TOKENS, padded_width]; without the scales that multiply scores."""
    GAIN: tl.constexpr = KEY.gains[PLANE]
    WIDTH: tl.constexpr = KEY.padded_width
    if KEY.granularity == "channel":
        BLOCKS: tl.constexpr = TOKENS // KEY.block_tokens
        x = tl.reshape(level, [BLOCKS, KEY.block_tokens, WIDTH]).to(tl.float32)
        x = x * (scale[PLANE].to(tl.float32) * GAIN)[:, None, :]
        if KEY.has_zero:
            x += zero[PLANE].to(tl.float32)[:, None, :]
        x = tl.reshape(x, [TOKENS, WIDTH])
    elif has_several_scales(KEY):
        x = level.to(tl.float32) * (of_plane(scale, PLANE, KEY) * GAIN)
        if KEY.has_zero:
            x += of_plane(zero, PLANE, KEY)
    elif KEY.granularity == "token" and KEY.has_zero:
        x = level.to(tl.float32) * (scale * GAIN)[:, None] + zero[:, None]
    elif GAIN != 1.0:
        x = level.to(tl.float32) * GAIN
    else:
        x = level
    return x


@jit
def products_with_factors(vectors, query, factors, token, kv_len, KEY: tl.constexpr, PRECISION: tl.constexpr):
    """The scores of keys ``vectors``, a tile [tokens, padded_width] for each plane: float32 [tokens, rows]."""
    columns, factor, _ = query
    of_query, of_paired = columns
    DTYPE: tl.constexpr = of_query[0].dtype
    ptr, num_tokens = factors[5], factors[6]
    PLANES: tl.constexpr = planes_in_products(KEY)
    NUM_PLANES: tl.constexpr = PLANES[0]
    WIDTH: tl.constexpr = PLANES[1]
    PADDED_WIDTH: tl.constexpr = PLANES[2]
    column = tl.arange(0, PADDED_WIDTH)
    row = token.to(tl.int64) * KEY.head_dim
    in_bounds = (token < kv_len)[:, None]
    if WIDTH != PADDED_WIDTH:
        in_bounds = in_bounds & (column < WIDTH)[None, :]
    products = tl.full([token.shape[0], of_query[0].shape[1]], 0.0, tl.float32)
    for plane in tl.static_range(NUM_PLANES):
        ptrs = ptr + row[:, None] + (plane * WIDTH + column)[None, :]
        own = tl.load(ptrs, mask=in_bounds, other=0.0)
        other = tl.load(ptrs + num_tokens.to(tl.int64) * KEY.head_dim, mask=in_bounds, other=0.0)
        x = _within(vectors[plane], DTYPE)
        products = tl.dot(x * own.to(DTYPE), of_query[plane], products, input_precision=PRECISION)
        products = tl.dot(x * other.to(DTYPE), of_paired[plane], products, input_precision=PRECISION)
    return first_columns(products, factor.shape[0]) * factor[None, :]


@jit
def _within(x, DTYPE: tl.constexpr):
    """``x`` in DTYPE. Keys of a float16 cache may dequantize to slightly more than float16 can hold."""
    TO_HALF: tl.constexpr = DTYPE.primitive_bitwidth == 16 and tl.bfloat16 != DTYPE
    if TO_HALF and x.dtype == tl.float32:
        x = tl.where(tl.abs(x) < float("inf"), tl.clamp(x, -65504.0, 65504.0), x)
    return x.to(DTYPE)
