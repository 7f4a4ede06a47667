"""The Hadamard rotation of rotated formats."""

from __future__ import annotations

import pytest
import torch

from kvcompile.kernels.formats.rotation import rotate, rotation_blocks, rotation_matrix, unrotate

HEAD_DIMS = [16, 32, 48, 64, 80, 96, 112, 128, 256]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_is_orthogonal_and_its_own_inverse(head_dim):
    matrix = rotation_matrix(head_dim).double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_block_is_a_normalised_hadamard_matrix(head_dim):
    start = 0
    matrix = rotation_matrix(head_dim)
    for size in rotation_blocks(head_dim):
        block = matrix[start : start + size, start : start + size]
        torch.testing.assert_close(block.abs(), torch.full((size, size), size**-0.5))
        matrix[start : start + size, start : start + size] = 0
        start += size
    assert start == head_dim
    assert not matrix.any()


def test_head_dims_split_into_powers_of_two_largest_first():
    assert rotation_blocks(128) == [128]
    assert rotation_blocks(80) == [64, 16]
    assert rotation_blocks(112) == [64, 32, 16]


def test_rotating_keeps_scores_and_spreads_an_outlier_channel():
    torch.manual_seed(0)
    q, k = torch.randn(2, 100, 128)
    k[:, 5] = 100.0
    torch.testing.assert_close((rotate(q) * rotate(k)).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(unrotate(rotate(k)), k, rtol=1e-4, atol=1e-4)
    assert rotate(k).abs().amax() < 20
