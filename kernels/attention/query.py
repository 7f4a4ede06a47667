"""The query of attention in Triton as the second operand of its products: rows become columns.

A tensor core product has 8 columns at least. Of fewer rows each has two columns, side by side. Neighbouring columns of
a product lie in one thread: to take every other one costs nothing, and spares the softmax the half that is not needed.

If the levels of a key are integers, the two columns of a row are its two digits: the query is rounded to integers of 15
bits, ``128 * high + low``, and the products are those of 8-bit integers, exact, twice as fast, and of codes that need
not be made floats. A row is rounded to 2**-15 of its largest channel; bfloat16 has 2**-9 of each. A Hadamard matrix
leaves no channel much larger than the others, so that this is for rotated formats alone.
"""

from __future__ import annotations

from kvcompile.kernels.lang.tiles import normalise_rows, planes_of, round_to_integer, transposed
from kvcompile.kernels.lang.triton import constexpr_function, jit, tl
from kvcompile.kernels.tiles.rotation import rotate


@constexpr_function
def in_digits(key, rows):
    """Whether a query of that many rows is given in digits."""
    return key.multiplies_integers and rows < 8


@jit
def load_query(row_ptrs, in_query, stride_channel, score_scale, KEY: tl.constexpr):
    """The query as the second operand of the scores: (operand, factor, q_sum).

    ``operand`` are planes [padded_width, columns], one for each plane of the key, with rows scaled to what the products
    can hold, and planes by their relative gains; in digits the planes, and the product [rows] of the offset of all
    levels, in the units of the scores.
    ``factor`` [rows] takes the scaling back and includes the scale of the scores; ``q_sum`` [rows] is the sum over
    channels as the products see them, in the units of the scores.
    """
    channel = tl.arange(0, KEY.padded_head_dim)[None, :]
    in_bounds = in_query[:, None] & (channel < KEY.head_dim)
    q = tl.load(row_ptrs[:, None] + channel * stride_channel, mask=in_bounds, other=0.0).to(tl.float32)
    if KEY.rotated:
        q = rotate(q, KEY)
    if in_digits(KEY, q.shape[0]):
        query = _query_in_digits(q, score_scale, KEY)
    else:
        query = _query_in_floats(q, score_scale, KEY)
    return query


@jit
def _query_in_floats(q, score_scale, KEY: tl.constexpr):
    """:func:`load_query` of rows in the dtype of the products."""
    q, factor = normalise_rows(q, KEY.query_exponent, KEY.dtype)
    factor = factor * score_scale
    q_sum = tl.sum(q.to(tl.float32), 1) * factor
    planes = transposed(planes_of(q, KEY), KEY)
    columns = ()
    NUM_PLANES: tl.constexpr = KEY.num_planes
    for plane in tl.static_range(NUM_PLANES):
        x = planes[plane] * KEY.relative_gains[plane]
        columns = columns + (columns_of(x, max(8, q.shape[0])),)  # noqa: RUF005
    return columns, factor * KEY.largest_gain, q_sum


@jit
def _query_in_digits(q, score_scale, KEY: tl.constexpr):
    """:func:`load_query` of rows in digits."""
    high, low, factor = _digits(q)
    factor = factor * score_scale
    q_sum = tl.sum(high.to(tl.int32) * 128 + low.to(tl.int32), 1).to(tl.float32) * factor
    high, low = planes_of(high, KEY), planes_of(low, KEY)
    if KEY.codec.interleaved:
        high, low = interleaved(high), interleaved(low)
    high, low = transposed(high, KEY), transposed(low, KEY)
    planes = ()
    NUM_PLANES: tl.constexpr = KEY.num_planes
    for plane in tl.static_range(NUM_PLANES):
        planes = planes + (_side_by_side(high[plane], low[plane]),)  # noqa: RUF005
    return (planes, q_sum * (KEY.codec.integer_offset * KEY.gain)), factor * KEY.gain, q_sum


@jit
def interleaved(planes):
    """The planes [rows, width] of a query in the order of integers that are looked up by nibbles, of two planes of
    codes a byte: the first and the middle plane, then the next of each half.

    Of four columns ``j`` to ``j + 3`` of two planes, the first result has ``j`` and ``j + 1`` of both, each plane in
    turn, and the second has the others.
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
def _digits(q):
    """Rows of a float32 tile [rows, channels] as integers of two digits of base 128, int8 [rows, channels] each, and
    the factor [rows] that takes them back; not a number if a channel is not finite."""
    largest = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
    integers = round_to_integer(q * (16256.0 / largest)[:, None]).to(tl.int32)  # 16256 = 127 * 128
    high = (integers + 64) >> 7
    return high.to(tl.int8), (integers - high * 128).to(tl.int8), largest / 16256.0 + tl.sum(q * 0.0, 1)


@jit
def scores_of_digits(integers, query, KEY: tl.constexpr):
    """``level . q`` in the units of the scores, float32 [tokens, rows], for the integers [tokens, width] of each plane
    and a query in digits."""
    operand, factor, _ = query
    planes, offset_product = operand
    TOKENS: tl.constexpr = integers[0].shape[0]
    ROWS: tl.constexpr = factor.shape[0]
    products = tl.full([TOKENS, 2 * ROWS], 0, tl.int32)
    NUM_PLANES: tl.constexpr = KEY.num_planes
    for plane in tl.static_range(NUM_PLANES):
        products = tl.dot(integers[plane], planes[plane], products, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(products, [TOKENS, ROWS, 2]))
    scores = (high * 128 + low).to(tl.float32) * factor[None, :]
    if KEY.codec.integer_offset != 0.0:
        scores += offset_product[None, :]
    return scores


@jit
def columns_of(x, COLUMNS: tl.constexpr):
    """[n, rows] -> [n, columns]: every row once, or twice if there are too few."""
    if x.shape[1] < COLUMNS:
        x = _side_by_side(x, x)
    return x


@jit
def first_columns(products, ROWS: tl.constexpr):
    """The inverse of :func:`columns_of`."""
    if products.shape[1] > ROWS:
        products, _ = tl.split(tl.reshape(products, [products.shape[0], ROWS, 2]))
    return products


@jit
def _side_by_side(x, y):
    """[n, rows] twice -> [n, 2 * rows], the columns of ``x`` and ``y`` in turn."""
    return tl.reshape(tl.join(x, y), [x.shape[0], 2 * x.shape[1]])
