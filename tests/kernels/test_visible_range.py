"""Ranges of visible tokens: they describe the mask, and the kernel agrees with the specification."""

from __future__ import annotations

import pytest
import torch

from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.tiles.visible_range import NOTHING, visible_range

KV_LEN = 20000
"""More than a tile of the kernel, and no multiple of its size."""


def token():
    return torch.arange(KV_LEN)


MASKS = {
    "a filled prefix": lambda: (token() < 1000).expand(2, 1, 1, -1),
    "left padding": lambda: (token() >= torch.tensor([0, 137])[:, None]).reshape(2, 1, 1, -1),
    "causal": lambda: (token() <= torch.arange(5)[:, None] + 70).expand(1, 1, 5, -1),
    "a window": lambda: ((token() > 20) & (token() <= torch.arange(3)[:, None] + 99)).expand(2, 1, 3, -1),
    "holes": lambda: (token() % 3 == 1).expand(1, 1, 1, -1),
    "heads that differ": lambda: (token() < torch.tensor([10, 20])[:, None]).reshape(1, 2, 1, -1),
    "nothing": lambda: torch.zeros(1, 1, 2, KV_LEN, dtype=torch.bool),
    "many rows": lambda: (token() <= torch.arange(2100)[:, None] + 3000).expand(1, 1, 2100, -1)[:, :, :: 2100 // 12],
    "everything": lambda: torch.ones(1, 1, 1, KV_LEN, dtype=torch.bool),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_range_holds_all_visible_tokens_and_says_whether_it_has_holes(name):
    mask = MASKS[name]()
    ranges = visible_range(mask)
    assert ranges.shape == (mask.shape[0], mask.shape[2], 3)
    for batch in range(mask.shape[0]):
        for position in range(mask.shape[2]):
            begin, end, holes = ranges[batch, position].tolist()
            seen = mask[batch, :, position]
            if not seen.any():
                assert (begin, end, holes) == (NOTHING, 0, 0)
                continue
            assert seen.any(0).nonzero().flatten()[[0, -1]].tolist() == [begin, end - 1]
            assert bool(holes) == (not seen[:, begin:end].all())
            if not holes:
                assert not seen[:, :begin].any()
                assert not seen[:, end:].any()


@pytest.mark.parametrize("name", MASKS)
def test_the_kernel_agrees_with_the_specification(name, device):
    launch = pytest.importorskip("kvcompile.kernels.launch")
    mask = MASKS[name]()
    assert torch.equal(launch.visible_range(mask.to(device)).cpu(), visible_range(mask))
    odd = mask[..., 1::2]
    assert torch.equal(launch.visible_range(mask.to(device)[..., 1::2]).cpu(), visible_range(odd))


@pytest.mark.parametrize(("shape", "batch"), [((7,), 1), ((3, 7), 1), ((2, 1, 1, 7), 2), ((1, 4, 3, 1), 1)])
def test_the_operator_takes_masks_of_any_broadcast_shape(shape, batch):
    mask = torch.ones(shape, dtype=torch.bool)
    torch.library.opcheck(torch.ops.kvcompile.visible_range.default, (mask, 3, 7))
    assert torch.ops.kvcompile.visible_range(mask, 3, 7).tolist() == [[[0, 7, 0]] * 3] * batch
