"""The PTX that finds the nearest centroids, run by a small interpreter of PTX; no GPU is needed."""

import numpy as np
import pytest
import torch
from ptx_machine import run

from kvcompile.kernels.formats import get_format
from kvcompile.kernels.formats.nearest_ptx import last_below, nearest_pair, thresholds
from kvcompile.kernels.formats.turboquant import CENTROIDS

BITS = (2, 3, 4)


def words(x):
    return np.asarray(x, np.float32).view(np.uint32).tolist()


def around(x):
    """The float32 number below ``x``, ``x`` itself, and the number above it."""
    x = np.float32(x)
    return [np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(np.inf))]


def nearest(bits, first, second, factor):
    """The codes of pairs of numbers times ``factor``, and the sums of the squares of twice their centroids."""
    text, mask = nearest_pair(CENTROIDS[bits]), 2**bits - 1
    outputs = [run(text, 2, *pair, *words([factor])) for pair in zip(words(first), words(second), strict=True)]
    codes, squares = np.array(outputs, np.int64).T
    return np.stack([codes & mask, codes >> 16 & mask]), squares


@pytest.mark.parametrize("bits", BITS)
def test_codes_equal_the_specification_up_to_the_last_bit_of_a_magnitude(bits):
    fmt = get_format(f"turboquant_{bits}bit")
    edges = [number for x in fmt.thresholds[bits] for number in around(x)]
    numbers = [*edges, *(-x for x in edges), 0.0, -0.0, 1e-30, -1e-30, 400.0, -400.0]
    numbers += (torch.randn(200, generator=torch.Generator().manual_seed(bits)) * 42).tolist()
    x = np.array(numbers, np.float32)
    codes, squares = nearest(bits, x, x[::-1], 1.0)
    indices = (np.abs(x)[:, None] > np.array(fmt.thresholds[bits], np.float32)).sum(1)
    expected = indices + (x < 0) * 2 ** (bits - 1)
    np.testing.assert_array_equal(codes, [expected, expected[::-1]])
    doubled = 2 * np.array(CENTROIDS[bits])[indices]
    np.testing.assert_array_equal(squares, doubled**2 + doubled[::-1] ** 2)


def test_a_factor_multiplies_both():
    codes, _ = nearest(4, [1.0, -1.0], [0.1, -2.0], 42.0)
    np.testing.assert_array_equal(codes, [[3, 8 + 3], [0, 8 + 6]])  # 42, 42; 4.2, 84


@pytest.mark.parametrize("threshold", [x for bits in BITS for x in thresholds(CENTROIDS[bits])])
def test_float32_numbers_are_compared_as_their_halves_are(threshold):
    boundary = last_below(threshold)
    below, at, above = around(boundary)
    assert float(np.float16(below)) <= threshold
    assert float(np.float16(at)) <= threshold < float(np.float16(above))
