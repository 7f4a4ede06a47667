"""Attention on packed caches in Triton: one kernel for every format, and the merge of its splits.

Flash decoding in transposed form. A program owns a tile of query rows of one KV head (all its query heads together, so
that the cache is read once) and a share of the tokens, and computes for tiles of tokens

    S^T = K q^T   [tokens, rows]         O^T += V^T P^T   [channels, rows]

With K row-major and V column-major in memory, both packed operands are the *first* operand of their product: they are
unpacked in registers and never written to shared memory in 16 bits.

The law of formats, ``x = scale * level + zero``, keeps scales out of the products. In units of log2 a score is

    x[n, r] = k_scale[n] * (level[n] . q[r]) + k_zero[n] * sum(q[r])

and the weight of a value is ``p * v_scale = exp2(x + log2(v_scale))``. The running maximum is taken over
``y = x + log2(v_scale)``: weights then lie in [0, 1] whatever the magnitude of the values, and after a shift by 2**15
fp16 holds them with full precision down to 2**-29 of the largest and never worse than 2**-40 of it. The sums of
``p = weight / v_scale`` and of ``p * v_zero`` are kept in float32.

Splits take the visible tiles in turn (split s: the s-th, the (s + num_splits)-th, ...), so that a cache of which only a
part is visible still occupies all of them.

Reading beyond the end is safe by construction: tiles that are not full of visible tokens load only blocks that exist,
scores of invisible tokens are -inf, their scales and zeros are replaced, and every byte has a finite level.
"""

from __future__ import annotations

from kvcompile.kernels.codec import jit, log2, planes_of, rotate, tl, unrotate


@jit(do_not_specialize=["num_kv_heads", "q_len", "kv_len", "num_splits"])
def attention_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr,
    query_strides, key_strides, value_strides, mask_strides,
    num_kv_heads, q_len, kv_len, num_splits, score_scale, softcap,
    KEY: tl.constexpr, VALUE: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query rows of one KV head, one split of the tokens. Grid (batch * num_kv_heads, rows, splits).

    Args:
        query_ptr: [batch, num_heads, q_len, head_dim], strides (batch, head, position, channel).
        key_ptr, value_ptr: packed data, strides (block, batch, head), bytes.
        mask_ptr: [batch, num_heads, q_len, kv_len], strides of 0 where it broadcasts; uint8 when MASK is "bool", any
            float when it is "float", unused when it is "none".
        range_ptr: int32 [batch, q_len, 3], what a bool mask shows, see :mod:`kvcompile.kernels.visible_range`.
        out_ptr: [batch, num_heads, q_len, v_head_dim], or with PARTIAL float32 [num_splits, ...] in the stored basis.
        lse_ptr: with PARTIAL the log2 of the sums of exponentials, float32 [num_splits, batch, num_heads, q_len].
        score_scale: factor of the scores times log2(e).
        softcap: with HAS_SOFTCAP the bound of the scores times log2(e).
        MASK_PER_ROW: whether the mask differs between the rows of a KV head.
    """
    batch = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    split = tl.program_id(2)
    # Rows are query heads within query positions, so that a tile of rows spans few positions. The last tile comes
    # first: under a causal mask it is the one that takes longest.
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    row = first_row + tl.arange(0, ROWS)
    position = (row // GROUP_SIZE).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    in_query = position < q_len

    query_ptrs = query_ptr + batch * query_strides[0] + head * query_strides[1] + position * query_strides[2]
    query = _load_query(query_ptrs, in_query, query_strides[3], score_scale, KEY)
    key_ptr += batch * key_strides[1] + kv_head * key_strides[2]
    value_ptr += batch * value_strides[1] + kv_head * value_strides[2]
    mask_ptr += batch * mask_strides[0]
    mask_row_ptrs = mask_ptr + head * mask_strides[1] + position * mask_strides[2]
    mask_ptr += kv_head * GROUP_SIZE * mask_strides[1]  # for all rows alike, without MASK_PER_ROW

    # Tiles [first_tile, end_tile) are visited.
    visible_len = kv_len
    if IS_CAUSAL:
        visible_len = min(kv_len, min((first_row + ROWS - 1) // GROUP_SIZE, q_len - 1) + 1)
    first_tile, end_tile = 0, tl.cdiv(visible_len, TOKENS)
    row_begin, row_end, holes = 0, 0, 0
    if MASK == "bool":
        range_ptrs = range_ptr + (batch * q_len + position) * 3
        row_begin = tl.load(range_ptrs, mask=in_query, other=1 << 30)
        row_end = tl.load(range_ptrs + 1, mask=in_query, other=0)
        holes = tl.max(tl.load(range_ptrs + 2, mask=in_query, other=0), 0)
        first_tile = tl.min(row_begin, 0) // TOKENS
        end_tile = tl.minimum(end_tile, tl.cdiv(tl.max(row_end, 0), TOKENS))
    own_tiles = (end_tile - first_tile - split + num_splits - 1) // num_splits

    acc = tl.full([VALUE.padded_width, ROWS], 0.0, tl.float32)
    sums = tl.full([NUM_WARPS, 8, ROWS], 0.0, tl.float32)
    lowest = tl.full([ROWS], float("-inf"), tl.float32)
    accs = ()
    VALUE_PLANES: tl.constexpr = VALUE.num_planes
    for _ in tl.static_range(VALUE_PLANES):
        accs = accs + (acc,)  # noqa: RUF005
    state = (lowest, tl.max(lowest, 0), sums, sums, accs)
    for own_tile in tl.range(0, own_tiles, num_stages=NUM_STAGES):
        tile = first_tile + own_tile * num_splits + split
        tokens_left = kv_len - tile * TOKENS
        first_block = (tile * (TOKENS // KEY.block_tokens)).to(tl.int64)
        keys = _load_packed(key_ptr + first_block * key_strides[0], key_strides[0], tokens_left, KEY, TOKENS)
        values = _load_packed(value_ptr + first_block * value_strides[0], value_strides[0], tokens_left, VALUE, TOKENS)
        scores = _scores(keys, query, KEY, PRECISION)
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores / softcap)

        token = tile * TOKENS + tl.arange(0, TOKENS)
        in_cache = token < visible_len
        if MASK == "bool":
            scores = _hide(
                scores, token, in_cache, row_begin, row_end, holes, in_query, mask_ptr, mask_row_ptrs, mask_strides[3],
                MASK_PER_ROW,
            )  # fmt: skip
        elif MASK == "float":
            scores = _add_mask(
                scores, token, in_cache, in_query, mask_ptr, mask_row_ptrs, mask_strides[3], MASK_PER_ROW
            )
        if IS_CAUSAL:
            scores = tl.where(token[:, None] <= position[None, :], scores, float("-inf"))
        scores = tl.where(in_cache[:, None], scores, float("-inf"))
        state = _attend_tile(state, scores, values, in_cache, VALUE, MASK == "float", PRECISION, NUM_WARPS)

    out_row = (batch * num_kv_heads * GROUP_SIZE + head) * q_len + position
    if PARTIAL:
        out_row += split.to(tl.int64) * tl.num_programs(0) * GROUP_SIZE * q_len
    _store_output(state, out_ptr, lse_ptr, out_row, in_query, VALUE, MASK == "float", PARTIAL)


@jit
def _load_query(row_ptrs, in_query, stride_channel, score_scale, KEY: tl.constexpr):
    """The query as the second operand of the scores: (planes, factor, q_sum).

    ``planes`` are [padded_width, rows], one for each plane of the key. Rows are scaled by a power of two to a largest
    channel in [64, 128), so that a bf16 query is exact in fp16 except for channels below 2**-23 of the largest.
    ``factor`` [rows] takes it back and includes the scale of the scores; ``q_sum`` [rows] is the sum over channels as
    the products see them, in the units of the scores.
    """
    channel = tl.arange(0, KEY.padded_head_dim)[None, :]
    in_bounds = in_query[:, None] & (channel < KEY.head_dim)
    q = tl.load(row_ptrs[:, None] + channel * stride_channel, mask=in_bounds, other=0.0).to(tl.float32)
    if KEY.rotated:
        q = rotate(q, KEY)
    # Exponents are as float32 has them: 260 - exponent means 2**(133 - exponent), and exponent - 6 its inverse.
    exponent = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 20), 254)
    q = (q * ((260 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]).to(KEY.dtype)
    factor = ((exponent - 6) << 23).to(tl.float32, bitcast=True) * score_scale
    q_sum = tl.sum(q.to(tl.float32), 1) * factor
    planes = planes_of(q, KEY)
    transposed = ()
    NUM_PLANES: tl.constexpr = KEY.num_planes
    for plane in tl.static_range(NUM_PLANES):
        transposed = transposed + (tl.trans(planes[plane]),)  # noqa: RUF005
    return transposed, factor * KEY.gain, q_sum


@jit
def _load_mask_rows(row_ptrs, token, stride_token, in_cache, in_query):
    """Mask of a tile, [tokens, rows]; 0 outside the cache and the query."""
    ptrs = row_ptrs[None, :] + token.to(tl.int64)[:, None] * stride_token
    return tl.load(ptrs, mask=in_cache[:, None] & in_query[None, :], other=0)


@jit
def _scores(keys, query, KEY: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of a tile in units of log2, float32 [tokens, rows]."""
    packed, scale, zero = keys
    q_planes, factor, q_sum = query
    levels = _unpack(packed, scale, zero, KEY)
    products = tl.dot(levels[0], q_planes[0], input_precision=PRECISION)
    OTHER_PLANES: tl.constexpr = KEY.num_planes - 1
    for plane in tl.static_range(OTHER_PLANES):
        products = tl.dot(levels[plane + 1], q_planes[plane + 1], products, input_precision=PRECISION)
    scores = products * factor[None, :]
    if KEY.granularity == "token":
        if KEY.has_scale:
            scores = scale[:, None] * scores
        if KEY.has_zero:
            scores += zero[:, None] * q_sum[None, :]
    return scores


@jit
def _unpack(packed, scale, zero, OPERAND: tl.constexpr):
    """The levels of each plane of a tile in the dtype of the products.

    With scales that are not per token, which cannot be taken out of the products, the dequantized values less gain.
    """
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    NUM_HIGH: tl.constexpr = OPERAND.num_high
    if OPERAND.fast:
        planes = OPERAND.codec.unpack(packed, OPERAND)
    else:
        planes = ()
        for plane in tl.static_range(NUM_PLANES):
            codes = packed[0]
            if OPERAND.num_planes > 1:
                codes = (codes.to(tl.int32) >> (OPERAND.low_bits * plane)) & ((1 << OPERAND.low_bits) - 1)
            for k in tl.static_range(NUM_HIGH):
                if plane < OPERAND.high_planes[k]:
                    codes |= ((packed[k + 1] >> (8 // OPERAND.high_planes[k] * plane)) & 1) << (OPERAND.low_bits + k)
            planes = planes + (OPERAND.codec.levels(codes, plane, OPERAND).to(OPERAND.dtype),)  # noqa: RUF005
    if OPERAND.granularity != "token":
        values = ()
        for plane in tl.static_range(NUM_PLANES):
            value = planes[plane].to(tl.float32) * scale[plane]
            if OPERAND.has_zero:
                value += zero[plane]
            values = values + (value.to(OPERAND.dtype),)  # noqa: RUF005
        planes = values
    return planes


@jit
def _tanh(x):
    """The hyperbolic tangent, to 2**-22 absolutely; exp2 saturates to 0 or inf where it is -1 or 1."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@jit
def _hide(
    scores, token, in_cache, row_begin, row_end, holes, in_query, mask_ptr, mask_row_ptrs, stride_token,
    PER_ROW: tl.constexpr,
):  # fmt: skip
    """Scores with a bool mask applied: -inf where a row does not see a token. The mask is read only if it has holes."""
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
    """Scores with a float mask added."""
    if PER_ROW:
        scores += _log2_bias(_load_mask_rows(mask_row_ptrs, token, stride_token, in_cache, in_query))
    else:
        mask = tl.load(mask_ptr + token.to(tl.int64) * stride_token, mask=in_cache, other=0.0)
        scores += _log2_bias(mask)[:, None]
    return scores


@jit
def _log2_bias(mask):
    """A float mask in units of log2: -inf stays, the smallest finite numbers stay finite."""
    mask = mask.to(tl.float32)
    return tl.where(mask == float("-inf"), mask, tl.maximum(mask, -2e38) * 1.4426950408889634)


@jit
def _attend_tile(
    state, scores, values, in_cache,
    VALUE: tl.constexpr, WIDE_SCORES: tl.constexpr, PRECISION: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """The state (maximum, scale_maximum, p_sum, zero_sum, accs) after one more tile.

    Tokens with a score of -inf take no part; what lies beyond the cache has one, and harmless scales and zeros.
    A score of -1e9 swallows the log2 of a scale: with WIDE_SCORES the two have separate maxima, at the price of one
    more reduction a tile. Otherwise ``scale_maximum`` has no meaning.
    """
    maximum, scale_maximum, p_sum, zero_sum, accs = state
    packed, scale, zero = values
    SCALED: tl.constexpr = VALUE.has_scale and VALUE.granularity == "token"
    scale_decay = 0.0
    if SCALED:
        scale = tl.where(in_cache, scale, 1.0)
        # A scale of zero (a vector of zeros) has no logarithm: 2**-60 is nothing beside the other values.
        scale_log2 = log2(tl.where(scale < 8.673617379884035e-19, 8.673617379884035e-19, scale), VALUE.fast)
        scale_inverse = tl.exp2(-scale_log2)
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
        # Far below zero, a maximum less 15 may be the maximum.
        weight = tl.exp2((scores - finite_maximum[None, :]) + 15.0)
    else:
        weight = tl.exp2(scores - (finite_maximum - 15.0)[None, :])
    decay = tl.exp2(maximum - finite_maximum + scale_decay)
    maximum = new_maximum
    p = weight
    if SCALED:
        p = weight * scale_inverse[:, None]
    p_sum = p_sum * decay[None, None, :] + _sum_in_thread(p, NUM_WARPS)
    if VALUE.has_zero and VALUE.granularity == "token":
        zero_per_weight = (tl.where(in_cache, zero, 0.0) * scale_inverse)[:, None]
        zero_sum = zero_sum * decay[None, None, :] + _sum_in_thread(weight * zero_per_weight, NUM_WARPS)
    weight = weight.to(VALUE.dtype)
    levels = _unpack(packed, scale, zero, VALUE)
    new_accs = ()
    NUM_PLANES: tl.constexpr = VALUE.num_planes
    for plane in tl.static_range(NUM_PLANES):
        level = levels[plane]
        if VALUE.granularity == "group" or VALUE.code_dtype != tl.uint8:
            level = tl.where(in_cache[None, :], level, 0.0)  # what was never written may be NaN
        acc = tl.dot(level, weight, accs[plane] * decay[None, :], input_precision=PRECISION)
        new_accs = new_accs + (acc,)  # noqa: RUF005
    return maximum, scale_maximum, p_sum, zero_sum, new_accs


@jit
def _sum_in_thread(x, NUM_WARPS: tl.constexpr):
    """[tokens, rows] -> [NUM_WARPS, 8, rows]: partial sums over tokens.

    In the accumulator of a tensor core product token ``n`` lies with warp ``n // 16 % NUM_WARPS`` and lanes ``n % 8``.
    Summing only over the rest keeps the sum in a thread, without shuffles and barriers.
    """
    TOKENS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [TOKENS // (16 * NUM_WARPS), NUM_WARPS, 2, 8, ROWS])
    return tl.sum(tl.sum(x, 2), 0)


@jit
def _load_packed(ptr, stride_block, tokens_left, OPERAND: tl.constexpr, TOKENS: tl.constexpr):
    """A tile of packed tokens: code sections, and float32 scales and zeros (the scales, where there are none).

    Code sections are a tuple of tiles [tokens, width] of a key and [width, tokens] of a value; those of high bits come
    as :func:`_load_high_bits` says. Scales and zeros are [tokens] if they are per token; else one tile for each plane
    that broadcasts to the codes. The center of the codec's levels is part of the zeros.

    Masks are per block and not per token, so that they do not break up wide loads: blocks exist whole.
    """
    token = tl.arange(0, TOKENS)
    block, slot = token // OPERAND.block_tokens, token % OPERAND.block_tokens
    exists = block * OPERAND.block_tokens < tokens_left
    block_offset = block.to(tl.int64) * stride_block
    column = tl.arange(0, OPERAND.padded_width)
    packed = (_load_codes(ptr, block_offset, slot, exists, column, 0, OPERAND.code_dtype, OPERAND.width, OPERAND),)
    NUM_HIGH: tl.constexpr = OPERAND.num_high
    for k in tl.static_range(NUM_HIGH):
        high = _load_high_bits(ptr, block_offset, slot, exists, column, k, OPERAND)
        packed = packed + high
    scale = tl.full([TOKENS], 1.0, tl.float32)
    zero = scale
    if OPERAND.has_scale:
        scale = _load_metadata(
            ptr + OPERAND.scale_offset, stride_block, block, slot, exists, column, OPERAND.scale_dtype, OPERAND
        )
        zero = scale
    if OPERAND.has_zero:
        zero = _load_metadata(
            ptr + OPERAND.zero_offset, stride_block, block, slot, exists, column, OPERAND.zero_dtype, OPERAND
        )
        if OPERAND.granularity == "token":
            zero += OPERAND.center * scale
        else:
            centered = ()
            NUM_PLANES: tl.constexpr = OPERAND.num_planes
            for plane in tl.static_range(NUM_PLANES):
                centered = centered + (zero[plane] + OPERAND.center * scale[plane],)  # noqa: RUF005
            zero = centered
    return packed, scale, zero


@jit
def _load_high_bits(ptr, block_offset, slot, exists, column, K: tl.constexpr, OPERAND: tl.constexpr):
    """High section K in the shape of the section ``codes``: int32 with the bits of plane 0 lowest.

    A codec that unpacks it gets the bytes as they are, and 0xff where the first piece is meant, else 0.
    """
    WIDTH: tl.constexpr = OPERAND.high_widths[K]
    byte = column % WIDTH
    if OPERAND.width != OPERAND.padded_width:
        byte = tl.where(column < OPERAND.width, byte, WIDTH)
    high = _load_codes(ptr, block_offset, slot, exists, byte, OPERAND.high_offsets[K], tl.uint8, WIDTH, OPERAND)
    piece = tl.where(column < OPERAND.width, column // WIDTH, 0)
    if OPERAND.fast:
        first = tl.where(piece == 0, 255, 0).to(tl.uint8)
        high = (high, tl.broadcast_to(first[:, None] if OPERAND.column_major else first[None, :], high.shape))
    else:
        high = (high.to(tl.int32) >> (piece[:, None] if OPERAND.column_major else piece[None, :]),)
    return high


@jit
def _load_codes(
    ptr, block_offset, slot, exists, column, offset, DTYPE: tl.constexpr, WIDTH: tl.constexpr, OPERAND: tl.constexpr
):
    """Columns of one code section: [tokens, columns] of a key, [columns, tokens] of a value."""
    ptr = (ptr + offset).to(tl.pointer_type(DTYPE))
    block_offset = block_offset // (DTYPE.primitive_bitwidth // 8)
    if OPERAND.column_major:
        ptrs = ptr + (block_offset + slot)[None, :] + (column * OPERAND.block_tokens)[:, None]
        in_bounds, in_vector = exists[None, :], (column < WIDTH)[:, None]
    else:
        ptrs = ptr + (block_offset + slot * WIDTH)[:, None] + column[None, :]
        in_bounds, in_vector = exists[:, None], (column < WIDTH)[None, :]
    if OPERAND.width != OPERAND.padded_width:
        in_bounds = in_bounds & in_vector
    return tl.load(ptrs, mask=in_bounds, other=0)


@jit
def _load_metadata(
    ptr, stride_block, block, slot, exists, column, DTYPE: tl.constexpr, OPERAND: tl.constexpr
):  # fmt: skip
    """Scales or zero points: float32 [tokens] if they are per token, else a tuple of tiles, one a plane.

    Strides of packed data are multiples of 64 bytes: they divide evenly.
    """
    ptr = ptr.to(tl.pointer_type(DTYPE))
    block_offset = block.to(tl.int64) * (stride_block // (DTYPE.primitive_bitwidth // 8))
    if OPERAND.granularity == "token":
        metadata = tl.load(ptr + block_offset + slot, mask=exists, other=0.0).to(tl.float32)
    else:
        metadata = ()
        NUM_PLANES: tl.constexpr = OPERAND.num_planes
        for plane in tl.static_range(NUM_PLANES):
            channel = tl.minimum(plane * OPERAND.width + column, OPERAND.head_dim - 1)
            if OPERAND.granularity == "group":
                row, index = block_offset + slot * OPERAND.num_scales, channel // OPERAND.group_size
            else:
                row, index = block_offset, channel
            if OPERAND.column_major:
                ptrs, mask = ptr + index[:, None] + row[None, :], exists[None, :]
            else:
                ptrs, mask = ptr + row[:, None] + index[None, :], exists[:, None]
            metadata = metadata + (tl.load(ptrs, mask=mask, other=0.0).to(tl.float32),)  # noqa: RUF005
    return metadata


@jit
def _store_output(
    state, out_ptr, lse_ptr, out_row, in_query,
    VALUE: tl.constexpr, WIDE_SCORES: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Normalise the accumulated output and store it; 0 for a row that saw nothing."""
    maximum, scale_maximum, p_sum, zero_sum, accs = state
    total = tl.sum(tl.sum(p_sum, 0), 0)
    seen = total > 0
    inverse = tl.where(seen, 1.0 / total, 0.0)
    if PARTIAL:
        if WIDE_SCORES and VALUE.has_scale and VALUE.granularity == "token":
            maximum += scale_maximum
        tl.store(lse_ptr + out_row, tl.where(seen, maximum - 15.0 + tl.log2(total), float("-inf")), mask=in_query)
    zero = tl.sum(tl.sum(zero_sum, 0), 0)[None, :]
    column = tl.arange(0, VALUE.padded_width)[:, None]
    in_bounds = in_query[None, :] & (column < VALUE.width)
    out_ptrs = out_ptr + out_row[None, :] * VALUE.head_dim + column
    NUM_PLANES: tl.constexpr = VALUE.num_planes
    for plane in tl.static_range(NUM_PLANES):
        out = (accs[plane] * VALUE.gain + zero) * inverse[None, :]
        tl.store(out_ptrs + plane * VALUE.width, out, mask=in_bounds)


@jit(do_not_specialize=["num_rows", "num_splits", "num_heads", "q_len"])
def combine_kernel(
    partial_ptr, lse_ptr, sinks_ptr, out_ptr, num_rows, num_splits, num_heads, q_len,
    VALUE: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ROWS query rows by their log-sum-exp, and leave the rotated basis. Grid (num_rows / ROWS,).

    Args:
        partial_ptr: float32 [num_splits, num_rows, head_dim].
        lse_ptr: float32 [num_splits, num_rows], log2 of the sum of exponentials; -inf for a split that saw nothing.
        sinks_ptr: with HAS_SINKS [num_heads], any float dtype: a score with a value of zero that every row has beside
            its splits. Rows are [batch, num_heads, q_len].
        out_ptr: [num_rows, head_dim], any float dtype; zeros for a row that saw nothing.
        SPLITS: splits that are read at once.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, VALUE.padded_head_dim)
    in_head = (channel < VALUE.head_dim)[None, :]
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row // q_len % num_heads, mask=row < num_rows, other=0.0)
        maximum = sink.to(tl.float32) * 1.4426950408889634
        total = tl.where(maximum > float("-inf"), 1.0, 0.0)
    else:
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, VALUE.padded_head_dim], 0.0, tl.float32)
    for first_split in range(0, num_splits, SPLITS):
        split = first_split + tl.arange(0, SPLITS)[None, :]
        in_bounds = (split < num_splits) & (row < num_rows)[:, None]
        index = split.to(tl.int64) * num_rows + row[:, None]
        lse = tl.load(lse_ptr + index, mask=in_bounds, other=float("-inf"))
        partial_ptrs = partial_ptr + index[:, :, None] * VALUE.head_dim + channel[None, None, :]
        partial = tl.load(partial_ptrs, mask=in_bounds[:, :, None] & in_head[None, :, :], other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(lse, 1))
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(lse - finite_maximum[:, None])
        decay = tl.exp2(maximum - finite_maximum)
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None] + tl.sum(partial * weight[:, :, None], 1)
        maximum = new_maximum
    out = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    if VALUE.rotated:
        out = unrotate(out, VALUE)
    out_ptrs = out_ptr + row[:, None] * VALUE.head_dim + channel[None, :]
    tl.store(out_ptrs, out, mask=(row < num_rows)[:, None] & in_head)
