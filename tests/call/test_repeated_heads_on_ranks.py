"""Tensor parallel with more ranks than KV heads: a model that repeats its KV heads packs them on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import repeated_heads_program as program
import torch
from cached_attention import WIDTH, outputs
from ranks import run_on_ranks

TOLERANCE = 1e-5
"""The largest relative error, which comes from another order of summation: the format is lossless."""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two ranks that have one KV head."""
    output = tmp_path_factory.mktemp("repeated_heads") / "results.pt"
    return list(run_on_ranks("repeated_heads_program.py", 2, "cpu", output))


def test_every_rank_packs_the_kv_head_that_it_computes(ranks: list[dict[str, Any]]) -> None:
    expected = outputs(program.one_key_head(), program.STEPS)
    for result in (rank["fixed sizes"] for rank in ranks):
        assert result["error"] is None
        assert result["refusals"] == []
        assert result["cache"] == ("PackedTensor", (1, 1, program.CAPACITY, WIDTH))
        assert torch.equal(result["keys"], ranks[0]["fixed sizes"]["keys"])
        for actual, plain in zip(result["outputs"], expected, strict=True):
            assert (actual - plain).norm() <= TOLERANCE * plain.norm()


def test_symbolic_sizes_are_an_error_of_one_line(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "DTensor does not support the symbolic sizes of this graph" in rank["symbolic sizes"]["error"]
        assert "pass dynamic=False to torch.compile" in rank["symbolic sizes"]["error"]
