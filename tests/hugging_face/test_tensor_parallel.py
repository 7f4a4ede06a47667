"""Transformers distributes a model over two processes; each process keeps packed caches of its own heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensor_parallel_program
import torch
import transformers
from ranks import run_on_ranks
from tiny_llama import tiny_llama

pytest.importorskip("accelerate", reason="Transformers distributes models with accelerate")

WORLD_SIZE = 2
SUMMATION = 1e-3
"""The largest relative error from another order of summation: rounding errors, or codes rounded the other way."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_llama")
    tiny_llama(vocab_size=96, num_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def of_ranks(checkpoint: Path, device: str) -> Any:
    """The results of all ranks."""
    return run_on_ranks("tensor_parallel_program.py", WORLD_SIZE, device, checkpoint / "ranks.pt", checkpoint)


@pytest.mark.sampled(4)
def test_every_rank_packs_its_heads_and_logits_equal_the_logits_of_one_process(
    checkpoint: Path, device: str, of_ranks: Any
) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint).eval().to(device)
    expected = tensor_parallel_program.run(model)
    assert len(of_ranks) == WORLD_SIZE
    for result in of_ranks:
        assert set(result["sites"]) == {None}
        error = (result["logits"] - expected["logits"]).norm() / expected["logits"].norm()
        assert error < SUMMATION
        for local, whole in zip(result["cache"], expected["cache"], strict=True):
            assert local.shape[1] == whole.shape[1] // WORLD_SIZE
    for role, whole in enumerate(expected["cache"]):
        together = torch.cat([rank["cache"][role] for rank in of_ranks], dim=1)
        assert (together - whole).norm() / whole.norm() < SUMMATION
