"""Calibrated formats with random bases, as a calibration would give them."""

from __future__ import annotations

import torch

from kvcompile.kernels.formats import bases, get_format
from kvcompile.kernels.formats.base import Format


def random_basis(num_heads: int, head_dim: int, stored_dim: int, seed: int = 0) -> str:
    """A registered basis with a random mean, and with matrices of ``stored_dim`` channels unless that is 0."""
    generator = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(num_heads, head_dim, generator=generator)
    if not stored_dim:
        return bases.register(bases.Basis(mean))
    matrix = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim, generator=generator))[0]
    scale = torch.linspace(0.5, 2, head_dim)
    to_stored, from_stored = (matrix * scale)[..., :stored_dim], (matrix / scale).mT[:, :stored_dim]
    return bases.register(bases.Basis(mean, to_stored.contiguous(), from_stored.contiguous()))


def based(name: str, num_heads: int, head_dim: int, seed: int = 0) -> Format:
    """The calibrated format ``name`` with a random basis."""
    fmt = get_format(name)
    stored_dim = fmt.stored_dim(head_dim) if fmt.has_matrices else 0
    return get_format(f"{name}@{random_basis(num_heads, head_dim, stored_dim, seed)}")
