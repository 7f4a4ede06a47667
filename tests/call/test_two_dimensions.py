"""Tensor parallel and context parallel together, on a mesh of two times two ranks: the answers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
import two_dimensions_program as program
from cached_attention import WIDTH, outputs
from ranks import run_on_ranks
from tiny_llama import tiny_llama
from torch import Tensor

pytestmark = pytest.mark.slow  # each of the two ways of splitting has faster tests

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
    check(ranks, "hand-written", outputs(program.hand_written(program.KV_HEADS), program.STEPS))
    for rank in ranks:
        kind, shape = rank["hand-written cache"]
        assert kind == "PackedShard"
        assert shape == (1, program.KV_HEADS // 2, 128, WIDTH), "half of the heads, and two of three blocks"


def test_a_llama_divides_heads_and_tokens_and_its_mlps_over_the_ranks_of_the_tokens(
    ranks: list[dict[str, Any]], checkpoint: Path
) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint).eval()
    cache = transformers.StaticCache(config=model.config, max_cache_len=program.CAPACITY)
    check(ranks, "Llama", program.llama(model, cache))
    for rank in ranks:
        kind, shape = rank["Llama cache"]
        assert kind == "PackedShard"
        assert shape == (1, model.config.num_key_value_heads // 2, 128, model.config.head_dim)


def test_every_rank_packs_every_attention(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["refusals"] == [] for rank in ranks)


def test_the_report_of_all_ranks_sums_sites_and_bytes(ranks: list[dict[str, Any]]) -> None:
    """Each model has three graphs with one site each. An element takes 4 bytes, packed in float32 or plain."""
    elements = [program.KV_HEADS * program.CAPACITY * width for width in (WIDTH, 64)]
    both = 2 * 4 * sum(elements)
    for rank in ranks:
        whole, heads, tokens = (
            rank[f"report{of}"] for of in ("", " of tensor-parallel ranks", " of context-parallel ranks")
        )
        assert (whole.ranks, heads.ranks, tokens.ranks) == (4, 2, 2)
        assert whole.sites == whole.rewritten == 2 * heads.sites == 2 * tokens.sites > 0
        assert whole.refusals == {}
        assert whole.bytes_before == whole.bytes_after == heads.bytes_before == both
        assert tokens.bytes_before == both // 2, "the caches of these ranks have half of the heads"
        assert f"4 ranks (2 context parallel, 2 tensor parallel)\n{whole.sites} attention sites" in str(whole)


def test_refusals_that_differ_are_the_same_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    (message,) = {rank["differs"] for rank in ranks}
    first, other = (f"context-parallel rank {i}, tensor-parallel rank {i}" for i in (0, 1))
    assert f"report_of_ranks: {first} and {other} differ: attention in no module is packed on the first" in message
    assert "is refused (" in message
