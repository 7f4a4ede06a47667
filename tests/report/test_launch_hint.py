"""A decode step on a GPU that CUDA graphs could speed up is noted once; other graphs and other decisions are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvcompile
from kvcompile.report import launch_hint
from kvcompile.report.launch_hint import HINT, no_launch_hint

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")

COULD_BE_RECORDED = launch_hint.could_be_recorded


@pytest.fixture(autouse=True)
def _first_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hint was given yet, and graphs run on a GPU."""
    launch_hint._give.cache_clear()
    monkeypatch.setattr(launch_hint, "could_be_recorded", lambda packing: True)


def attend(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    keys.index_copy_(2, position, q)
    values.index_copy_(2, position, q)
    return F.scaled_dot_product_attention(q, keys, values)


def notes(q_len: int = 1, attends: Any = attend, **options: Any) -> list[str]:
    """The remarks of the report after one step of ``q_len`` tokens."""
    torch._dynamo.reset()
    keys, values = torch.zeros(2, 1, 2, 70, 64)
    step = torch.compile(attends, backend=kvcompile.kvquant(policy="int8_per_token_head", **options))
    with kvcompile.collect_reports() as report:
        step(torch.randn(1, 2, q_len, 64), keys, values, torch.arange(q_len))
    assert all(site.rewritten for graph in report.graphs for site in graph.sites)
    return report.remarks


def test_a_decode_step_is_noted_once_in_a_process():
    assert notes() == [HINT]
    assert notes() == []


@pytest.mark.parametrize(
    "decision", [{"mode": "default"}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"triton.cudagraphs": False}}]
)
def test_a_decision_of_the_user_is_respected(decision: dict[str, Any]) -> None:
    assert notes(**decision) == []


def test_a_request_of_generate_gives_no_hint():
    with no_launch_hint():
        assert notes() == []
    assert notes() == [HINT]


def test_a_step_of_several_tokens_is_no_decode_step():
    assert notes(q_len=3) == []
    assert notes() == [HINT]


def test_a_step_that_cannot_be_recorded_is_not_noted(monkeypatch):
    monkeypatch.setattr(launch_hint, "could_be_recorded", COULD_BE_RECORDED)
    assert notes() == []  # it runs on a CPU


@pytest.mark.gpu
def test_a_decode_step_on_a_gpu_is_noted(monkeypatch):
    monkeypatch.setattr(launch_hint, "could_be_recorded", COULD_BE_RECORDED)
    with torch.device("cuda"):
        assert notes() == [HINT]
