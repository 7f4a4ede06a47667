"""The quickstart measures speed, bytes and quality correctly, and runs end to end."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quickstart
import torch
from byte_lm import Recipe, load_or_train, model_folder, read_corpus, train
from quickstart import Runner, held_out_text, measure
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

TINY = Recipe(steps=8, num_layers=1, context=64, batch_size=4)


def nothing(done: float, loss: float) -> None:
    pass


@pytest.fixture(scope="module")
def corpus() -> tuple[Tensor, Tensor]:
    """The training text and the held-out text; both take seconds to read."""
    return read_corpus()


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Runs without Dynamo, which would take most of the time and does not change the figures."""
    with torch.compiler.set_stance("force_eager"):
        yield


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY.config()).eval()


def test_training_and_held_out_text_come_from_different_files(corpus: tuple[Tensor, Tensor]) -> None:
    training, held_out = corpus
    assert training.dtype == held_out.dtype == torch.uint8
    assert len(training) > 5 * len(held_out) > 5e5
    assert bytes(held_out[:200].tolist()) not in bytes(training.tolist())


def test_training_learns_and_reports_its_progress(corpus: tuple[Tensor, Tensor]) -> None:
    heard: list[tuple[float, float]] = []
    train(TINY, corpus[0], lambda done, loss: heard.append((done, loss)))
    progress, losses = zip(*heard, strict=True)
    assert progress == tuple((i + 1) / 8 for i in range(8))
    assert losses[-1] < losses[0] - 0.5
    assert abs(losses[0] - 8) < 1, "an untrained model knows nothing: 8 bits a byte"


def test_a_trained_model_is_kept_in_the_cache_directory_and_used_again(
    corpus: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    steps: list[float] = []
    folder = load_or_train(TINY, corpus[0], lambda done, loss: steps.append(done))
    assert folder == model_folder(TINY)
    assert folder.is_relative_to(tmp_path)
    assert list(tmp_path.rglob("*.safetensors")) == list(folder.glob("*.safetensors"))
    assert len(steps) == 8
    assert load_or_train(TINY, corpus[0], lambda done, loss: steps.append(done)) == folder
    assert len(steps) == 8
    assert model_folder(Recipe(steps=9, num_layers=1)) != folder


def plain_runner(model: LlamaForCausalLM) -> Runner:
    return Runner("eager", model, None, backend="eager")


@pytest.mark.usefixtures("uncompiled")
def test_bits_per_byte_through_the_cache_equal_the_bits_of_one_forward_pass(
    corpus: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "PROMPT_CHUNK", 64)
    model = tiny_model()
    text = held_out_text("", 256, corpus[1], context=2 * quickstart.PROMPT_CHUNK + 5, new_tokens=32)
    runner = plain_runner(model)
    measure([runner], text)
    tokens = torch.cat([text.prompt, text.continuation])
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :-1]).logits[0, -31:]
    expected = F.cross_entropy(logits, tokens[-31:]).item() / math.log(2)
    assert text.num_bytes == 31
    assert runner.bits_per_byte(text) == pytest.approx(expected, rel=1e-4)
    assert runner.same_choices(runner) == 1


@pytest.mark.usefixtures("uncompiled")
def test_all_variants_take_turns_and_each_predicts_every_token(corpus: tuple[Tensor, Tensor]) -> None:
    order: list[tuple[str, int]] = []

    class Observed(Runner):
        def step(self, token: Tensor) -> None:
            order.append((self.name, token.item()))
            super().step(token)

    text = held_out_text("", 256, corpus[1], context=64, new_tokens=8)
    runners = [Observed(name, tiny_model(), None, backend="eager") for name in "ab"]
    measure(runners, text)
    assert order == [(name, token) for token in text.continuation.tolist() for name in "ab"]
    assert [len(runner.step_seconds) for runner in runners] == [8, 8]


@pytest.mark.usefixtures("uncompiled")
def test_cache_bytes_are_the_bytes_of_the_storages_of_all_layers(corpus: tuple[Tensor, Tensor]) -> None:
    text = held_out_text("", 256, corpus[1], context=64, new_tokens=8)
    runner = plain_runner(tiny_model())
    measure([runner], text)
    keys_and_values = 2 * (1 * 2 * (64 + 8) * 64) * 4
    assert 0 <= runner.cache_bytes - keys_and_values < 64, "the rest is the cache's count of tokens"


def test_the_summary_splits_the_speedup_into_the_fused_path_and_the_bits(corpus: tuple[Tensor, Tensor]) -> None:
    text = held_out_text("", 256, corpus[1], context=64, new_tokens=8)
    runners = [plain_runner(tiny_model()) for _ in range(3)]
    for runner, seconds in zip(runners, (0.006, 0.003, 0.001), strict=True):
        runner.step_seconds = [1.0] * quickstart.UNTIMED_STEPS + [seconds, seconds, 9.0]
    shown = quickstart.summary(runners, text, "cpu")
    assert "6.0 times as fast as under plain Inductor: 2.0 by the fused path, times 3.0 by fewer bits" in shown


class WithoutInductor(Runner):
    """Runs without code generation: plain Inductor becomes eager code, and kvquant runs its graphs node by node."""

    def __init__(self, *args: Any, backend: Any, **how: Any) -> None:
        super().__init__(*args, backend="eager" if backend == "inductor" else backend, **how)


QUICK = ["--quick", "--policy", "int4_per_token_head"]


def check_output(shown: str) -> None:
    def row(name: str) -> list[float]:
        (cells,) = re.findall(rf"^ *{name} +(.*)$", shown, re.MULTILINE)
        return [float(cell) for cell in re.findall(r"[\d.]+", cells)]

    table = shown[shown.index("plain Inductor") :]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert min(row("time of a token")) > 0
    plain, fused, packed = row("KV cache, all layers")
    assert fused == pytest.approx(plain, rel=0.2)
    assert plain > 3 * packed
    assert row("times smaller than plain") == pytest.approx([1, plain / fused, plain / packed], rel=0.2)
    plain, fused, packed = row("bits per byte")
    assert fused == pytest.approx(plain, rel=1e-3)
    assert packed == pytest.approx(plain, rel=0.05)
    assert "int4_per_token_head" in shown
    assert "model.layers.0.self_attn" in shown
    assert re.search(r"1 attention \w+: 1 rewritten, 0 refused, 0 skipped", shown)
    assert "by the fused path, times" in shown


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for trained models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("without_code_generation", "model_cache")
def test_the_quickstart_compares_both_backends_and_reports_what_was_rewritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "Runner", WithoutInductor)
    monkeypatch.setenv("COLUMNS", "80")
    quickstart.main(QUICK)
    check_output(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache")
def test_the_quickstart_runs_as_a_program_with_generated_code() -> None:
    script = Path(quickstart.__file__)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), *QUICK], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_output(done.stdout)


def test_an_unknown_policy_is_an_error_before_any_work(model_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        quickstart.main(["--policy", "int9"])
    assert stopped.value.code == 2
    assert "policy 'int9' is neither a preset nor a file" in capsys.readouterr().err
    assert not list(model_cache.iterdir())
