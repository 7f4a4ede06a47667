"""The chat streams, keeps one packed cache, and reads a saved system prompt once; the notebook runs."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import chat
import pytest
import torch

import kvcompile

EXAMPLES = Path(chat.__file__).parent

pytestmark = pytest.mark.usefixtures("without_code_generation")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    chat.main([*arguments, "--new-tokens", "3", "--max-len", "256"])
    return capsys.readouterr().out.splitlines()


def test_a_conversation_streams_and_shows_speed_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    first, *lines = said(capsys, "--message", "hello", "--message", "again")
    assert first == f"read the {len(chat.SYSTEM) + 9} tokens of the system prompt"
    figures = [line for line in lines if line.startswith("[")]
    assert len(figures) == 2
    for line in figures:
        found = re.search(r"([\d.]+) tokens/s; (\d+) of 256 tokens; cache ([\d,]+) bytes, ([\d.]+) times smaller", line)
        assert found is not None, line
        assert float(found[1]) > 0
        assert float(found[4]) == pytest.approx(256 / 136, abs=0.1)
    lengths = [int(re.findall(r"(\d+) of 256", line)[0]) for line in figures]
    turn = len("user: hello\nassistant: ") + 3
    assert lengths == [len(chat.SYSTEM) + 9 + turn, len(chat.SYSTEM) + 9 + 2 * turn]


def test_a_saved_system_prompt_is_read_once_and_gives_the_same_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "system.safetensors"
    arguments = ("--message", "hello", "--cache", str(file))
    read, answer, _ = said(capsys, *arguments)
    loaded, same, _ = said(capsys, *arguments)
    assert "saved their cache" in read
    assert "loaded the cache" in loaded
    assert same == answer
    with pytest.raises(SystemExit, match=r"system is .* in the file"):
        said(capsys, *arguments, "--system", "another prompt")


def test_messages_come_from_the_input_and_a_full_cache_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n" + 300 * "x" + "\n"))
    lines = said(capsys)
    assert len([line for line in lines if line.startswith("[")]) == 1
    assert lines[-1] == "the cache is full: give a larger --max-len"


def test_half_a_character_waits_for_its_other_half() -> None:
    written: list[str] = []
    stream = chat.Stream(lambda tokens: bytes(tokens).decode(errors="replace"), written.append)
    stream.put(torch.tensor([[1, 2]]))
    for token in "aé".encode():
        stream.put(torch.tensor([token]))
    stream.end()
    assert written == ["a", "é", "\n"]


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--model .*nowhere"):
        chat.main(["--model", str(tmp_path / "nowhere")])


def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs are not committed"
    namespace: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), namespace)
    shown = capsys.readouterr().out
    assert "2 attention layers: 2 rewritten, 0 refused, 0 skipped" in shown
    assert "2 attention layers: 1 rewritten, 0 refused, 1 skipped" in shown
    assert "in unpacked layers" in shown
    assert isinstance(namespace["report"], kvcompile.Report)
