"""One tile of tokens in the decode kernel of attention: scores, masks, softmax weights and accumulation."""

from __future__ import annotations

from kvcompile.kernels.attention.query import columns_of, first_columns, in_digits, scores_of_digits
from kvcompile.kernels.attention.several_scales import accumulate_planes, scaled_products_of, scaled_scores_of_digits
from kvcompile.kernels.lang.tiles import exp2_of_each, log2, transposed
from kvcompile.kernels.lang.triton import constant, constexpr_function, jit, tl
from kvcompile.kernels.tiles.levels import integers_of_bytes, unpack
from kvcompile.kernels.tiles.packed import has_several_scales, has_zeros_of_groups

LEAST_SCALE = constant(2.0**-60)


@jit
def packed_scores(
    keys, query, KEY: tl.constexpr, PRECISION: tl.constexpr, TOKENS: tl.constexpr, NUM_WARPS: tl.constexpr
):  # fmt: skip
    """Scores of a tile of packed keys in units of log2, float32 [tokens, rows]."""
    packed, scale, zero = keys
    q_planes, factor, q_sum = query
    if in_digits(KEY, factor.shape[0], NUM_WARPS):
        integers = integers_of_bytes(packed, KEY)
        if has_several_scales(KEY):
            scores = scaled_scores_of_digits(integers, scale, query, KEY)
        else:
            scores = scores_of_digits(integers, query, KEY)
    else:
        if has_several_scales(KEY):
            products = scaled_products_of(unpack(packed, KEY), scale, q_planes, factor.shape[0], KEY, PRECISION)
        elif KEY.granularity != "channel":
            products = products_of(unpack(packed, KEY), q_planes, KEY, PRECISION)
        elif KEY.block_tokens < TOKENS or NUM_WARPS == 1:
            products = _scores_of_blocks(packed, scale, zero, q_planes, KEY, PRECISION, TOKENS)
        else:
            products = _scores_of_block(packed, scale, zero, q_planes, KEY, PRECISION)
        scores = first_columns(products, factor.shape[0]) * factor[None, :]
    if KEY.granularity == "token":
        if KEY.has_scale:
            scores = scale[:, None] * scores
        if KEY.has_zero:
            scores += zero[:, None] * q_sum[None, :]
    elif has_zeros_of_groups(KEY):
        NUM_SCALES: tl.constexpr = KEY.num_scales
        for i in tl.static_range(NUM_SCALES):
            scores += zero[i][:, None] * q_sum[i][None, :]
    return scores


@jit
def products_of(levels, q_planes, KEY: tl.constexpr, PRECISION: tl.constexpr):
    """``level . q``, float32 [tokens, rows]."""
    products = tl.dot(levels[0], q_planes[0], input_precision=PRECISION)
    OTHER_PLANES: tl.constexpr = KEY.num_planes - 1
    for plane in tl.static_range(OTHER_PLANES):
        products = tl.dot(levels[plane + 1], q_planes[plane + 1], products, input_precision=PRECISION)
    return products


@jit
def _scores_of_blocks(
    packed, scale, zero, q_planes, KEY: tl.constexpr, PRECISION: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """``level . (scale * q) + zero . q`` for scales and zero points per channel, float32 [tokens, rows].

    The product is a batch with one product per block. Each warp computes its own blocks, and makes the scaled query in
    registers where it is used. The product of the zero points is the same for all tokens of a block. It is computed for
    16 tokens, the least that tensor cores take, and repeated. It is exact except for its float32 sum, so that a large
    bias of a key channel costs no precision. Only ``scale * q`` is rounded, to fp16;
    ``kvcompile.kernels.layout.operand._query_exponent`` keeps it from overflowing.
    """
    BLOCKS: tl.constexpr = TOKENS // KEY.block_tokens
    ROWS: tl.constexpr = q_planes[0].shape[1]
    WIDTH: tl.constexpr = KEY.padded_width
    NUM_PLANES: tl.constexpr = KEY.num_planes
    scale, largest = _normalise_scales(scale, KEY)
    products = tl.full([BLOCKS, KEY.block_tokens, ROWS], 0.0, tl.float32)
    if KEY.has_zero:
        zero_products = tl.full([BLOCKS, 16, ROWS], 0.0, tl.float32)
        for plane in tl.static_range(NUM_PLANES):
            q = tl.broadcast_to(q_planes[plane][None, :, :], [BLOCKS, WIDTH, ROWS])
            zeros = tl.broadcast_to(zero[plane].to(KEY.dtype)[:, None, :], [BLOCKS, 16, WIDTH])
            plane_products = tl.dot(zeros, q, input_precision=PRECISION)
            zero_products += plane_products * (1.0 / KEY.gains[plane])
        repeated = tl.broadcast_to(zero_products[:, None, :, :], [BLOCKS, KEY.block_tokens // 16, 16, ROWS])
        products = tl.reshape(repeated, [BLOCKS, KEY.block_tokens, ROWS])
    levels = unpack(packed, KEY)
    for plane in tl.static_range(NUM_PLANES):
        q = tl.broadcast_to(q_planes[plane][None, :, :], [BLOCKS, WIDTH, ROWS])
        scaled = q * scale[plane][:, :, None]
        level = tl.reshape(levels[plane], [BLOCKS, KEY.block_tokens, WIDTH])
        products = tl.dot(level, scaled, products, input_precision=PRECISION)
    return tl.reshape(products * largest[:, None, None], [TOKENS, ROWS])


@jit
def _scores_of_block(packed, scale, zero, q_planes, KEY: tl.constexpr, PRECISION: tl.constexpr):
    """:func:`_scores_of_blocks` for a tile of one block, whose tokens all warps share."""
    NUM_PLANES: tl.constexpr = KEY.num_planes
    scale, largest = _normalise_scales(scale, KEY)
    products = tl.full([KEY.block_tokens, q_planes[0].shape[1]], 0.0, tl.float32)
    levels = unpack(packed, KEY)
    for plane in tl.static_range(NUM_PLANES):
        if KEY.has_zero:
            zeros = tl.broadcast_to(zero[plane].to(KEY.dtype), [KEY.block_tokens, KEY.padded_width])
            zero_products = tl.dot(zeros, q_planes[plane], input_precision=PRECISION)
            products += zero_products * (1.0 / KEY.gains[plane])
        scaled = q_planes[plane] * tl.trans(scale[plane])
        products = tl.dot(levels[plane], scaled, products, input_precision=PRECISION)
    return products * largest[:, None]


@jit
def _normalise_scales(scale, KEY: tl.constexpr):
    """Scales of blocks in KEY.dtype, a tile [blocks, width] for each plane.

    fp16 scales are unchanged. float32 scales are divided by a power of two per block, so that the largest scale of a
    block is in [1, 2).

    Returns:
        The scales, and the powers of two, [blocks], by which products must be multiplied.
    """
    NUM_PLANES: tl.constexpr = KEY.num_planes
    factor = tl.full([scale[0].shape[0]], 1.0, tl.float32)
    if KEY.scale_dtype == tl.float32 and KEY.dtype == tl.float16:
        largest = tl.max(scale[0], 1)
        OTHER_PLANES: tl.constexpr = NUM_PLANES - 1
        for plane in tl.static_range(OTHER_PLANES):
            largest = tl.maximum(largest, tl.max(scale[plane + 1], 1))
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
        factor = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    normalised = ()
    for plane in tl.static_range(NUM_PLANES):
        values = scale[plane]
        if KEY.scale_dtype == tl.float32 and KEY.dtype == tl.float16:
            values = values * inverse[:, None]
        normalised = normalised + (values.to(KEY.dtype),)  # noqa: RUF005
    return normalised, factor


@jit
def tanh(x):
    """The hyperbolic tangent, with an absolute error of at most 2**-22. It is 1 or -1 where exp2 overflows or is 0."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@jit
def capped(scores, softcap):
    """The softcap of scores; both in units of log2."""
    return softcap * tanh(scores / softcap)


@jit
def visible_scores(
    scores, token, in_cache, visibility, MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr
):  # fmt: skip
    """Apply the mask to the scores of a tile.

    Args:
        scores: float32 [tokens, rows] in units of log2.
        token: [tokens], positions in the cache.
        in_cache: bool [tokens].
        visibility: (position [rows], in_query [rows], row_begin [rows], row_end [rows], holes, mask_ptr, mask_row_ptrs
            [rows], stride of a token in the mask); row_begin, row_end and holes are the ranges of a bool mask.

    Returns:
        The scores, -inf where a row does not see a token and for tokens that are not ``in_cache``.
    """
    position, in_query, row_begin, row_end, holes, mask_ptr, mask_row_ptrs, stride_token = visibility
    if MASK == "bool":
        scores = _hide(
            scores, token, in_cache, row_begin, row_end, holes, in_query, mask_ptr, mask_row_ptrs, stride_token,
            MASK_PER_ROW,
        )  # fmt: skip
    elif MASK == "float":
        scores = _add_mask(scores, token, in_cache, in_query, mask_ptr, mask_row_ptrs, stride_token, MASK_PER_ROW)
    if IS_CAUSAL:
        scores = tl.where(token[:, None] <= position[None, :], scores, float("-inf"))
    return tl.where(in_cache[:, None], scores, float("-inf"))


@jit
def _load_mask_rows(row_ptrs, token, stride_token, in_cache, in_query):
    """Load the mask of a tile, [tokens, rows]; 0 outside the cache and the query."""
    ptrs = row_ptrs[None, :] + token.to(tl.int64)[:, None] * stride_token
    return tl.load(ptrs, mask=in_cache[:, None] & in_query[None, :], other=0)


@jit
def _hide(
    scores, token, in_cache, row_begin, row_end, holes, in_query, mask_ptr, mask_row_ptrs, stride_token,
    PER_ROW: tl.constexpr,
):  # fmt: skip
    """Apply a bool mask: -inf where a row does not see a token. The mask is read only if its ranges have holes."""
    if holes != 0:
        if PER_ROW:
            seen = _load_mask_rows(mask_row_ptrs, token, stride_token, in_cache, in_query) != 0
        else:
            mask = tl.load(mask_ptr + token.to(tl.int64) * stride_token, mask=in_cache, other=0)
            seen = (mask != 0)[:, None] & in_query[None, :]
    else:
        seen = (token[:, None] >= row_begin[None, :]) & (token[:, None] < row_end[None, :])
    return tl.where(seen, scores, float("-inf"))


@jit
def _add_mask(
    scores, token, in_cache, in_query, mask_ptr, mask_row_ptrs, stride_token, PER_ROW: tl.constexpr
):  # fmt: skip
    """Add a float mask to the scores."""
    if PER_ROW:
        mask = _load_mask_rows(mask_row_ptrs, token, stride_token, in_cache, in_query)
    else:
        mask = tl.load(mask_ptr + token.to(tl.int64) * stride_token, mask=in_cache, other=0.0)[:, None]
    return with_float_mask(scores, mask)


@jit
def with_float_mask(scores, mask):
    """Scores in units of log2, plus a mask that broadcasts. The smallest finite numbers of the mask stay finite.

    A mask of -inf hides a token whatever its score is: the score of a token that was never written may be NaN.
    """
    mask = mask.to(tl.float32)
    return tl.where(mask == float("-inf"), mask, scores + tl.maximum(mask, -2e38) * 1.4426950408889634)


@jit
def store_log_sum(lse_ptr, row, maximum, total_log2, seen, in_query):
    """Store the log-sum-exp by which the splits of a row are merged, in two parts, float32 [..., 2].

    The parts are the largest score, and log2 of the sum of exponentials relative to it. They are not added: if scores
    are far below zero (a float mask of -1e9), their sum would have no digits left for the second part.
    """
    tl.store(lse_ptr + 2 * row, tl.where(seen, maximum, float("-inf")), mask=in_query)
    tl.store(lse_ptr + 2 * row + 1, tl.where(seen, total_log2, 0.0), mask=in_query)


@constexpr_function
def weighs_scales(value):
    """Whether weights contain a scale per token."""
    return value.has_scale and value.granularity != "channel"


@jit
def empty_state(ROWS: tl.constexpr, NUM_WARPS: tl.constexpr, VALUE: tl.constexpr):
    """The state (maximum, scale_maximum, p_sum, zero_sum, accs) before the first tile.

    ``accs`` has a tile [padded_width, columns] for each plane of VALUE; for the sums see :func:`_sum_in_thread`.
    ``zero_sum`` is a tuple with a sum for each group if values have zero points per group.
    """
    acc = tl.full([VALUE.padded_width, max(ROWS, 8)], 0.0, tl.float32)
    sums = tl.full([NUM_WARPS, 8, ROWS], 0.0, tl.float32)
    lowest = tl.full([ROWS], float("-inf"), tl.float32)
    accs = ()
    NUM_PLANES: tl.constexpr = VALUE.num_planes
    for _ in tl.static_range(NUM_PLANES):
        accs = accs + (acc,)  # noqa: RUF005
    zero_sum = sums
    if has_zeros_of_groups(VALUE):
        zero_sum = ()
        NUM_SCALES: tl.constexpr = VALUE.num_scales
        for _ in tl.static_range(NUM_SCALES):
            zero_sum = zero_sum + (sums,)  # noqa: RUF005
    return lowest, tl.max(lowest, 0), sums, zero_sum, accs


@jit
def token_metadata(values, VALUE: tl.constexpr, TOKENS: tl.constexpr):
    """Scales of a tile of packed values, a tuple of [tokens], and zero points, [tokens].

    If tokens have no scales, or no zero points, these are 1 and 0.
    """
    _, scale, zero = values
    if has_several_scales(VALUE):
        scales = scale
        zero = tl.full([TOKENS], 0.0, tl.float32)
    elif VALUE.granularity == "token":
        scales = (scale,)
    else:
        scales = (tl.full([TOKENS], 1.0, tl.float32),)
        zero = tl.full([TOKENS], 0.0, tl.float32)
    return scales, zero


@jit
def metadata_of_tokens(scales, zero, in_cache):
    """The results of :func:`token_metadata`, but 1 and 0 for tokens that are not ``in_cache``."""
    result = ()
    NUM_SCALES: tl.constexpr = len(scales)
    for i in tl.static_range(NUM_SCALES):
        result = result + (tl.where(in_cache, scales[i], 1).to(scales[i].dtype),)  # noqa: RUF005
    return result, tl.where(in_cache, zero, 0.0)


@jit
def _largest_scale_log2(scales, VALUE: tl.constexpr):
    """The base-2 logarithm of the largest scale of a vector, [tokens].

    A scale of zero (a vector of zeros) has no logarithm. 2**-60 is negligible beside other scales.
    """
    largest = scales[0]
    OTHER_SCALES: tl.constexpr = len(scales) - 1
    for i in tl.static_range(OTHER_SCALES):
        largest = tl.maximum(largest, scales[i + 1], propagate_nan=tl.PropagateNan.ALL)
    return log2(tl.where(largest < LEAST_SCALE, LEAST_SCALE, largest), VALUE.unpack_ptx is not None)


@jit
def attend_packed(
    state, scores, values, scales, zero, in_cache, is_whole,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDE_SCORES: tl.constexpr, PRECISION: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """The state (maximum, scale_maximum, p_sum, zero_sum, accs) after one more tile of packed values.

    ``scores`` are the results of :func:`visible_scores` unless the tile ``is_whole``. ``scales`` and ``zero`` are the
    results of :func:`token_metadata`, and 1 and 0 for tokens that are not ``in_cache``.
    """
    largest_log2 = _largest_scale_log2(scales, VALUE)
    if has_zeros_of_groups(VALUE):
        zero = _zeros_of_tokens(values[2], in_cache, VALUE)
    maximum, scale_maximum, p_sum, zero_sum, decay, weight = weigh(
        state, scores, largest_log2, zero, KEY, VALUE, WIDE_SCORES, NUM_WARPS
    )
    levels = value_levels(values[0], VALUE)
    if VALUE.code_dtype != tl.uint8 and not is_whole:
        levels = levels_of_tokens(levels, in_cache)
    if has_several_scales(VALUE):
        accs = accumulate_planes(state[4], levels, weight, scales, largest_log2, decay, VALUE, PRECISION)
    else:
        accs = accumulate(state[4], levels, weight, decay, VALUE, PRECISION)
    return maximum, scale_maximum, p_sum, zero_sum, accs


@jit
def value_levels(packed, VALUE: tl.constexpr):
    """The levels of each plane of values, [width, tokens]. A tensor that also serves as keys is transposed for it."""
    levels = unpack(packed, VALUE)
    if not VALUE.column_major:
        levels = transposed(levels, VALUE)
    return levels


@jit
def weigh(
    state, scores, scale_log2, zero,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDE_SCORES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """The softmax weights of one more tile.

    Tokens with a score of -inf get no weight. Tokens beyond the cache have this score, with a scale of 1 and a zero
    point of 0. ``scale_log2`` is log2 of the scale of each token, or of its largest scale, [tokens].

    Scores and log2 of scales are added, which loses the scale beside a score of -1e9. With WIDE_SCORES the two have
    separate maxima instead, at the price of one more reduction per tile. Otherwise ``scale_maximum`` is not used.

    Returns:
        maximum, scale_maximum, p_sum and zero_sum of the new state; ``decay``, the factor of the old ``accs``; and the
        weights of the tile in the dtype of the products.
    """
    maximum, scale_maximum, p_sum, zero_sum, _ = state
    SCALED: tl.constexpr = weighs_scales(VALUE)
    scale_decay = 0.0
    if SCALED:
        scale_inverse = exp2_of_each(-scale_log2, VALUE.unpack_ptx is not None)
        if WIDE_SCORES:
            new_scale_maximum = tl.maximum(scale_maximum, tl.max(scale_log2, 0))
            relative_scale = scale_log2 - new_scale_maximum + 15.0
            scale_decay = scale_maximum - new_scale_maximum
            scale_maximum = new_scale_maximum
        else:
            scores += scale_log2[:, None]

    new_maximum = tl.maximum(maximum, tl.max(scores, 0))
    finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    if SCALED and WIDE_SCORES:
        weight = tl.exp2((scores - finite_maximum[None, :]) + relative_scale[:, None])
    elif WIDE_SCORES:
        # Far below zero, subtracting 15 may not change the maximum.
        weight = tl.exp2((scores - finite_maximum[None, :]) + 15.0)
    else:
        weight = tl.exp2(scores - (finite_maximum - 15.0)[None, :])
    decay = tl.exp2(maximum - finite_maximum + scale_decay)
    maximum = new_maximum
    p = weight
    if SCALED:
        p = weight * scale_inverse[:, None]
    p_sum = p_sum * decay[None, None, :] + _sum_in_thread(p, KEY, NUM_WARPS)
    if VALUE.has_zero and VALUE.granularity == "token":
        zero_per_weight = (zero * scale_inverse)[:, None]
        zero_sum = zero_sum * decay[None, None, :] + _sum_in_thread(weight * zero_per_weight, KEY, NUM_WARPS)
    elif has_zeros_of_groups(VALUE):
        sums = ()
        NUM_SCALES: tl.constexpr = VALUE.num_scales
        for i in tl.static_range(NUM_SCALES):
            zeros = _sum_in_thread(p * zero[i][:, None], KEY, NUM_WARPS)
            sums = sums + (zero_sum[i] * decay[None, None, :] + zeros,)  # noqa: RUF005
        zero_sum = sums
    return maximum, scale_maximum, p_sum, zero_sum, decay, weight.to(VALUE.dtype)


@jit
def levels_of_tokens(levels, in_cache):
    """The levels [width, tokens] of each plane, 0 for tokens that are not ``in_cache``: unwritten bytes may be NaN."""
    result = ()
    NUM_PLANES: tl.constexpr = len(levels)
    for plane in tl.static_range(NUM_PLANES):
        result = result + (tl.where(in_cache[None, :], levels[plane], 0.0),)  # noqa: RUF005
    return result


@jit
def accumulate(accs, levels, weight, decay, VALUE: tl.constexpr, PRECISION: tl.constexpr):
    """The accumulated outputs of each plane after one more tile of values.

    Tensor cores truncate float32 sums instead of rounding them. Levels that are all positive would add the same error
    at every step. Tensor cores therefore sum one tile only, and the sums of tiles are added with rounding.
    """
    new_accs = ()
    NUM_PLANES: tl.constexpr = VALUE.num_planes
    weight = columns_of(weight, accs[0].shape[1])
    decay = columns_of(decay[None, :], accs[0].shape[1])
    for plane in tl.static_range(NUM_PLANES):
        product = tl.dot(levels[plane], weight, input_precision=PRECISION)
        acc = tl.fma(accs[plane], tl.broadcast_to(decay, product.shape), product)
        new_accs = new_accs + (acc,)  # noqa: RUF005
    return new_accs


@jit
def _zeros_of_tokens(zero, in_cache, VALUE: tl.constexpr):
    """Zero points of groups, a tuple of [tokens]; 0 for tokens that are not ``in_cache``."""
    zeros = ()
    NUM_SCALES: tl.constexpr = VALUE.num_scales
    for i in tl.static_range(NUM_SCALES):
        zeros = zeros + (tl.where(in_cache, zero[i], 0.0),)  # noqa: RUF005
    return zeros


@jit
def _sum_in_thread(x, KEY: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Partial sums over the tokens of [tokens, rows]: [NUM_WARPS, 8, rows].

    In the accumulator of a tensor core product, token ``n`` belongs to the lanes ``n % 8``. Its warp is ``n // 64`` if
    each warp has its own block, and ``n // 16 % NUM_WARPS`` otherwise. Sums over the remaining part of ``n`` stay in
    one thread, without shuffles and barriers.
    """
    TOKENS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    if KEY.granularity == "channel" and (KEY.block_tokens < TOKENS or NUM_WARPS == 1):
        x = tl.reshape(x, [NUM_WARPS, TOKENS // (16 * NUM_WARPS), 2, 8, ROWS])
        x = tl.sum(tl.sum(x, 2), 1)
    else:
        x = tl.reshape(x, [TOKENS // (16 * NUM_WARPS), NUM_WARPS, 2, 8, ROWS])
        x = tl.sum(tl.sum(x, 2), 0)
    return x
