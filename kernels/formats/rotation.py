"""The rotation of rotated formats: a Hadamard matrix, optionally with random signs before it.

Rotating spreads the energy of outlier channels over all channels before quantization (QuaRot, arXiv:2404.00456;
TurboQuant, arXiv:2504.19874). If ``head_dim`` is not a power of two, the matrix is block-diagonal, with a Hadamard
matrix for each binary digit, largest first: 80 = 64 + 16, 96 = 64 + 32. With a seed other than 0, channel ``c`` is
first multiplied by ``sign(c, seed)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

HASH_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0x2C1B3C6D)
"""Odd 32-bit factors of the hash: of the channel, of the seed, and of the number between its two shifts."""


def rotation_blocks(head_dim: int) -> list[int]:
    """Powers of two that sum to ``head_dim``, largest first."""
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


def _sylvester(size: int, device: torch.device | str) -> Tensor:
    """The Sylvester-Hadamard matrix over its norm: element (i, j) is (-1)^popcount(i & j) / sqrt(size)."""
    index = torch.arange(size, device=device)
    bits = index[:, None] & index[None, :]
    for shift in (8, 4, 2, 1):
        bits = bits ^ (bits >> shift)
    return (1 - 2 * (bits & 1)).float() * size**-0.5


def random_signs(head_dim: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """+1 or -1 for each channel, float32 [head_dim]: one bit of a hash of the channel and the seed."""
    of_channel, of_seed, between = HASH_MULTIPLIERS
    x = (torch.arange(head_dim, device=device) * of_channel + seed * of_seed) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * between) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    return (1 - 2 * ((x >> 7) & 1)).float()


def rotation_matrix(head_dim: int, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """The rotation R, float32 [head_dim, head_dim]: orthogonal, and symmetric if there is no seed.

    ``head_dim`` is at most 512. The matrix is computed from indices alone, so that tracing puts no constant tensor into
    a graph.
    """
    blocks = [_sylvester(size, device) for size in rotation_blocks(head_dim)]
    matrix = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
    return random_signs(head_dim, seed, device)[:, None] * matrix if seed else matrix


def rotate(x: Tensor, seed: int = 0) -> Tensor:
    """``x @ R`` for float32 ``x`` [..., head_dim]."""
    head_dim = x.shape[-1]
    # mm and not matmul: torch 2.11 cannot trace matmul on symbolic sizes without its Python dispatcher.
    return torch.mm(x.reshape(-1, head_dim), rotation_matrix(head_dim, x.device, seed)).reshape(x.shape)


def unrotate(x: Tensor, seed: int = 0) -> Tensor:
    """Inverse of :func:`rotate`: ``x @ R.T`` for float32 ``x`` [..., head_dim].

    Without a seed R is symmetric, and both functions compute the same product.
    """
    if not seed:
        return rotate(x)
    return rotate(x) * random_signs(x.shape[-1], seed, x.device)
