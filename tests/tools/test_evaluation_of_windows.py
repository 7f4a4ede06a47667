"""Models with sliding windows are evaluated with the packed windows that ``generate()`` gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from kvcompile.evaluation import replay
from kvcompile.evaluation.measure import evaluate
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.text import Text
from kvcompile.policy.policy import Policy

pytest.importorskip("transformers")
from windowed_models import all_windowed, windowed

LOSSLESS = Policy.load({"default": {"dtype": "float32"}})
SCHEDULE = Schedule(prefill=100, decode=64, chunk=8)
"""A window of 16 tokens has room for 128, so that it moves during the later steps."""


@pytest.fixture(autouse=True)
def _node_by_node(without_code_generation: None) -> None:
    counters.clear()


def evaluated(model: Any, *policies: Any, **options: Any) -> Any:
    windows = torch.randint(3, 97, (2, SCHEDULE.window_tokens), generator=torch.Generator().manual_seed(0))
    text = Text(source="random tokens", windows=windows, schedule=SCHEDULE, in_bytes=False)
    return evaluate(model, text, policies, **options).results


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [windowed, all_windowed])
@pytest.mark.parametrize("exact_prompt", [False, True])
def test_windows_that_move_are_packed_in_every_format(make: Any, exact_prompt: bool) -> None:
    lossless, int4 = evaluated(make(), LOSSLESS, "int4", exact_prompt=exact_prompt)
    for result in (lossless, int4):
        assert result.packed_layers == result.num_layers == make().config.num_hidden_layers
        assert result.notes == ()
    assert abs(lossless.mean_divergence) < 1e-9
    assert int4.mean_divergence > 1e-7
    assert int4.effective_bits < 32 / 2


def test_one_cache_and_few_graphs_serve_all_windows_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    packed_cache = replay.packed_cache
    monkeypatch.setattr(replay, "packed_cache", lambda *args, **how: made.append(args) or packed_cache(*args, **how))
    evaluated(all_windowed(), LOSSLESS)
    assert len(made) == 1  # for two windows
    assert counters["stats"]["unique_graphs"] <= 4  # there are 8 steps


def test_a_format_that_cannot_hold_a_layer_is_named() -> None:
    policy = Policy.load({"default": {"dtype": "int4", "granularity": "per_group", "group_size": 128}})
    (result,) = evaluated(all_windowed(), policy)
    assert result.packed_layers == 0
    assert any("int4_per_group_128" in note for note in result.notes)
