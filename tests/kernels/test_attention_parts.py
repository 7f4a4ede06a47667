"""The kernels give the parts of attention that the specification gives: outputs and their log-sum-exp."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attention_case import Case

from kvcompile.kernels import launch
from kvcompile.kernels.attention.divisions import Division
from kvcompile.kernels.attention.exact_blocks import own_turn, own_turns
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.spec.attention import attend_part

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def part_by_kernels(case: Case, mask: torch.Tensor | None, **how) -> tuple[torch.Tensor, torch.Tensor]:
    query, *data = (x.to(case.device) for x in (case.query, *case.data))
    key, value = case.layouts
    sinks = how.get("sinks")
    lse = torch.empty(*query.shape[:3], 2, device=case.device)
    out = launch.attention(
        query, *data, None if mask is None else mask.to(case.device), None if sinks is None else sinks.to(case.device),
        case.kv_len, False, case.scale, how.get("softcap", 0.0), key.spec, value.spec, value.head_dim,
        out_lse=lse,
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ({"key": "int4_per_token_head", "value": "int4_per_token_head"}, {}),
        ({"key": "turboquant_4bit", "value": "turboquant_3bit"}, {}),
        ({"q_len": 3}, {"sinks": True}),
        ({"q_len": 3, "key": "fp8_e4m3"}, {"softcap": 5.0}),
        ({"q_len": 70}, {}),
        ({"kv_len": 40}, {}),
        ({"batch": 3, "num_kv_heads": 2}, {"division": Division(2, 2)}),
    ],
    ids=["int4", "turboquant", "sinks", "softcap", "prefill", "one block", "rounds"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_a_part_has_the_output_and_log_sum_of_the_specification(device, case, how, masked, monkeypatch) -> None:
    case, how = Case(device, **case), dict(how)
    if division := how.pop("division", None):
        monkeypatch.setattr(launch, "division_of", lambda *arguments: division)
    if how.get("sinks"):
        how = {"sinks": torch.randn(case.query.shape[1])}
    mask = None
    if masked:
        mask = torch.rand(1, 1, case.q_len, case.kv_len) < 0.5
        mask[:, :, 0] = False  # this row sees nothing
    out, lse = part_by_kernels(case, mask, **how)
    expected, expected_lse = attend_part(
        case.query, *case.data, *case.layouts, mask=mask, kv_len=case.kv_len, scale=case.scale, **how
    )
    assert out.dtype == lse.dtype == torch.float32
    assert (out.cpu() - expected).norm() <= case.bfloat16_tolerance * expected.norm()
    unseen = expected_lse[..., 0] == -torch.inf
    assert torch.equal(lse[..., 0].cpu() == -torch.inf, unseen)
    torch.testing.assert_close(
        lse.cpu().sum(-1)[~unseen], expected_lse.sum(-1)[~unseen], rtol=0, atol=4 * case.bfloat16_tolerance
    )


@jit
def take_turns_kernel(taken_ptr, num_splits, num_tiles, ITEMS: tl.constexpr):
    """Count how often each split takes each tile: taken[split, tile] += 1. Grid (num_splits,)."""
    split = tl.program_id(0)
    turns = own_turns(split, num_splits, num_tiles, ITEMS)
    for i in range(turns[0]):
        tile = own_turn(turns, i, split, num_splits, ITEMS)
        tl.atomic_add(taken_ptr + split * num_tiles + tile, 1)


@pytest.mark.parametrize("items", [0, 1, 3, 8, 13, 16, 40])
@pytest.mark.parametrize(("num_splits", "num_tiles"), [(1, 5), (8, 0), (8, 3), (8, 8), (8, 20), (13, 29), (16, 64)])
def test_every_tile_is_taken_once_and_splits_with_an_item_more_take_fewer(device, items, num_splits, num_tiles) -> None:
    taken = torch.zeros(num_splits, num_tiles, dtype=torch.int32, device=device)
    take_turns_kernel[(num_splits,)](taken, num_splits, num_tiles, items)
    assert (taken.sum(0) == 1).all()
    tiles_of_split = taken.sum(1).cpu()
    busy = items % num_splits
    with_item, others = tiles_of_split[:busy], tiles_of_split[busy:]
    assert others.max() - others.min() <= 1
    if busy and num_tiles >= 3 * num_splits:
        assert with_item.max() <= others.min() - 2
