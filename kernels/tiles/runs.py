"""The rotation of a tile by products on tensor cores, in runs of channels.

The Hadamard matrix of ``m * n`` channels is the Kronecker product of the Hadamard matrices of ``m`` and ``n`` channels.
A run has ``n`` channels, and a rotation block has ``m`` runs. One product multiplies all runs by the same matrix. The
factor of ``m`` channels takes sums and differences of runs, whose numbers one thread already holds.
"""

from __future__ import annotations

from kvcompile.compat.triton_names import target_info
from kvcompile.kernels.lang.planes import cut, halves, has_padding, in_channel_order, side_by_side, with_zeros
from kvcompile.kernels.lang.rounding import has_ptx
from kvcompile.kernels.lang.triton import constexpr_function, jit, tl
from kvcompile.kernels.tiles.rotation import hadamard_rows, rotate, with_random_signs


@constexpr_function
def rotates_by_products(operand, rows):
    """Whether tiles of ``rows`` rows are rotated on tensor cores."""
    return operand.rotated and rows >= 16


@constexpr_function
def run_channels(operand):
    """The number of channels of a run, at least 16, the least depth of a product."""
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
            # A thread has 2 neighbours among the 8 columns of a product. These are channels at a distance of 4 here, so
            # that a thread has one channel of every 4.
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
    x = with_random_signs(x, OPERAND).to(x.dtype)
    RUNS: tl.constexpr = x.shape[1] // run_channels(OPERAND)
    x = _products_of_runs(x, matrix, RUNS, OPERAND, PRECISION)
    if moved_channels(OPERAND) == 4:
        pairs = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
        x = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), x.shape)
    runs = _rows_as_runs(x, RUNS, groups_of_rows(OPERAND))
    return _in_pieces(_rotated_blocks(runs, OPERAND), OPERAND)


@constexpr_function
def multiplies_pairs(operand):
    """Whether :func:`unrotate_levels` multiplies two runs of 16 channels at once, by a matrix with two blocks.

    If 16 channels come from joined tiles of 8-bit codes, Triton gives each of four threads 8 channels (``kWidth``),
    more than there are, and computes wrong products. Only Hopper has products of warpgroups, which are right.
    """
    on_hopper = has_ptx() and target_info.cuda_capability_geq(9, 0) and not target_info.cuda_capability_geq(10, 0)
    return run_channels(operand) == 16 and not on_hopper


@jit
def unrotation_matrix(OPERAND: tl.constexpr):
    """The matrix by which :func:`unrotate_levels` multiplies; 0 if the format is not rotated."""
    matrix = 0
    if OPERAND.rotated:
        RUN: tl.constexpr = run_channels(OPERAND)
        channel = tl.arange(0, 2 * RUN if multiplies_pairs(OPERAND) else RUN)
        matrix = hadamard_rows(channel % RUN, channel % RUN, RUN)
        if multiplies_pairs(OPERAND):
            matrix = tl.where((channel // RUN)[:, None] == (channel // RUN)[None, :], matrix, 0.0)
    return matrix


@jit
def unrotate_levels(levels, matrix, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Levels in the stored basis as vectors in the original basis: float32 [tokens, padded_head_dim].

    ``largest_gain`` and the random signs are left to the caller. Levels and the matrix are exact in the dtype of the
    products.

    Args:
        levels: for each plane a tile [tokens, padded_width], or with ``column_major`` its transpose.
        matrix: the result of :func:`unrotation_matrix`.
    """
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    planes = ()
    for plane in tl.static_range(NUM_PLANES):
        level = levels[plane]
        if OPERAND.column_major:
            level = tl.trans(level)
        if OPERAND.relative_gains[plane] != 1.0:  # a power of two
            level = (level * OPERAND.relative_gains[plane]).to(OPERAND.dtype)
        planes = planes + (level,)  # type: ignore[assignment]  # noqa: RUF005
    x = in_channel_order(planes, OPERAND)
    RUNS: tl.constexpr = OPERAND.padded_head_dim // run_channels(OPERAND)
    if multiplies_pairs(OPERAND):
        runs = _products_of_pairs(x, matrix, RUNS, OPERAND, PRECISION)
    else:
        x = _products_of_runs(x, matrix, RUNS, OPERAND, PRECISION)
        runs = _rows_as_runs(x, RUNS, groups_of_rows(OPERAND))
    return side_by_side(with_zeros(_rotated_blocks(runs, OPERAND), RUNS))


@jit
def _products_of_pairs(x, matrix, RUNS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The products of all runs of a tile [rows, columns] with the matrix of a run: a tuple of [rows, columns // RUNS].

    Two neighbouring runs are multiplied at once. If there is a single run, it is multiplied with that of the next row.
    """
    if RUNS == 1:
        pairs = tl.reshape(x, [x.shape[0] // 2, 2 * x.shape[1]])
        pairs = tl.dot(pairs, matrix.to(x.dtype), input_precision=PRECISION)
        runs = (tl.reshape(pairs, x.shape),)
    else:
        PAIRS: tl.constexpr = RUNS // 2
        runs = ()  # type: ignore[assignment]
        x = _products_of_runs(x, matrix, PAIRS, OPERAND, PRECISION)
        pairs = _rows_as_runs(x, PAIRS, groups_of_rows(OPERAND))
        for i in tl.static_range(PAIRS):
            runs = runs + halves(pairs[i])  # type: ignore[assignment]
    return runs


@jit
def _products_of_runs(x, matrix, RUNS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The runs of a tile [rows, columns], each multiplied by ``matrix``, as :func:`_runs_as_rows` orders them."""
    GROUPS: tl.constexpr = groups_of_rows(OPERAND)
    x = _runs_as_rows(x, RUNS, GROUPS)
    matrix = matrix.to(x.dtype)
    if GROUPS > 1:
        batch = tl.reshape(x, [GROUPS, x.shape[0] // GROUPS, x.shape[1]])
        matrices = tl.broadcast_to(matrix[None, :, :], [GROUPS, matrix.shape[0], matrix.shape[1]])
        x = tl.reshape(tl.dot(batch, matrices, input_precision=PRECISION), x.shape)
    else:
        x = tl.dot(x, matrix, input_precision=PRECISION)
    return x


@constexpr_function
def groups_of_rows(operand):
    """The groups of rows that a rotation multiplies: up to two per warp from compute capability 10 on, otherwise one.

    Tensor cores of compute capability 10 leave a product in their own memory, from which a thread gets whole rows. Its
    runs would then lie in different threads. A batch of products runs on the older instructions instead.
    """
    has_whole_rows = has_ptx() and target_info.cuda_capability_geq(10, 0)
    most = operand.block_tokens // 8  # a thread has two rows at a distance of 8
    return min(operand.store_warps, most) if has_whole_rows else 1


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
    return next(1 << bit for bit in range(9, 3, -1) if operand.head_dim >> bit & 1 and channel >> bit & 1 == 0)


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
    """The runs of rotated vectors, without padding, from their products with the matrix of a run."""
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
    moved = with_zeros(moved, len(moved) + 1)
    ORDER: tl.constexpr = order_of_moves(OPERAND)
    NUM_TILES: tl.constexpr = len(ORDER)
    tiles = ()
    for i in tl.static_range(NUM_TILES):
        tiles = tiles + (moved[ORDER[i]],)  # type: ignore[assignment]  # noqa: RUF005
    return side_by_side(tiles)
