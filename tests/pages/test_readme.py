"""The commands, the table, the code and the policy in the README are correct."""

from __future__ import annotations

import re
from pathlib import Path

import picture
import pytest
import torch
from matplotlib.text import Text
from recording import Results

from kvcompile.kernels.formats import FORMATS
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.site import FormatPair
from kvcompile.policy.policy import Policy
from kvcompile.policy.presets import PRESETS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BF16_BYTES = 2 * 2 * 128


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_two_commands_are_as_promised() -> None:
    assert code_blocks("sh") == [
        "pip install -e . && python examples/quickstart.py\n",
        'pip install -e ".[test]" && pytest\n',
    ]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_the_first_snippet_has_ten_lines_or_fewer() -> None:
    assert len(code_blocks("python")[0].splitlines()) <= 10


@pytest.mark.usefixtures("without_code_generation")
def test_all_snippets_run_in_order_and_need_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(code_blocks("python")), {"__name__": "snippets"})
    shown = capsys.readouterr().out
    assert re.search(r"2 attention \w+: 2 rewritten, 0 refused", shown), shown
    assert {path.name for path in tmp_path.iterdir()} == {"prompt.safetensors", "report.html"}


def test_every_speedup_names_its_baseline_and_its_parts_in_the_same_cell() -> None:
    cells = [cell.strip() for line in README.splitlines() if line.startswith("|") for cell in line.split("|")]
    speedups = [cell for cell in cells if re.search(r"\d+\.\d+x", cell)]
    assert len(speedups) >= 8
    for cell in speedups:
        assert re.search(r"\d\.\d+x (plain|static)", cell), cell
        assert re.search(r"fused path|^[\d.]+ s:", cell), cell


def test_the_picture_is_drawn_from_the_results(tmp_path: Path) -> None:
    (name,) = re.findall(r"!\[[^]]*\]\(([^)]*)\)", README)
    picture.draw(Results.read(picture.SOURCE), tmp_path / "picture.svg")
    labels = re.compile(r"<!-- (.*?) -->")
    drawn = labels.findall((tmp_path / "picture.svg").read_text())
    assert drawn == labels.findall((ROOT / name).read_text()), "run: python benchmarks/picture.py"
    rows = [row for of_shape in picture.by_shape(Results.read(picture.SOURCE)).values() for row in of_shape.values()]
    assert {f"{picture.milliseconds(row):#.3g}" for row in rows} <= set(drawn)
    assert len(rows) > len(picture.FORMATS)


def test_the_text_of_the_picture_is_readable_on_a_page() -> None:
    """Pages show it 800 pixels wide."""
    drawn = picture.figure(Results.read(picture.SOURCE))
    texts = [text for text in drawn.findobj(Text) if text.get_text() and text.get_visible()]
    heights = {text.get_text(): text.get_fontsize() / 72 * 800 / drawn.get_figwidth() for text in texts}
    assert len(heights) > 40
    assert {text: height for text, height in heights.items() if height < 11} == {}


def test_ci_runs_the_test_command() -> None:
    ci = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert 'pip install --quiet --progress-bar off -e ".[test]"' in ci
    assert "pytest" in ci


def test_the_table_of_formats_is_the_arithmetic_of_the_formats() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]+\| (\d / \d) \| (\d+) \+ (\d+) \| (\d+) \| (\d+) % \|", README, re.MULTILINE)
    expected = []
    for name, pair in PRESETS.items():
        key = PackedLayout(pair.key, "key", 128).bytes_per_token
        value = PackedLayout(pair.value, "value", 128).bytes_per_token
        share = f"{100 * (key + value) / BF16_BYTES:.0f}"
        bits = f"{FORMATS[pair.key].bits:g} / {FORMATS[pair.value].bits:g}"
        expected.append((name, bits, str(key), str(value), str(key + value), share))
    assert rows == expected


def test_the_bytes_of_recent_tokens_equal_the_bytes_of_the_layout() -> None:
    layout = PRESETS["int4"].layout("key", 128, torch.bfloat16)
    assert f"`int4` this takes {layout.residual_bytes // 1024} KiB more per sequence and KV head" in README.replace(
        "\n", " "
    )
    assert layout.residual_bytes % 1024 == 0


def test_the_example_of_a_policy_is_valid() -> None:
    (text,) = code_blocks("yaml")
    policy = Policy.from_text(text)
    assert policy.formats_for("layers.31.self_attn", 31, 32) == FormatPair("fp8_e4m3", "fp8_e4m3")
    assert policy.formats_for("layers.5.cross_attn", 5, 32) is None
    assert policy.formats_for("layers.5.self_attn", 5, 32) == FormatPair("turboquant_4bit", "int4_per_token_head")


def test_every_divergence_is_in_the_table_of_presets_by_size() -> None:
    section = (ROOT / "docs" / "quality.md").read_text().partition("## Presets by size")[2].partition("\n## ")[0]
    header = next(line for line in section.splitlines() if line.startswith("| policy")).split("|")
    column = header.index(" after an exact prompt ")
    cells = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    measured = {row[1].strip(" `"): row[column].strip() for row in cells}
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*\bKL [^|]*) \|$", README, re.MULTILINE)
    assert len(rows) >= 8
    for name, text in rows:
        figures = re.findall(r"\d\.\d+e-\d", text)
        rivals = [measured[rival] for rival in re.findall(r"`(\w+)`", text)]
        assert figures == [measured[name], *rivals], name


def test_no_preset_is_called_better_without_a_figure() -> None:
    assert "better than" not in README
