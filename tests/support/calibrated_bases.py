"""Calibrated formats with random bases, as a calibration would give them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvcompile.kernels.formats import bases, get_format
from kvcompile.kernels.formats.base import Format
from kvcompile.policy.transforms import Origin, Transforms

MODULES = ("model.layers.0.self_attn", "model.layers.1.self_attn")
ORIGIN = Origin(model="tiny", fingerprint="0", text="a.txt", text_digest="1", windows=1, tokens=8, positions=(0, 7))


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


def transforms_tensors(num_heads: int = 2, head_dim: int = 32) -> dict[str, Tensor]:
    """Random tensors of a transforms file for MODULES."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module in MODULES:
        for role in ("key", "value"):
            matrix = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim, generator=generator))[0].contiguous()
            tensors[f"{module}.{role}.mean"] = torch.randn(num_heads, head_dim, generator=generator)
            tensors[f"{module}.{role}.to_stored"] = matrix
            tensors[f"{module}.{role}.from_stored"] = matrix.mT.contiguous()
    return tensors


def write_transforms(path: Path, head_dim: int = 32) -> Path:
    """Write a transforms file with random numbers."""
    Transforms(str(path), ORIGIN, transforms_tensors(head_dim=head_dim)).save(path)
    return path
