"""The rotation of :mod:`kvcompile.kernels.formats.rotation` in Triton, for the rows of a tile in registers."""

from __future__ import annotations

from kvcompile.kernels.formats.rotation import HASH_MULTIPLIERS as _HASH_MULTIPLIERS
from kvcompile.kernels.lang.triton import constant, constexpr_function, jit, tl

HASH_MULTIPLIERS = constant(_HASH_MULTIPLIERS)


@jit
def rotate(x, OPERAND: tl.constexpr):
    """Rotate the rows of a float32 tile [rows, channels] into the stored basis."""
    if OPERAND.rotation_seed != 0:
        x *= random_signs(tl.arange(0, x.shape[1]), OPERAND.rotation_seed)[None, :]
    return hadamard(x, OPERAND.head_dim)


@jit
def unrotate(x, OPERAND: tl.constexpr):
    """Inverse of :func:`rotate`."""
    x = hadamard(x, OPERAND.head_dim)
    if OPERAND.rotation_seed != 0:
        x *= random_signs(tl.arange(0, x.shape[1]), OPERAND.rotation_seed)[None, :]
    return x


@constexpr_function
def rotates_by_products(operand, rows):
    """Whether tiles of ``rows`` rows are rotated on tensor cores: the tile is large enough, and the matrix fits."""
    return operand.rotated and rows >= 16 and product_channels(operand) <= 128


@constexpr_function
def product_channels(operand):
    """The number of channels that a product on tensor cores sums over.

    If ``16 * n`` is a power of two, its Hadamard matrix is the Kronecker product of the Hadamard matrices of ``n`` and
    16 channels. Only the product with the matrix of 16 channels, two elements per thread, runs on tensor cores. The
    other factor takes sums and differences of numbers that one thread already holds. A block-diagonal matrix is
    multiplied as a whole.
    """
    return 16 if operand.head_dim == operand.padded_head_dim else operand.padded_head_dim


@jit
def rotation_matrix(OPERAND: tl.constexpr, ROWS: tl.constexpr):
    """The matrix by which :func:`to_stored_basis` multiplies tiles of ROWS rows; 0 if it does not use a product."""
    matrix = 0
    if rotates_by_products(OPERAND, ROWS):
        SUMMED: tl.constexpr = product_channels(OPERAND)
        matrix = hadamard_rows(tl.arange(0, SUMMED), min(OPERAND.head_dim, SUMMED), SUMMED)
    return matrix


@jit
def to_stored_basis(x, matrix, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The rows of a tile of any float dtype in the stored basis, float32; ``matrix`` is :func:`rotation_matrix`."""
    if rotates_by_products(OPERAND, x.shape[0]):
        x = rotate_by_products(x, matrix, OPERAND, PRECISION)
    elif OPERAND.rotated:
        x = rotate(x.to(tl.float32), OPERAND)
    else:
        x = x.to(tl.float32)
    return x


@jit
def rotate_by_products(x, matrix, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """:func:`rotate` for at least 16 rows of any float dtype, by products with :func:`rotation_matrix`.

    The elements of the matrix are 1, -1 and 0, so that products are exact in every dtype. Sums are float32.
    """
    ROWS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = OPERAND.padded_head_dim
    SUMMED: tl.constexpr = product_channels(OPERAND)
    RUNS: tl.constexpr = CHANNELS // SUMMED
    channel = tl.arange(0, CHANNELS)
    if PRECISION == "ieee":
        x = x.to(tl.float32)  # the interpreter multiplies bit patterns
    if OPERAND.rotation_seed != 0:
        x = (x * random_signs(channel, OPERAND.rotation_seed)[None, :]).to(x.dtype)
    x = tl.reshape(tl.permute(tl.reshape(x, [ROWS, RUNS, SUMMED]), (1, 0, 2)), [RUNS * ROWS, SUMMED])
    x = tl.dot(x, matrix.to(x.dtype), input_precision=PRECISION)
    x = tl.reshape(x, [RUNS, ROWS * SUMMED])
    for stage in tl.static_range(4):
        if RUNS >> stage > 1:
            # Sums and differences over the first bit of the run's number, which moves to the end.
            halves = tl.reshape(x, [2, RUNS >> (stage + 1), (ROWS * SUMMED) << stage])
            first, second = tl.split(tl.permute(halves, (1, 2, 0)))
            x = tl.join(first + second, first - second)
            x = tl.reshape(x, [RUNS >> (stage + 1), (ROWS * SUMMED) << (stage + 1)])
    x = tl.reshape(tl.permute(tl.reshape(x, [ROWS, SUMMED, RUNS]), (0, 2, 1)), [ROWS, CHANNELS])
    return x * rotation_norm(channel, OPERAND.head_dim)[None, :]


@jit
def rotation_norm(channel, HEAD_DIM: tl.constexpr):
    """The factors that scale the columns of :func:`hadamard_rows` to length 1; 0 in padding."""
    norm = tl.zeros(channel.shape, tl.float32)
    for bit in tl.static_range(4, 9):
        norm = tl.where(_in_rotation_block(channel, bit, HEAD_DIM), 2.0 ** (-bit / 2), norm)
    return norm


@jit
def hadamard_rows(row, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Rows of the matrix of :func:`hadamard` without its norm, float32 [rows, CHANNELS]: 1 and -1, or 0 in padding."""
    row = row[:, None]
    column = tl.arange(0, CHANNELS)[None, :]
    matrix = tl.zeros([row.shape[0], CHANNELS], tl.float32)
    for bit in tl.static_range(4, 9):
        odd = row & column & ((1 << bit) - 1)
        odd = odd ^ (odd >> 4)
        odd = odd ^ (odd >> 2)
        odd = (odd ^ (odd >> 1)) & 1
        in_block = _in_rotation_block(row, bit, HEAD_DIM) & _in_rotation_block(column, bit, HEAD_DIM)
        matrix = tl.where(in_block, 1.0 - 2.0 * odd.to(tl.float32), matrix)
    return matrix


@jit
def rotation_of_planes(OPERAND: tl.constexpr):
    """For each plane of a rotated format, the rows of the rotation matrix by which its levels are multiplied.

    The tiles are float32 [padded_width, padded_head_dim]; their elements are 1, -1 and 0. A format that is not rotated
    gets an empty tuple.
    """
    rotation = ()
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    if OPERAND.rotated:
        column = tl.arange(0, OPERAND.padded_width)
        for plane in tl.static_range(NUM_PLANES):
            row = tl.where(column < OPERAND.width, plane * OPERAND.width + column, OPERAND.padded_head_dim)
            rows = hadamard_rows(row, OPERAND.head_dim, OPERAND.padded_head_dim)
            rotation = rotation + (rows,)  # type: ignore[assignment]  # noqa: RUF005
    return rotation


@jit
def unrotated_levels(levels, rotation, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """A tile of levels in the stored basis, multiplied by the rotation matrix: float32 [tokens, padded_head_dim].

    Scales, ``largest_gain`` and :func:`unrotated_factor` turn the result into vectors in the original basis. Levels and
    the matrix are exact in the dtype of the products, so that products are exact, too.

    Args:
        levels: for each plane a tile [tokens, padded_width], or with ``column_major`` its transpose.
        rotation: the result of :func:`rotation_of_planes`.
    """
    TOKENS: tl.constexpr = levels[0].shape[1] if OPERAND.column_major else levels[0].shape[0]
    x = tl.full([TOKENS, OPERAND.padded_head_dim], 0.0, tl.float32)
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    for plane in tl.static_range(NUM_PLANES):
        level = levels[plane]
        if OPERAND.column_major:
            level = tl.trans(level)
        rows = (rotation[plane] * OPERAND.relative_gains[plane]).to(OPERAND.dtype)
        x = tl.dot(level, rows, x, input_precision=PRECISION)
    return x


@jit
def rotated_ones(rotation, OPERAND: tl.constexpr):
    """The product of a vector of ones with the rotation matrix, float32 [padded_head_dim]."""
    ones = tl.full([OPERAND.padded_head_dim], 0.0, tl.float32)
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    for plane in tl.static_range(NUM_PLANES):
        ones += tl.sum(rotation[plane], 0)
    return ones


@jit
def unrotated_factor(OPERAND: tl.constexpr):
    """The factors of the channels of :func:`unrotated_levels`, norms and signs: float32 [padded_head_dim]."""
    channel = tl.arange(0, OPERAND.padded_head_dim)
    factor = rotation_norm(channel, OPERAND.head_dim)
    if OPERAND.rotation_seed != 0:
        factor *= random_signs(channel, OPERAND.rotation_seed)
    return factor


@jit
def hadamard(x, HEAD_DIM: tl.constexpr):
    """Rotate the rows of a float32 tile [rows, channels] as :func:`kvcompile.kernels.formats.rotation.rotate` does.

    This is the fast Walsh-Hadamard transform, with a stage for each bit of the channel index. A stage adds and
    subtracts neighbouring channels, and moves the bit in which they differ to the front. All stages are therefore
    alike, and the last stage restores the order. If HEAD_DIM is not a power of two, the matrix is block-diagonal, and a
    block of ``2**n`` channels takes part in the first ``n`` stages only. Channels beyond HEAD_DIM are padding.
    """
    ROWS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = x.shape[1]
    pair = tl.arange(0, CHANNELS // 2)[None, :] * 2
    channel = tl.arange(0, CHANNELS)[None, :]
    norm = rotation_norm(channel, HEAD_DIM)
    for stage in tl.static_range(0, 8):
        if 1 << stage < CHANNELS:
            even, odd = tl.split(tl.reshape(x, [ROWS, CHANNELS // 2, 2]))
            total, difference = even + odd, even - odd
            if HEAD_DIM != CHANNELS:
                # Undo the moves of the earlier stages, to find the channel of each pair.
                origin = ((pair << stage) | (pair // (CHANNELS >> stage))) & (CHANNELS - 1)
                takes_part = origin < 0
                for bit in tl.static_range(4, 9):
                    if bit > stage:
                        takes_part = takes_part | _in_rotation_block(origin, bit, HEAD_DIM)
                total = tl.where(takes_part, total, even)
                difference = tl.where(takes_part, difference, odd)
            x = tl.reshape(tl.permute(tl.join(total, difference), (0, 2, 1)), [ROWS, CHANNELS])
    return x * norm


@jit
def random_signs(channel, SEED: tl.constexpr):
    """The signs of :func:`kvcompile.kernels.formats.rotation.random_signs` for int32 channels."""
    OF_CHANNEL: tl.constexpr = HASH_MULTIPLIERS[0]
    OF_SEED: tl.constexpr = HASH_MULTIPLIERS[1] * SEED & 0xFFFFFFFF
    BETWEEN: tl.constexpr = HASH_MULTIPLIERS[2]
    x = channel.to(tl.uint64) * OF_CHANNEL + OF_SEED
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * BETWEEN) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    return 1.0 - 2.0 * ((x >> 7) & 1).to(tl.float32)


@jit
def _in_rotation_block(channel, bit: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Whether ``channel`` lies in the rotation block of ``2**bit`` channels, which stands for a digit of HEAD_DIM."""
    START: tl.constexpr = (HEAD_DIM >> (bit + 1)) << (bit + 1)
    END: tl.constexpr = START + (HEAD_DIM & (1 << bit))
    return (channel >= START) & (channel < END)
