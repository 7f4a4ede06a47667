"""Random bases for calibrated formats: the speed of a format does not depend on the numbers of its calibration."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcompile.kernels.formats import bases, get_format, with_basis
from kvcompile.passes.site import FormatPair


def with_random_bases(pair: FormatPair, num_kv_heads: int, head_dim: int) -> FormatPair:
    """``pair`` with random orthogonal bases for its calibrated formats, which then need no transforms."""
    names = [_with_random_basis(name, num_kv_heads, head_dim) for name in (pair.key, pair.value)]
    return replace(pair, key=names[0], value=names[1])


def _with_random_basis(name: str, num_kv_heads: int, head_dim: int) -> str:
    fmt = get_format(name)
    if not fmt.is_calibrated or fmt.basis or fmt.unsupported(head_dim, "key") is not None:
        return name
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(num_kv_heads, head_dim, generator=generator)
    if not fmt.has_matrices:
        return with_basis(fmt, bases.register(bases.Basis(mean))).name
    rows = torch.linalg.qr(torch.randn(num_kv_heads, head_dim, head_dim, generator=generator))[0]
    columns = rows[..., : fmt.stored_dim(head_dim)].contiguous()
    return with_basis(fmt, bases.register(bases.Basis(mean, columns, columns.mT.contiguous()))).name
