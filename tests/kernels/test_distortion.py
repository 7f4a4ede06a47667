"""The distortion of TurboQuant formats on unit vectors, compared with theory and the paper (arXiv:2504.19874)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.formats import get_format

LLOYD_MAX = {2: 0.1175, 3: 0.03454, 4: 0.009501}
"""The least mean squared error of a scalar quantizer of N(0, 1), by bits."""
PAPER_INNER_PRODUCT = {2: 0.56, 3: 0.18, 4: 0.047}
"""The mean squared error of inner products of unit vectors times head_dim, by bits, from the paper's table."""


def unit_vectors(count: int, head_dim: int, seed: int) -> Tensor:
    x = torch.randn(count, head_dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def errors(x: Tensor, bits: int) -> Tensor:
    fmt = get_format(f"turboquant_{bits}bit")
    return fmt.decode(fmt.encode(x)) - x


@pytest.mark.parametrize("bits", LLOYD_MAX)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_unit_vectors_are_stored_within_two_percent_of_lloyd_max(bits: int, head_dim: int) -> None:
    """With few channels, errors are smaller than for N(0, 1 / head_dim), because unit vectors spread less."""
    distortion = errors(unit_vectors(8000, head_dim, seed=bits), bits).square().sum(-1).mean().item()
    assert 0.92 * LLOYD_MAX[bits] < distortion < 1.02 * LLOYD_MAX[bits]


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_restoring_the_norm_costs_no_more_than_the_geometric_bound(bits: int) -> None:
    """Lloyd-Max shortens a vector to sqrt(1 - D) of its norm; at full length its error is 2 (1 - sqrt(1 - D))."""
    distortion = errors(unit_vectors(8000, 256, seed=bits), bits).square().sum(-1).mean().item()
    assert distortion < 2 * (1 - (1 - LLOYD_MAX[bits]) ** 0.5) * 1.0025


@pytest.mark.parametrize("bits", PAPER_INNER_PRODUCT)
@pytest.mark.parametrize("queries", ["independent", "along the key"])
def test_inner_products_are_at_least_as_good_as_the_papers(bits: int, queries: str) -> None:
    """The paper spends one bit on removing the bias. Our formats spend it on codes, which makes the error smaller."""
    keys = unit_vectors(8000, 128, seed=bits)
    query = keys if queries == "along the key" else unit_vectors(8000, 128, seed=bits + 10)
    error = (errors(keys, bits) * query).sum(-1).square().mean().item()
    assert 128 * error < PAPER_INNER_PRODUCT[bits]
