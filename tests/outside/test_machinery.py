"""The judges find a test that fails on packed caches only, a difference of logits, and a run that packs nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import outside_parts
import pytest
import torch
import torch.nn.functional as F
import transformers.models.llama.modeling_llama  # noqa: F401 -- once for all processes, which are forks of this one
from torch import Tensor

from outside import loops, sources
from outside.plugin import prepared
from outside.reference_models import Compile, Reference
from outside.running import TestRun, run_module
from outside.verdict import Verdict, compare
from outside.ways_transformers import PLAIN, by_compile, by_config, by_packing

TESTS = """
import pytest, torch, transformers
from kvcompile import PackedTensor
from tiny_llama import tiny_llama

def cache(**kwargs):
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    model = tiny_llama(num_hidden_layers=1)
    result = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, **kwargs)
    return result.past_key_values

@pytest.mark.generate
def test_has_room_for_what_was_asked():
    assert cache().layers[0].keys.shape[2] == 6
    assert cache(cache_implementation="static").layers[0].keys.shape[2] == 6

@pytest.mark.generate
def test_that_packed_caches_fail():
    assert not isinstance(cache(cache_implementation="static").layers[0].keys, PackedTensor)

@pytest.mark.generate
def test_that_skips_itself():
    pytest.skip("always")

def test_without_the_mark():
    raise AssertionError
"""


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_tiny.py").write_text(TESTS, encoding="utf-8")
    return partial(run_module, folder, "test_tiny.py", marked=("generate",))


@pytest.fixture(scope="module")
def plain(judge: Any) -> Any:
    """The outcomes of the unchanged tests."""
    return judge(PLAIN)


@pytest.mark.parametrize(
    "way",
    [by_config(), pytest.param(by_compile(), marks=pytest.mark.slow), by_packing()],
    ids=lambda way: way.name,
)
def test_a_test_that_fails_on_packed_caches_only_is_found(judge: Any, plain: Any, way: Any) -> None:
    verdict = compare("tiny", str(way), plain, judge(way))
    assert (verdict.tests, verdict.passed_plain, verdict.passed) == (2, 2, 1)
    assert list(verdict.broken) == ["test_tiny.py::test_that_packed_caches_fail"]
    assert len(verdict.problems()) == 1
    assert not verdict.is_empty


def test_a_run_that_packs_nothing_is_an_empty_judge(judge: Any, plain: Any) -> None:
    verdict = compare("tiny", "config", plain, judge(by_config("auto")))
    assert verdict.passed == 2
    assert verdict.is_empty
    assert "empty judge" in verdict.problems()[0]


def test_a_test_that_ends_its_process_is_a_failure(tmp_path: Path) -> None:
    text = "import os\ndef test_one(): pass\ndef test_two(): os.kill(os.getpid(), 9)\n"
    (tmp_path / "test_end.py").write_text(text, encoding="utf-8")
    runs = run_module(tmp_path, "test_end.py", PLAIN)
    assert [run.outcome for run in runs.values()] == ["passed", "crashed"]
    verdict = compare("end", "plain", {"test_end.py::test_one": runs["test_end.py::test_one"]}, runs)
    assert list(verdict.broken) == ["test_end.py: after 1 tests"]


def test_a_test_that_does_not_run_packed_is_broken() -> None:
    plain = {name: TestRun(name, outcome) for name, outcome in (("a", "passed"), ("b", "passed"), ("c", "failed"))}
    verdict = compare("some", "config", plain, {"a": TestRun("a", "passed", packed_calls=1, sites=1)})
    assert verdict.broken == {"b": "it did not run"}
    assert (verdict.tests, verdict.passed_plain, verdict.passed) == (3, 2, 1)


def test_comparisons_in_a_lossy_format_have_a_bound() -> None:
    right = torch.tensor([1.0, -2.0])
    with prepared(by_compile("int8_per_token_head")):
        assert torch.allclose(right + 0.19, right)
        assert not torch.allclose(right + 0.21, right)
        assert not torch.allclose(torch.tensor([1, 2]), torch.tensor([1, 3]))
        torch.testing.assert_close(right + 0.19, right)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(right + 0.21, right)
    with prepared(by_compile()):
        assert not torch.allclose(right + 1e-3, right)


def attend(folder: Path, compile: Compile, wrong: bool = False) -> tuple[Tensor, Tensor]:
    """A loop of three steps on static caches. ``wrong``: it computes something else if its caches are packed."""
    keys, values = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)
    caches = {"keys": keys, "values": values}
    generator = torch.Generator().manual_seed(0)

    def step(x: Tensor, position: Tensor, caches: dict[str, Tensor]) -> Tensor:
        caches["keys"].index_copy_(2, position, x)
        caches["values"].index_copy_(2, position, x)
        visible = torch.arange(8) <= position
        return F.scaled_dot_product_attention(x, caches["keys"], caches["values"], attn_mask=visible[None]).flatten(1)

    compiled = compile(step)
    logits = []
    with torch.no_grad():
        for place in range(3):
            x = torch.randn(1, 2, 1, 16, generator=generator)
            logits.append(compiled(x, torch.tensor([place]), caches))
            if wrong and type(caches["keys"]) is not Tensor:
                logits[-1] = logits[-1] + 1e-3
    return torch.tensor([1]), torch.cat(logits)


def test_a_loop_on_packed_caches_gives_the_same_logits(tmp_path: Path) -> None:
    verdict = loops.judge(Reference("attend", "", attend), tmp_path)
    assert verdict.problems() == []
    assert (verdict.sites, verdict.passed) == (1, 1)


def test_a_loop_with_other_logits_is_broken(tmp_path: Path) -> None:
    verdict = loops.judge(Reference("attend", "", partial(attend, wrong=True)), tmp_path)
    assert "its logits differ by" in verdict.broken["attend"]


def test_tokens_may_differ_in_a_lossy_format_only() -> None:
    one, other = (torch.tensor([1]), torch.eye(3)), (torch.tensor([2]), torch.eye(3)[[0, 1, 0]])
    assert "its tokens differ" in loops.difference(one, other, 2e-5, same_tokens=True)
    assert "its logits differ" in loops.difference(one, other, 0.1, same_tokens=False)
    close = (torch.tensor([2]), torch.eye(3) + 0.01)
    assert loops.difference(one, close, 0.1, same_tokens=False) == ""


def test_a_missing_checkout_is_named(tmp_path: Path) -> None:
    assert sources.missing(None, "litgpt") == (
        "pass --outside-sources DIR, or set KVCOMPILE_OUTSIDE_SOURCES, to a folder that has a checkout litgpt"
    )
    assert "litgpt is missing" in str(sources.missing(tmp_path, "litgpt"))


def test_the_page_shows_failures_and_empty_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Verdict(
        "a", "config, float32", 3, 3, 3, {}, {}, 2, 4, 0, 6, 1, {"not cached": 2}, {}, {"torch": "2.13.0"}, "2026-01-01"
    )
    bad = Verdict("b", "config, float32", 3, 3, 2, {"m.py::test_x": "E: no"}, date="2026-01-01")
    path = tmp_path / "outside.json"
    path.write_text(json.dumps([good.to_dict(), bad.to_dict()]), encoding="utf-8")
    monkeypatch.setattr(outside_parts, "RESULTS", path)
    text = outside_parts.judges()
    assert "6 tests and models pass plainly, and 5 of these pass packed.\n0 of the other 1 fail for reasons " in text
    assert "1 runs are empty judges" in text
    assert "| a | config, float32 | 3 | 3 | 2 | 0 | 6 of 7 | [1] |" in text
    assert "1. not cached\n2. `test_x`: E: no" in text


def test_the_page_has_the_text_of_the_program() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert page.endswith(outside_parts.section())
