"""The rotation of :mod:`kvcompile.kernels.formats.rotation` in Triton, for the rows of a tile in registers."""

from __future__ import annotations

from kvcompile.compat.triton_names import target_info
from kvcompile.kernels.formats.rotation import HASH_MULTIPLIERS as _HASH_MULTIPLIERS
from kvcompile.kernels.lang.planes import cut, has_padding, side_by_side
from kvcompile.kernels.lang.rounding import has_ptx
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
    """Whether tiles of ``rows`` rows are rotated on tensor cores."""
    return operand.rotated and rows >= 16


@constexpr_function
def run_channels(operand):
    """The number of channels of a run. One product on tensor cores multiplies all runs by the same Hadamard matrix.

    The Hadamard matrix of ``m * n`` channels is the Kronecker product of the Hadamard matrices of ``m`` and ``n``
    channels. A run has ``n`` channels, at least 16, and a rotation block has ``m`` runs. The factor of ``m`` channels
    takes sums and differences of runs, whose numbers one thread already holds.
    """
    smallest_block = operand.head_dim & -operand.head_dim
    return max(16, min(smallest_block, operand.padded_head_dim // 8))


@constexpr_function
def moved_channels(operand):
    """The number of channels that :func:`_in_pieces` moves at once: a run if pieces have whole runs, otherwise 4."""
    has_whole_runs = operand.piece_width % run_channels(operand) == 0 or not has_padding(operand)
    return run_channels(operand) if has_whole_runs else 4


@jit
def rotation_matrix(OPERAND: tl.constexpr, ROWS: tl.constexpr):
    """The matrix by which :func:`to_stored_basis` multiplies tiles of ROWS rows; 0 if it does not use a product."""
    matrix = 0
    if rotates_by_products(OPERAND, ROWS):
        RUN: tl.constexpr = run_channels(OPERAND)
        channel = tl.arange(0, RUN)
        column = channel
        if moved_channels(OPERAND) == 4:
            # Of 8 columns of a product, a thread has 2 neighbours. Here they are channels at a distance of 4, so that a
            # thread has one channel of every 4.
            column = (channel & (RUN - 8)) | ((channel & 1) << 2) | ((channel >> 1) & 3)
        matrix = hadamard_rows(channel, column, RUN)
    return matrix


@jit
def to_stored_basis(x, matrix, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The rows of a tile of any float dtype in the stored basis, float32; ``matrix`` is :func:`rotation_matrix`.

    Rows that :func:`rotates_by_products` come in piece order, others in the order of channels.
    """
    if rotates_by_products(OPERAND, x.shape[0]):
        x = rotate_by_products(x, matrix, OPERAND, PRECISION)
    elif OPERAND.rotated:
        x = rotate(x.to(tl.float32), OPERAND)
    else:
        x = x.to(tl.float32)
    return x


@jit
def rotate_by_products(x, matrix, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """:func:`rotate` for at least 16 rows of any float dtype, by products with :func:`rotation_matrix`, in piece order.

    The elements of the matrix are 1 and -1, so that products are exact in every dtype. Sums are float32.
    """
    if PRECISION == "ieee":
        x = x.to(tl.float32)  # the interpreter multiplies bit patterns
    if OPERAND.rotation_seed != 0:
        x = (x * random_signs(tl.arange(0, x.shape[1]), OPERAND.rotation_seed)[None, :]).to(x.dtype)
    RUNS: tl.constexpr = x.shape[1] // run_channels(OPERAND)
    GROUPS: tl.constexpr = groups_of_rows(OPERAND)
    x = _runs_as_rows(x, RUNS, GROUPS)
    matrix = matrix.to(x.dtype)
    if GROUPS > 1:
        batch = tl.reshape(x, [GROUPS, x.shape[0] // GROUPS, x.shape[1]])
        matrices = tl.broadcast_to(matrix[None, :, :], [GROUPS, matrix.shape[0], matrix.shape[1]])
        x = tl.reshape(tl.dot(batch, matrices, input_precision=PRECISION), x.shape)
    else:
        x = tl.dot(x, matrix, input_precision=PRECISION)
    if moved_channels(OPERAND) == 4:
        pairs = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
        x = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), x.shape)
    return _in_pieces(_rotated_blocks(_rows_as_runs(x, RUNS, GROUPS), OPERAND), OPERAND)


@constexpr_function
def groups_of_rows(operand):
    """In how many groups of rows a rotation multiplies: one for each warp on GPUs of compute capability 10, else one.

    Tensor cores of compute capability 10 leave a product in their own memory, from which a thread gets whole rows. Its
    runs would then lie in different threads. A batch of products runs on the older instructions instead.
    """
    has_whole_rows = has_ptx() and target_info.cuda_capability_geq(10, 0)
    return operand.store_warps if has_whole_rows else 1


@jit
def _runs_as_rows(x, RUNS: tl.constexpr, GROUPS: tl.constexpr):
    """A tile [rows, columns] as [RUNS * rows, columns // RUNS]. After a product, one thread has all runs of a row.

    A thread has two rows of a product at a distance of 8, and others at a distance of 64 or 128 rows, depending on the
    number of warps. Runs of a row therefore differ in bit 3 of the row index, and in its highest bits within a group.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1] // RUNS
    if RUNS > 1:
        x = tl.reshape(x, [GROUPS, ROWS // GROUPS // 8, 8, RUNS // 2, 2, COLUMNS])
        x = tl.reshape(tl.permute(x, (0, 3, 1, 4, 2, 5)), [RUNS * ROWS, COLUMNS])
    return x


@jit
def _rows_as_runs(x, RUNS: tl.constexpr, GROUPS: tl.constexpr):
    """The inverse of :func:`_runs_as_rows`, as a tuple of the runs."""
    ROWS: tl.constexpr = x.shape[0] // RUNS
    COLUMNS: tl.constexpr = x.shape[1]
    if RUNS > 1:
        x = tl.reshape(x, [GROUPS, RUNS // 2, ROWS // GROUPS // 8, 2, 8, COLUMNS])
        x = tl.reshape(tl.permute(x, (0, 2, 4, 1, 3, 5)), [ROWS, RUNS * COLUMNS])
    return cut(x, RUNS)


@constexpr_function
def block_of_run(operand, run):
    """The number of channels of the rotation block in which a run lies."""
    channel = run * run_channels(operand)
    return next(1 << bit for bit in range(8, 3, -1) if operand.head_dim >> bit & 1 and channel >> bit & 1 == 0)


@constexpr_function
def has_partner(operand, run, distance):
    """Whether the run at ``distance`` before or after a run, a power of two, lies in the same rotation block."""
    return block_of_run(operand, run) > distance * run_channels(operand)


@constexpr_function
def norm_of_run(operand, run):
    """The factor that scales the columns of the matrix of a run's rotation block to length 1."""
    return block_of_run(operand, run) ** -0.5


@jit
def _rotated_blocks(runs, OPERAND: tl.constexpr):
    """The runs of vectors in the stored basis, without padding, from their products with :func:`rotation_matrix`."""
    NUM_RUNS: tl.constexpr = OPERAND.head_dim // run_channels(OPERAND)
    for bit in tl.static_range(4):
        sums = ()
        for i in tl.static_range(NUM_RUNS):
            if not has_partner(OPERAND, i, 1 << bit):
                result = runs[i]
            elif i >> bit & 1 == 0:
                result = runs[i] + runs[i + (1 << bit)]
            else:
                result = runs[i - (1 << bit)] - runs[i]
            sums = sums + (result,)  # type: ignore[assignment]  # noqa: RUF005
        runs = sums
    rotated = ()
    for i in tl.static_range(NUM_RUNS):
        rotated = rotated + (runs[i] * norm_of_run(OPERAND, i),)  # type: ignore[assignment]  # noqa: RUF005
    return rotated


@constexpr_function
def order_of_moves(operand):
    """For every :func:`moved_channels` columns in piece order, which channels they hold; the last number is padding."""
    length = moved_channels(operand)
    if not has_padding(operand):
        return list(range(operand.head_dim // length))
    in_piece = operand.piece_width // length
    padding = [operand.head_dim // length] * (operand.padded_piece_width // length - in_piece)
    pieces = [list(range(piece * in_piece, (piece + 1) * in_piece)) for piece in range(operand.num_pieces)]
    return [number for piece in pieces for number in piece + padding]


@jit
def _in_pieces(runs, OPERAND: tl.constexpr):
    """A tile in piece order from the runs of its vectors."""
    NUM_RUNS: tl.constexpr = len(runs)
    moved = ()
    for i in tl.static_range(NUM_RUNS):
        moved = moved + cut(runs[i], run_channels(OPERAND) // moved_channels(OPERAND))
    moved = moved + (tl.zeros(moved[0].shape, tl.float32),)  # type: ignore[assignment, misc]  # noqa: RUF005
    ORDER: tl.constexpr = order_of_moves(OPERAND)
    NUM_TILES: tl.constexpr = len(ORDER)
    tiles = ()
    for i in tl.static_range(NUM_TILES):
        tiles = tiles + (moved[ORDER[i]],)  # type: ignore[assignment]  # noqa: RUF005
    return side_by_side(tiles)


@jit
def rotation_norm(channel, HEAD_DIM: tl.constexpr):
    """The factors that scale the columns of :func:`hadamard_rows` to length 1; 0 in padding."""
    norm = tl.zeros(channel.shape, tl.float32)
    for bit in tl.static_range(4, 9):
        norm = tl.where(_in_rotation_block(channel, bit, HEAD_DIM), 2.0 ** (-bit / 2), norm)
    return norm


@jit
def hadamard_rows(row, column, HEAD_DIM: tl.constexpr):
    """A part of the matrix of :func:`hadamard` without its norm, float32 [rows, columns]: 1 and -1, or 0 in padding.

    Args:
        row, column: int32 [rows] and [columns], the channels.
    """
    row, row_block = row[:, None], _rotation_block(row, HEAD_DIM)[:, None]
    column, column_block = column[None, :], _rotation_block(column, HEAD_DIM)[None, :]
    odd = row & column & (row_block - 1)
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    return tl.where((row_block == column_block) & (row_block > 0), 1.0 - 2.0 * odd.to(tl.float32), 0.0)


@jit
def _rotation_block(channel, HEAD_DIM: tl.constexpr):
    """The sizes of the rotation blocks in which channels lie, which differ between blocks; 0 in padding."""
    block = tl.zeros(channel.shape, tl.int32)
    for bit in tl.static_range(4, 9):
        block = tl.where(_in_rotation_block(channel, bit, HEAD_DIM), 1 << bit, block)
    return block


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
        channel = tl.arange(0, OPERAND.padded_head_dim)
        for plane in tl.static_range(NUM_PLANES):
            row = tl.where(column < OPERAND.width, plane * OPERAND.width + column, OPERAND.padded_head_dim)
            rows = hadamard_rows(row, channel, OPERAND.head_dim)
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
