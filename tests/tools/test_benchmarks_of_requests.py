"""The benchmark of ``generate()`` times each kind of cache through the public interface, and checks the answers."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import generate
import generating
import pytest
import throughput
import torch
from llama import random_model
from recording import COLUMNS, Results, Row

from kvcompile.benching.workloads import Shape

TINY = ("--layers", 1, "--vocab-size", 50, "--repeats", 2)
SHAPE = "(2, 4/2, 64, 70)"

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (generate, generating, throughput):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))


def rows_of(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, *arguments: object, status: int = 0) -> Any:
    """The rows of a run with ``arguments``, which ends with ``status``."""
    command = [f"benchmarks/{script}.py", *TINY, *arguments, "--output", folder, "--tag", "test"]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    assert importlib.import_module(script).main() == status
    (file,) = folder.glob(f"{script}-test-*.json")
    rows: list[Row] = Results.read(file).rows
    assert all(row.keys() <= COLUMNS.keys() for row in rows)
    return rows


def test_plain_quantized_and_packed_caches_are_timed_and_checked(monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "installed_version", lambda package: {"transformers": "5"}.get(package))
    environment = dict(os.environ)
    sizes = ("--shapes", SHAPE, "--new-tokens", 5, "--policies", "int8_per_token_head")
    rows = rows_of(monkeypatch, tmp_path, "generate", *sizes)
    names = [(row["case"], row["format"]) for row in rows]
    plain = [("static", "plain"), ("dynamic", "plain")]
    assert names == [*plain, ("quanto", "int4"), ("hqq", "int4"), ("kvquant", "int8_per_token_head")]
    static, dynamic, *missing, packed = rows
    assert [row["note"] for row in missing] == [
        f"not measured: {package} is not installed" for package in ("optimum-quanto", "hqq")
    ]
    for row in (static, dynamic, packed):
        assert row["shape"] == SHAPE
        assert row["tokens_per_second"] == pytest.approx(2 * 1e3 / row["token_milliseconds"])
        assert min(row["first_call_seconds"], row["first_token_milliseconds"]) > 0
    for row in (dynamic, packed):
        assert row["baseline"] == "static"
        assert row["speedup"] == pytest.approx(static["token_milliseconds"] / row["token_milliseconds"])
        ratio = static["first_token_milliseconds"] / row["first_token_milliseconds"]
        assert row["first_token_speedup"] == pytest.approx(ratio)
    assert max(static["relative_error"], dynamic["relative_error"]) < 1e-2
    assert 0 < packed["relative_error"] < 5e-2
    assert dict(os.environ) == environment


def test_requests_of_a_model_with_windows_are_timed_and_checked(monkeypatch, tmp_path):
    models = []
    monkeypatch.setattr(generate, "random_model", lambda *args: models.append(random_model(*args)) or models[-1])
    sizes = ("--shapes", SHAPE, "--new-tokens", 5, "--cases", "--policies", "int8_per_token_head")
    (row,) = rows_of(monkeypatch, tmp_path, "generate", *sizes, "--sliding-window", 16)
    assert 0 < row["relative_error"] < 5e-2
    assert [model.config.sliding_window for model in models] == [16]


def test_the_caches_of_transformers_get_the_settings_of_their_backend(monkeypatch):
    seen = []

    class Model:
        def generate(self, **settings: Any) -> None:
            seen.append(settings.pop("cache_config").pop("backend"))  # as Transformers does

    requests = generating.Requests(Model(), torch.zeros(1, 1), 4, generate.CASES["hqq"].settings)
    requests.run()
    requests.run()
    assert seen == ["hqq", "hqq"]


def test_wrong_answers_and_rows_without_time_left_fail_and_the_others_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "relative_error", lambda *logits: 1.4)
    sizes = ("--shapes", SHAPE, "--new-tokens", 4, "--policies", "--cases", "static")
    (row,) = rows_of(monkeypatch, tmp_path, "generate", *sizes, status=1)
    assert "the last token of generate() is wrong: relative error 1.40e+00" in row["error"]
    (row,) = rows_of(monkeypatch, tmp_path, "generate", *sizes, "--seconds", 0, status=1)
    assert row["error"] == "BenchError: not measured: the run had already lasted 0 s; raise --seconds"


def test_the_last_logits_of_a_request_are_compared_with_a_plain_model():
    shape = Shape.parse(SHAPE)
    model = generate.random_model(generate.config(shape, 1, 50, room=4), torch.float32, torch.device("cpu"))
    requests = generating.Requests(model, torch.randint(50, (2, 70)), 4, {"cache_implementation": "static"})
    assert generate.error_of_last_token(requests) < 1e-5
    assert requests.run().shape == (2, 74)


def test_the_clock_measures_the_steps_after_the_prompt_and_the_first_token():
    clock = generating.Clock()
    clock.times = [0.0, 1.0, 3.0, 3.5, 4.25]
    assert clock.steps == [0.5, 0.75]


def test_the_first_token_is_timed_by_a_request_for_one_token():
    seen = []

    class Model:
        def generate(self, **settings: Any) -> None:
            seen.append((settings["max_new_tokens"], settings["streamer"]))

    requests = generating.Requests(Model(), torch.zeros(1, 1), 4, {})
    assert requests.seconds_to_first_token() > 0
    assert seen == [(1, None)]


def test_as_many_users_as_planned_decode_with_full_caches(monkeypatch, tmp_path):
    sizes = ("--heads", "4/2", "--head-dim", 64, "--contexts", 140, "--new-tokens", 5, "--reserve", "0GiB")
    policies = ("--policies", "bf16", "bfloat16", "int4_per_token_head")
    rows = rows_of(monkeypatch, tmp_path, "throughput", *sizes, *policies, "--memory", "3MiB")
    plain, same, packed = rows
    weights = sum(
        x.nbytes
        for x in generate.random_model(
            generate.config(Shape.parse("1,4/2,64,140"), 1, 50), torch.bfloat16, torch.device("cpu")
        ).parameters()
    )
    room = (3 << 20) - weights
    assert plain["users"] == room // (140 * 2 * 64 * (2 * 2 + 2 * 2 * 4))  # the heads of one layer are repeated, twice
    assert same["users"] == room // (192 * 2 * 64 * 2 * 2)
    assert packed["users"] == room // (192 * 2 * 36 * 2)
    for row in rows:
        assert row["relative_error"] < throughput.MAX_ERROR
        assert row["tokens_per_second"] == pytest.approx(row["users"] * 1e3 / row["token_milliseconds"])
        assert row["packed_layers"] == (row is not plain)
    assert packed["throughput"] == pytest.approx(packed["tokens_per_second"] / plain["tokens_per_second"])


def test_a_plan_without_room_and_a_plan_that_does_not_fit_fail_the_run(monkeypatch, tmp_path):
    sizes = ("--heads", "4/2", "--head-dim", 64, "--contexts", 140, "--new-tokens", 5, "--policies", "bf16")
    (row,) = rows_of(monkeypatch, tmp_path, "throughput", *sizes, "--memory", "2MiB", status=1)
    assert "no room for a cache in" in row["error"]

    def run_out(*args: Any) -> None:
        raise torch.OutOfMemoryError("allocated too much")

    monkeypatch.setattr(throughput, "filled_cache", run_out)
    sizes += ("--reserve", "0GiB")
    (row,) = rows_of(monkeypatch, tmp_path, "throughput", *sizes, "--memory", "3MiB", status=1)
    assert row["error"] == "OutOfMemoryError: allocated too much"
    assert row["users"] > 0
