"""The Hadamard rotation of rotated formats: orthogonal, symmetric, its own inverse.

Rotating spreads the energy of outlier channels over all channels before quantization (QuaRot, arXiv:2404.00456;
TurboQuant, arXiv:2504.19874). A ``head_dim`` that is not a power of two gets a block-diagonal matrix of the Hadamard
matrices of its binary digits, largest first: 80 = 64 + 16, 96 = 64 + 32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_blocks(head_dim: int) -> list[int]:
    """Powers of two that sum to ``head_dim``, largest first."""
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


def _sylvester(size: int, device: torch.device | str) -> Tensor:
    """Normalised Sylvester-Hadamard matrix: entry (i, j) is (-1)^popcount(i & j) / sqrt(size)."""
    index = torch.arange(size, device=device)
    bits = index[:, None] & index[None, :]
    for shift in (4, 2, 1):
        bits = bits ^ (bits >> shift)
    return (1 - 2 * (bits & 1)).float() * size**-0.5


def rotation_matrix(head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """The rotation R, float32 [head_dim, head_dim], symmetric and orthogonal; ``head_dim`` at most 256.

    Built from index arithmetic alone, so that tracing it puts no constant tensor into a graph.
    """
    blocks = [_sylvester(size, device) for size in rotation_blocks(head_dim)]
    return blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)


def rotate(x: Tensor) -> Tensor:
    """``x @ R`` for float32 ``x`` [..., head_dim]."""
    head_dim = x.shape[-1]
    # A plain mm, because torch 2.11 cannot trace matmul on symbolic sizes without its Python dispatcher.
    return torch.mm(x.reshape(-1, head_dim), rotation_matrix(head_dim, x.device)).reshape(x.shape)


def unrotate(x: Tensor) -> Tensor:
    """Inverse of :func:`rotate`; the same product, since R is symmetric."""
    return rotate(x)
