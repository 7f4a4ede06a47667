"""Comparisons of what the store kernel writes with what the specification writes."""

from __future__ import annotations

import torch

from kvcompile.kernels import launch
from kvcompile.kernels.spec.packing import write_tokens_


def random_bytes(layout, num_tokens, batch, heads):
    """Packed data of random bytes, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, layout.shape(num_tokens, batch, heads), dtype=torch.uint8, generator=generator)


def assert_stores_like_the_specification(layout, x, positions, valid=None, *, device, capacity, restride=None):
    """Write to random bytes with the kernel and with the specification, and compare every byte of the buffer.

    The specification runs on the CPU, because PyTorch divides by a constant differently on a GPU. ``restride`` changes
    the strides of the vectors on either device.
    """
    on_device = x.to(device)
    if restride is not None:
        x, on_device = restride(x), restride(on_device)
    expected = random_bytes(layout, capacity, *x.shape[:2])
    data = expected.to(device, copy=True)
    write_tokens_(expected, layout, x, positions, valid)
    valid_on_device = None if valid is None else valid.to(device)
    launch.store(data, on_device, positions.to(device), valid_on_device, layout.format_name, layout.role)
    assert_same_sections(layout, data.cpu(), expected, device)


def assert_same_sections(layout, data, expected, device):
    """Compare packed blocks that were written on ``device`` with the expected ones."""
    written, expected = layout.split(data), layout.split(expected)
    for name in written:
        if name == "codes" and written[name].dtype != torch.uint8:
            # Triton's interpreter does not round to nearest.
            tolerance = torch.finfo(written[name].dtype).eps if device.type == "cpu" else 0
            torch.testing.assert_close(written[name], expected[name], rtol=tolerance, atol=0, equal_nan=True)
        elif name == "codes":
            distance = torch.stack(
                [
                    (ranks(layout.format, a, i) - ranks(layout.format, b, i)).abs()
                    for i, (a, b) in enumerate(
                        zip(*map(layout.format.packing.planes, (written, expected)), strict=True)
                    )
                ]
            )
            if layout.format.rotated:  # sums have another order, so that ties may round the other way
                assert distance.max() <= 1
                # Every ninth vector is constant: it rotates to one large channel and ties everywhere else.
                assert (distance > 0).any(0).any(-1).float().mean() < 0.05
            else:
                assert distance.max() == 0
        elif name in ("scale", "zero"):
            tolerance = 2e-3 if layout.format.rotated else 0
            torch.testing.assert_close(written[name], expected[name], rtol=tolerance, atol=tolerance, equal_nan=True)


def ranks(fmt, codes, plane):
    """The ranks of levels by size: levels of a TurboQuant format do not rise with their codes."""
    levels = fmt.levels(torch.arange(2 ** fmt.packing.plane_bits(plane), dtype=torch.uint8), plane)
    return levels.argsort(stable=True).argsort()[codes.long()]


def vectors(batch, heads, tokens, head_dim, dtype=torch.bfloat16, seed=0):
    """Random vectors. Some are hard to quantize: zeros, far from zero, tiny, large, with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, tokens, head_dim, generator=generator)
    x.view(-1, head_dim)[::9] = 0.0
    x.view(-1, head_dim)[1::9] += 30.0
    x.view(-1, head_dim)[2::9] *= 1e-6
    x.view(-1, head_dim)[3::9] *= 1e4
    x.view(-1, head_dim)[4::9, 3] = 50.0
    return x.to(dtype)
