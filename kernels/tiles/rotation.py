"""The rotation of :mod:`kvcompile.kernels.formats.rotation` in Triton, for the rows of a tile in registers."""

from __future__ import annotations

from kvcompile.kernels.formats.rotation import HASH_MULTIPLIERS as _HASH_MULTIPLIERS
from kvcompile.kernels.lang.triton import constant, jit, tl

HASH_MULTIPLIERS = constant(_HASH_MULTIPLIERS)


@jit
def rotate(x, OPERAND: tl.constexpr):
    """Rotate the rows of a float32 tile [rows, channels] into the stored basis."""
    return hadamard(with_random_signs(x, OPERAND), OPERAND.head_dim)


@jit
def unrotate(x, OPERAND: tl.constexpr):
    """Inverse of :func:`rotate`."""
    return with_random_signs(hadamard(x, OPERAND.head_dim), OPERAND)


@jit
def with_random_signs(x, OPERAND: tl.constexpr):
    """Rows [rows, channels] times the random signs of the rotation, float32; unchanged if the format has no signs."""
    if OPERAND.rotation_seed != 0:
        x = x * random_signs(tl.arange(0, x.shape[1]), OPERAND.rotation_seed)[None, :]
    return x


@jit
def rotation_norm(channel, HEAD_DIM: tl.constexpr):
    """The factors that scale the columns of :func:`hadamard_rows` to length 1; 0 in padding."""
    norm = tl.zeros(channel.shape, tl.float32)
    for bit in tl.static_range(4, 10):
        norm = tl.where(_in_rotation_block(channel, bit, HEAD_DIM), 2.0 ** (-bit / 2), norm)
    return norm


@jit
def hadamard_rows(row, column, HEAD_DIM: tl.constexpr):
    """A part of the matrix of :func:`hadamard` without its norm, float32 [rows, columns]: 1 and -1, or 0 in padding.

    Args:
        row, column: int32 [rows] and [columns], the channels, below 256: runs of a larger block have at most 64.
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
    for bit in tl.static_range(4, 10):
        block = tl.where(_in_rotation_block(channel, bit, HEAD_DIM), 1 << bit, block)
    return block


@jit
def hadamard_ones(OPERAND: tl.constexpr):
    """The product of a vector of ones with the Hadamard matrix, float32 [padded_head_dim].

    The rows of a rotation block add up in the first column, and cancel in the others.
    """
    channel = tl.arange(0, OPERAND.padded_head_dim)
    block = _rotation_block(channel, OPERAND.head_dim)
    is_first = (channel & (block - 1)) == 0
    return tl.where(is_first, tl.sqrt(block.to(tl.float32)), 0.0)


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
    for stage in tl.static_range(0, 9):
        if 1 << stage < CHANNELS:
            even, odd = tl.split(tl.reshape(x, [ROWS, CHANNELS // 2, 2]))
            total, difference = even + odd, even - odd
            if HEAD_DIM != CHANNELS:
                # Undo the moves of the earlier stages, to find the channel of each pair.
                origin = ((pair << stage) | (pair // (CHANNELS >> stage))) & (CHANNELS - 1)
                takes_part = origin < 0
                for bit in tl.static_range(4, 10):
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
