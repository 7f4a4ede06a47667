"""The tables of the README follow from recorded results, and split every speedup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import result_parts

ABOUT = {"device": {"name": "H"}, "versions": {"torch": "2.99.0+cu1"}}


def write(folder: Path, name: str, benchmark: str, command: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).write_text(json.dumps({**ABOUT, "benchmark": benchmark, "command": command, "rows": rows}))


def cells(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(result_parts, "RESULTS", tmp_path)
    return tmp_path


def request(case: str, name: str, first: float, token: float) -> dict[str, Any]:
    times = {"first_token_milliseconds": first, "token_milliseconds": token, "peak_megabytes": 9000.0}
    return {"case": case, "format": name, "shape": "(4, 32/8, 128, 8192)", **times}


def test_requests_compare_with_the_static_cache_and_name_other_caches_of_transformers(folder: Path) -> None:
    rows = [
        request("static", "plain", 1000.0, 12.0),
        request("dynamic", "plain", 1000.0, 16.0),
        request("quanto", "int4", 2000.0, 24.0),
        request("kvquant", "bfloat16", 1000.0, 6.0),
        request("kvquant", "int4", 800.0, 4.0),
        {"case": "kvquant", "format": "int8", "shape": "(4, 32/8, 128, 8192)", "error": "out of memory"},
    ]
    write(folder, result_parts.REQUESTS, "generate", "generate.py --layers 16", rows)
    text = result_parts.requests()
    assert "16 such layers (H, PyTorch 2.99.0, `benchmarks/generate.py`)" in text
    assert cells(text) == {
        "Transformers, static cache": ["4 x 8,192 tokens", "1.00 s", "12.0", "9.0 GB"],
        "Transformers, dynamic cache": [
            "4 x 8,192 tokens", "1.00 s: 1.00x static", "16.0: 0.8x static, without the fused path", "9.0 GB",
        ],
        "Transformers, quanto cache, int4": [
            "4 x 8,192 tokens", "2.00 s: 0.50x static", "24.0: 0.5x static, without the fused path", "9.0 GB",
        ],
        "the fused path alone, bfloat16 cache": [
            "4 x 8,192 tokens", "1.00 s: 1.00x static", "6.00: 2.0x static, all by the fused path", "9.0 GB",
        ],
        "`int4`": [
            "4 x 8,192 tokens", "0.80 s: 1.25x static", "4.00: 3.0x static = 2.0 (fused path) x 1.50 (bits)", "9.0 GB",
        ],
    }  # fmt: skip


def test_throughput_is_split_into_the_fused_path_and_the_bits(folder: Path) -> None:
    rows = [
        {"case": case, "format": name, "context": 8192, "users": users, "tokens_per_second": speed}
        for case, name, users, speed in (
            ("static", "plain", 10, 100.0),
            ("kvquant", "bfloat16", 10, 200.0),
            ("kvquant", "int4", 40, 800.0),
        )
    ]
    write(folder, result_parts.THROUGHPUT, "throughput", "throughput.py", rows)
    assert cells(result_parts.throughput())["`int4`"] == [
        "8,192", "40", "800: 8.0x static = 2.0 (fused path) x 4.00 (bits)", "",
    ]  # fmt: skip
