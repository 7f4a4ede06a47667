"""The query in the decode kernel of attention: the rows of a program, and the second operand of the score products.

Rows become columns of that operand.

A tensor core product has at least 8 columns. If there are fewer query rows, each row takes two neighbouring columns.
One thread holds both columns of the product, so that dropping every other column costs nothing, and the softmax
computes only one column per row.

If the levels of keys are integers, the two columns of a row are its two *digits*, also with 8 and 16 rows. The query is
rounded to 15-bit integers ``128 * high + low``, and products multiply 8-bit integers. They are exact and twice as fast,
and codes need not be converted to floats. A channel is rounded to 2**-15 of the largest channel of its row, whereas
bfloat16 rounds a channel to 2**-9 of itself. Only queries of rotated formats and of words use digits: after a Hadamard
rotation, and in the basis of a calibration, no channel is much larger than the others.
"""

from __future__ import annotations

from kvcompile.kernels.lang.planes import planes_of
from kvcompile.kernels.lang.tiles import normalise_rows, round_to_integer, transposed
from kvcompile.kernels.lang.triton import constexpr_function, jit, tl
from kvcompile.kernels.tiles.packed import has_zeros_of_groups
from kvcompile.kernels.tiles.rotation import rotate
from kvcompile.kernels.tiles.visible_range import visible_tokens

MOST_ROWS_IN_DIGITS = 16
"""More rows were not measured."""


@constexpr_function
def in_digits(key, rows, num_warps):
    """Whether the query of a program with this number of rows and warps is given in digits.

    Four warps are a warpgroup of Hopper. Triton 3.6 fails on its products of integers with more than eight columns.
    """
    return key.multiplies_integers and (rows < 8 or (rows <= MOST_ROWS_IN_DIGITS and num_warps < 4))


@jit
def rows_of_program(
    program, GROUP_SIZE: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The query rows of a program, and the tokens that they see.

    Query heads vary fastest within the rows, so that a tile of rows spans few positions.

    Args:
        program: (first_row, batch, kv_head, num_kv_heads, q_len, kv_len, query_ptr, query_strides, mask_ptr,
            mask_strides, range_ptr): the first of the ROWS rows, the KV head, and arguments of the kernel.

    Returns:
        position, head, in_query: [ROWS], the position and the query head of each row, and whether the row exists.
        query_ptrs: [ROWS], pointers to the rows.
        tokens: the ranges (begin, end, all_begin, all_end) of
            :func:`kvcompile.kernels.tiles.visible_range.visible_tokens`.
        visibility: the argument of :func:`kvcompile.kernels.attention.softmax_tile.visible_scores`.
    """
    (
        first_row, batch, kv_head, _, q_len, kv_len, _, _, mask_ptr, mask_strides, range_ptr,
    ) = program  # fmt: skip
    position, head, in_query, query_ptrs = _rows(program, first_row + tl.arange(0, ROWS), GROUP_SIZE)
    tokens, ranges = visible_tokens(
        first_row, in_query, range_ptr + (batch * q_len + position) * 3, q_len, kv_len, GROUP_SIZE, MASK, IS_CAUSAL,
        ROWS,
    )  # fmt: skip
    mask_ptr += batch * mask_strides[0]
    mask_row_ptrs = mask_ptr + head * mask_strides[1] + position * mask_strides[2]
    mask_ptr += kv_head * GROUP_SIZE * mask_strides[1]  # the same for all rows, without MASK_PER_ROW
    visibility = (position, in_query, ranges[0], ranges[1], ranges[2], mask_ptr, mask_row_ptrs, mask_strides[3])
    return position, head, in_query, query_ptrs, tokens, visibility


@jit
def _rows(program, row, GROUP_SIZE: tl.constexpr):
    """The position and the query head of each ``row``, whether the row exists, and pointers to the rows."""
    _, batch, kv_head, _, q_len, _, query_ptr, query_strides, _, _, _ = program
    position = (row // GROUP_SIZE).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    query_ptrs = query_ptr + batch * query_strides[0] + head * query_strides[1] + position * query_strides[2]
    return position, head, position < q_len, query_ptrs


@jit
def load_query_columns(program, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr):
    """Load the query rows of a program as columns, [padded_head_dim, columns] in KEY.dtype, see :func:`columns_of`."""
    COLUMNS: tl.constexpr = max(8, ROWS)
    row = program[0] + tl.arange(0, COLUMNS) // (COLUMNS // ROWS)
    _, _, in_query, query_ptrs = _rows(program, row, GROUP_SIZE)
    channel = tl.arange(0, KEY.padded_head_dim)[:, None]
    in_bounds = in_query[None, :] & (channel < KEY.head_dim)
    return tl.load(query_ptrs[None, :] + channel * program[7][3], mask=in_bounds, other=0.0).to(KEY.dtype)


@jit
def load_query_rows(row_ptrs, in_query, stride_channel, KEY: tl.constexpr):
    """Load query rows, [ROWS, padded_head_dim] in the dtype of the query."""
    channel = tl.arange(0, KEY.padded_head_dim)[None, :]
    in_bounds = in_query[:, None] & (channel < KEY.head_dim)
    return tl.load(row_ptrs[:, None] + channel * stride_channel, mask=in_bounds, other=0.0)


@jit
def query_of(q, score_scale, KEY: tl.constexpr, NUM_WARPS: tl.constexpr):
    """The second operand of the score products, from query rows ``q``, [rows, padded_head_dim].

    Returns:
        operand: a tuple of tiles [padded_width, columns], one for each plane of the key. Rows are scaled to the range
            of the products, and planes by their relative gains. In digits, a pair: this tuple, and [rows], the product
            of the query with the constant offset of all levels, in the units of the scores.
        factor: [rows], undoes the scaling of rows and includes the scale of the scores.
        q_sum: [rows], the sum over the channels of the scaled query, in the units of the scores; a tuple with the sum
            of each group if keys have zero points per group.
    """
    q = q.to(tl.float32)
    if KEY.rotated:
        # Triton computes a tile again for each layout in which it is used, unless the tile comes out of such a loop.
        turns = 1
        while turns > 0:
            q = rotate(q, KEY)
            turns -= 1
    if in_digits(KEY, q.shape[0], NUM_WARPS):
        query = _query_in_digits(q, score_scale, KEY)
    else:
        query = _query_in_floats(q, score_scale, KEY)
    return query


@jit
def _query_in_floats(q, score_scale, KEY: tl.constexpr):
    """:func:`query_of` for products of floats."""
    q, factor = normalise_rows(q, KEY.query_exponent, KEY.dtype)
    factor = factor * score_scale
    q_sum = _sums_of_groups(q.to(tl.float32), factor, KEY)
    planes = transposed(planes_of(q, KEY), KEY)
    columns = ()
    NUM_PLANES: tl.constexpr = KEY.num_planes
    for plane in tl.static_range(NUM_PLANES):
        x = planes[plane] * KEY.relative_gains[plane]
        columns = columns + (columns_of(x, max(8, q.shape[0])),)  # noqa: RUF005
    return columns, factor * KEY.largest_gain, q_sum


@jit
def _sums_of_groups(q, factor, KEY: tl.constexpr):
    """The sums ``q_sum`` of :func:`query_of`."""
    if has_zeros_of_groups(KEY):
        group = tl.arange(0, KEY.padded_head_dim)[None, :] // KEY.group_size
        sums = ()
        NUM_SCALES: tl.constexpr = KEY.num_scales
        for i in tl.static_range(NUM_SCALES):
            sums = sums + (tl.sum(tl.where(group == i, q, 0.0), 1) * factor,)  # noqa: RUF005
    else:
        sums = tl.sum(q, 1) * factor
    return sums


@jit
def _query_in_digits(q, score_scale, KEY: tl.constexpr):
    """:func:`query_of` for products of integers: the query in digits."""
    integers, factor = _integers(q)
    factor = factor * score_scale
    q_sum = tl.sum(integers, 1).to(tl.float32) * factor
    planes = planes_of(integers.to(tl.int16), KEY)
    if KEY.codec.interleaved:
        planes = interleaved(planes)
    planes = transposed(planes, KEY)
    digits = ()
    NUM_PLANES: tl.constexpr = KEY.num_planes
    for plane in tl.static_range(NUM_PLANES):
        high, low = _digits(planes[plane])
        digits = digits + (_side_by_side(high, low),)  # noqa: RUF005
    return (digits, q_sum * (KEY.codec.integer_offset * KEY.gain)), factor * KEY.gain, q_sum


@jit
def interleaved(planes):
    """Reorder the planes [rows, width] of a query to the order of integers that are looked up by nibbles.

    Plane ``i`` is paired with plane ``i + num_planes / 2``, because a lookup takes the codes of both from the nibbles
    of the same bytes. For four columns ``j`` to ``j + 3`` of a pair, the first resulting tile has the columns ``j`` and
    ``j + 1`` of both planes, alternating between the planes. The second tile has the columns ``j + 2`` and ``j + 3``.
    """
    PAIRS: tl.constexpr = len(planes) // 2
    ROWS: tl.constexpr = planes[0].shape[0]
    WIDTH: tl.constexpr = planes[0].shape[1]
    result = ()
    for i in tl.static_range(PAIRS):
        pairs = tl.reshape(tl.join(planes[i], planes[i + PAIRS]), [ROWS, WIDTH // 4, 2, 4])
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        result = result + (tl.reshape(first, [ROWS, WIDTH]), tl.reshape(second, [ROWS, WIDTH]))  # noqa: RUF005
    return result


@jit
def _integers(q):
    """Round the rows of a float32 tile [rows, channels] to integers of two digits in base 128.

    Returns:
        The integers, int32 [rows, channels], and the factor [rows] from the integers to the channels. The factor is NaN
        if a channel of the row is not finite.
    """
    # The bits of absolute values, read as integers, have the same order. NaN lies above infinity.
    largest = tl.max(tl.abs(q).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    largest = tl.maximum(largest, 1e-30, propagate_nan=tl.PropagateNan.ALL)
    integers = round_to_integer(q * (16256.0 / largest)[:, None]).to(tl.int32)  # 16256 = 127 * 128
    return integers, largest / 16256.0 + largest * 0.0


@jit
def _digits(integers):
    """The high and the low digits of integers, int8: ``128 * high + low``."""
    integers = integers.to(tl.int32)
    high = (integers + 64) >> 7
    return high.to(tl.int8), (integers - high * 128).to(tl.int8)


@jit
def scores_of_digits(integers, query, KEY: tl.constexpr):
    """``level . q`` in the units of the scores, float32 [tokens, rows], for a query in digits.

    ``integers`` are the integers of the key's levels, a tile [tokens, width] for each plane.
    """
    operand, factor, _ = query
    planes, offset_product = operand
    products = tl.dot(integers[0], planes[0], out_dtype=tl.int32)
    OTHER_PLANES: tl.constexpr = KEY.num_planes - 1
    for plane in tl.static_range(OTHER_PLANES):
        products = tl.dot(integers[plane + 1], planes[plane + 1], products, out_dtype=tl.int32)
    scores = sum_of_digits(products) * factor[None, :]
    if KEY.codec.integer_offset != 0.0:
        scores += offset_product[None, :]
    return scores


@jit
def sum_of_digits(products):
    """``128 * high + low``, float32 [n, rows], of products with digits, int32 [n, 2 * rows]."""
    high, low = tl.split(tl.reshape(products, [products.shape[0], products.shape[1] // 2, 2]))
    return (high * 128 + low).to(tl.float32)


@jit
def columns_of(x, COLUMNS: tl.constexpr):
    """[n, columns] from [n, rows]: each row once, or twice side by side if there are fewer rows than COLUMNS."""
    if x.shape[1] < COLUMNS:
        x = _side_by_side(x, x)
    return x


@jit
def first_columns(products, ROWS: tl.constexpr):
    """The inverse of :func:`columns_of`: [n, ROWS]."""
    if products.shape[1] > ROWS:
        products, _ = tl.split(tl.reshape(products, [products.shape[0], ROWS, 2]))
    return products


@jit
def _side_by_side(x, y):
    """[n, 2 * rows] from two tiles [n, rows]: the columns of ``x`` and ``y`` alternate."""
    return tl.reshape(tl.join(x, y), [x.shape[0], 2 * x.shape[1]])
