"""The kernels give the parts of attention that the specification gives: outputs and their log-sum-exp."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from test_attention_kernel import Case

from kvcompile.kernels import launch
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
    ],
    ids=["int4", "turboquant", "sinks", "softcap", "prefill", "one block"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_a_part_has_the_output_and_log_sum_of_the_specification(device, case, how, masked) -> None:
    case = Case(device, **case)
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
