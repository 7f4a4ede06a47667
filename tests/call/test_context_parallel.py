"""Several ranks hold the tokens of one packed cache together, and give the answers of one process."""

from __future__ import annotations

import math
from typing import Any

import context_parallel_program as program
import pytest
import torch
from ranks import run_on_ranks
from tiny_llama import tiny_llama
from torch import Tensor

import kvcompile
from kvcompile import options
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import PackedLayout

BYTES_PER_TOKEN = {"float32": 4 * program.WIDTH, "int4_per_token_head": program.WIDTH // 2 + 4}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", 2), id="2 ranks"),
        pytest.param(("cpu", 3), id="3 ranks", marks=pytest.mark.slow),
        pytest.param(("cuda", 2), id="2 GPUs", marks=pytest.mark.gpu),
    ],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of all ranks."""
    device, size = request.param
    output = tmp_path_factory.mktemp("ranks") / "results.pt"
    return list(run_on_ranks("context_parallel_program.py", size, device, output, device))


def near(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((actual - expected).norm() <= tolerance * expected.norm())


def check_case(ranks: list[dict[str, Any]], name: str, policy: str) -> None:
    model = program.MODELS[name]("cpu")
    expected = program.outputs(model, model, program.steps_of(name, policy, len(ranks)))
    tolerance = 2e-3 if policy == "float32" else 0.2  # TF32 on a GPU
    for result in (rank[f"{name}, {policy}"] for rank in ranks):
        assert result["refusals"] == []
        assert result["kind"] == "PackedShard"
        for actual, plain in zip(result["outputs"], expected, strict=True):
            assert near(actual, plain, tolerance)
        assert near(result["keys"], model.keys, tolerance)
        blocks = math.ceil(math.ceil(program.TOKENS / 64) / len(ranks))
        assert result["bytes"] == 64 * blocks * program.BATCH * program.KV_HEADS * BYTES_PER_TOKEN[policy]


@pytest.mark.sampled(4)
def test_all_ranks_give_the_answers_of_one_process_and_hold_a_part_of_the_cache(ranks: list[dict[str, Any]]) -> None:
    for name, policy in program.CASES:
        check_case(ranks, name, policy)


def test_all_ranks_give_the_same_answers(ranks: list[dict[str, Any]]) -> None:
    for case in (f"{name}, {policy}" for name, policy in program.CASES):
        for result in ranks[1:]:
            for mine, first in zip(result[case]["outputs"], ranks[0][case]["outputs"], strict=True):
                assert near(mine, first, 1e-6), case


def test_eager_code_reads_and_writes_the_whole_cache(ranks: list[dict[str, Any]]) -> None:
    for result in (rank["eager"] for rank in ranks):
        for name in ("dequantize", "written", "slice", "reset"):
            assert torch.equal(*result[name]), name
        assert torch.equal(*result["copy"], result["dequantize"][1])


def test_caches_that_cannot_be_split_are_refused_with_a_reason(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        recent, growing = rank["refused"]
        assert "context_parallel: ranks cannot split the tokens of its key cache" in recent
        assert "keeps tokens in full precision" in recent
        assert "it has no fixed size" in growing


def test_ranks_with_different_policies_raise_the_same_error_everywhere(ranks: list[dict[str, Any]]) -> None:
    assert all("disagree: attention in no module is" in rank["disagreement"] for rank in ranks)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 128, 200, 384])
def test_the_shards_of_all_ranks_make_the_cache(size: int, num_tokens: int) -> None:
    x = torch.randn(2, num_tokens, 3)
    shards = [ContextShard(rank, size, "") for rank in range(size)]
    parts = torch.stack([shard.select(x, 1) for shard in shards])
    assert torch.equal(shards[0].join(parts, 1, num_tokens), x)
    assert sum(shard.owned_tokens(num_tokens) for shard in shards) == num_tokens
    for shard, part in zip(shards, parts, strict=True):
        assert (part != 0).any(-1).any(0).sum() == shard.owned_tokens(num_tokens)
    assert parts.shape[2] == shards[0].num_tokens(num_tokens)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_token_is_stored_by_one_rank_at_its_place(size: int) -> None:
    positions = torch.randperm(300)[:130]
    x, valid = torch.randn(1, 1, 130, 4), torch.rand(130) < 0.8
    stored = torch.zeros(1, 1, 384, 4)
    for shard in (ContextShard(rank, size, "") for rank in range(size)):
        own_x, own_positions, own_valid = shard.owned(x, positions, valid)
        whole = shard.positions(shard.num_tokens(384), x.device)
        stored[:, :, whole[own_positions[own_valid]]] = own_x[:, :, own_valid]
    expected = torch.zeros_like(stored)
    expected[:, :, positions[valid]] = x[:, :, valid]
    assert torch.equal(stored, expected)


def test_a_shard_of_a_rank_behind_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not within a group of 2"):
        ContextShard(2, 2, "")


def test_generate_is_refused_and_the_model_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "shard_of", lambda ranks: ContextShard(0, 2, "") if ranks else None)
    model = tiny_llama(vocab_size=32, num_layers=1)
    before = dict(vars(model))
    with pytest.raises(kvcompile.OptionsError, match=r"generate\(\) reads prompts in eager code"):
        kvcompile.compile(model, context_parallel="cp")
    assert vars(model) == before


def test_ranks_without_a_process_group_are_refused() -> None:
    with pytest.raises(
        kvcompile.OptionsError, match="no process group is initialised; start the program with torchrun"
    ):
        kvcompile.kvquant(context_parallel=object())


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (
            "int4_per_channel[recent=1,sinks=1,float32]",
            r"int4_per_channel \(1 to 64 recent, 64 first\) keeps tokens in full",
        ),
        ("turboquant_3bit_mean", "turboquant_3bit_mean is calibrated"),
    ],
)
def test_ranks_do_not_split_a_cache_that_no_graph_would_read(layout: str, reason: str) -> None:
    shard = ContextShard(0, 2, "a group")
    with pytest.raises(ValueError, match=f"ranks cannot split this cache: {reason}"):
        kvcompile.PackedShard.zeros((1, 2, 128, 64), torch.float32, PackedLayout.parse(layout, "key", 64), shard)
