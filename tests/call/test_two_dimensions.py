"""Tensor parallel and context parallel together, on a mesh of two times two ranks: the answers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
import two_dimensions_program as program
from ranks import run_on_ranks
from tiny_llama import tiny_llama
from torch import Tensor

RANKS = 4
TOLERANCE = 1e-5
"""The largest relative error from another order of summation; the format loses nothing."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_dimensions")
    tiny_llama(num_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(checkpoint: Path) -> list[dict[str, Any]]:
    """The results of all ranks."""
    output = checkpoint / "results.pt"
    return list(run_on_ranks("two_dimensions_program.py", RANKS, "cpu", output, checkpoint))


def check(ranks: list[dict[str, Any]], name: str, expected: list[Tensor]) -> None:
    for rank in ranks:
        for actual, plain in zip(rank[name], expected, strict=True):
            assert (actual - plain).norm() <= TOLERANCE * plain.norm()


def test_a_hand_written_model_divides_heads_and_tokens(ranks: list[dict[str, Any]]) -> None:
    model = program.HandWritten(program.KV_HEADS)
    check(ranks, "hand-written", program.hand_written(model))
    for rank in ranks:
        kind, shape = rank["hand-written cache"]
        assert kind == "PackedShard"
        assert shape == (1, program.KV_HEADS // 2, 128, program.WIDTH), "half of the heads, and two of three blocks"


def test_a_llama_of_transformers_divides_heads_and_tokens(ranks: list[dict[str, Any]], checkpoint: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint).eval()
    cache = transformers.StaticCache(config=model.config, max_cache_len=program.CAPACITY)
    check(ranks, "Llama", program.llama(model, cache))
    for rank in ranks:
        kind, shape = rank["Llama cache"]
        assert kind == "PackedShard"
        assert shape == (1, model.config.num_key_value_heads // 2, 128, model.config.head_dim)


def test_every_rank_packs_every_attention(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["refusals"] == [] for rank in ranks)
