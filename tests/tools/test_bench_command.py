"""``python -m kvcompile bench`` times correct results only, on a GPU or a CPU, and reports failures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from documented_commands import command_line
from typer.testing import CliRunner

from kvcompile.benching import decode_attention
from kvcompile.benching.decode_attention import PLAIN, DecodeTime, decode_times
from kvcompile.benching.measuring import time_in_turns
from kvcompile.benching.workloads import DEVICE, Shape, parse_formats
from kvcompile.cli.app import app
from kvcompile.tables import WIDTH

SIZES = "--heads 4/2 --head-dim 64 --contexts 128,200"


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", lambda gm, inputs: gm)


def run(command: str, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, shlex.split(command), prog_name="kvcompile")
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def test_every_policy_and_context_is_timed_against_attention_in_bfloat16() -> None:
    found = json.loads(run(f"bench {SIZES} --policies int8_per_token_head,turboquant_3bit_nc --json")[0])
    assert found["device"]["name"]
    rows = found["rows"]
    policies = [PLAIN, "int8_per_token_head", "turboquant_3bit_nc"]
    assert [(row["context"], row["policy"]) for row in rows] == [(n, policy) for n in (128, 200) for policy in policies]
    for index, row in enumerate(rows):
        plain = rows[index // 3 * 3]
        assert row["speedup"] == pytest.approx(plain["microseconds"] / row["microseconds"])
        blocks = -(-row["context"] // 64)
        bits = {PLAIN: None, "int8_per_token_head": 2 * 68, "turboquant_3bit_nc": 26 + 28}[row["policy"]]
        assert row["nbytes"] == (2 * 2 * row["context"] * 64 * 2 if bits is None else 2 * blocks * 64 * bits)
        assert (row["relative_error"] is None) == (row["policy"] == PLAIN)
        assert row["error"] == ""


def test_wrong_and_impossible_results_are_rows_that_failed_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, _ = run("bench --heads 4/2 --head-dim 32 --contexts 70 --policies int4_per_group_64,fp8_e4m3", code=1)
    assert max(map(len, out.splitlines())) <= WIDTH
    assert "failed: int4_per_group_64, context 70: BenchError: int4_per_group_64: head_dim 32 is not" in out
    assert [line.split("|")[3].strip() == "failed" for line in out.splitlines() if line[:1] == "|"][2:] == [
        False,
        True,
        False,
    ]
    monkeypatch.setattr(torch._inductor, "compile", lambda gm, inputs: lambda *args: 1.1 * gm(*args))
    monkeypatch.setattr(decode_attention.Caches, "check_attention", lambda *args: decode_attention.check(0.1, "x"))
    _, row = decode_times(Shape.parse("1,4/2,64,64"), [parse_formats("int8_per_token_head")])
    assert row.timing is None
    assert "is wrong: relative error" in row.error


def test_each_step_is_announced() -> None:
    heard: list[str] = []
    shape = Shape(1, 2, 1, 32, 70)
    rows = list(decode_times(shape, [parse_formats("int8_per_token_head")], heard.append))
    assert [row.error for row in rows] == ["", ""]
    expected = ["compiling int8_per_token_head", "timing, in turns"]
    assert heard == (expected if DEVICE.type == "cpu" else ["timing bf16 SDPA", "timing int8_per_token_head"])


def test_calls_take_turns_and_preparations_are_not_timed() -> None:
    heard: list[str] = []
    calls = [lambda: heard.append("a"), lambda: heard.append("b")]
    timings = time_in_turns(calls, warmup=1, repeats=2, before=lambda index: heard.append(str(index)))
    assert heard == ["0", "a", "1", "b"] * 3
    assert [timing.method for timing in timings] == ["wall clock"] * 2


def test_the_examples_of_the_help_and_of_the_pages_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Shape] = []

    def times(shape: Shape, formats: Any, on_step: Any) -> Iterator[DecodeTime]:
        asked.append(shape)
        return iter([DecodeTime(shape, formats[0][0], note="not run")])

    monkeypatch.setattr(decode_attention, "decode_times", times)
    examples = [line.partition("kvcompile ")[2] for line in run("bench --help")[0].splitlines() if "    python" in line]
    pages = [command for command in command_line() if command.startswith("bench")]
    assert len(examples) > 2
    assert pages
    for command in (*examples, *pages):
        assert "not run" in run(command)[0]
    assert Shape(1, 32, 8, 128, 131072) in asked
    assert Shape(1, 8, 2, 64, 1024) in asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--policies ,", "--policies: the list is empty"),
        ("--policies ''", "--policies: the list is empty; name presets or formats, or leave the option out"),
        ("--contexts ''", "--contexts: the list is empty; name numbers of tokens, or leave the option out"),
        ("--heads ٨/٢", "give HEADS/KV"),
        ("--heads 4/3", "--heads: '4/3': give HEADS/KV, where KV divides HEADS"),
        ("--heads four", "--heads: 'four': give HEADS/KV"),
        ("--policies int9", "unknown dtype 'int9'"),
        ("--policies auto", "'auto' leaves the cache unpacked"),
        ("--contexts 2kb", "--contexts: '2kb' is not a valid context"),
        ("--contexts 9999999999k", "no memory for plain keys and values"),
        ("--batch 9999999999999999", "--batch 9999999999999999: give at most"),
        ("--head-dim 9999999999999999", "--head-dim 9999999999999999: give at most"),
    ],
)
def test_mistakes_are_plain_lines(arguments: str, message: str) -> None:
    out, err = run(f"bench {arguments}", code=2)
    assert out == ""
    assert err.startswith("kvcompile: error: ")
    assert message in err
