"""Before the rewrite, a drawing shows the calls of the user's code with their places, and no decomposed operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvcompile
from kvcompile.passes.notes.surroundings import Surroundings
from kvcompile.report.drawing import draw

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")

HERE = Path(__file__).name
MASK = torch.ones(1, 1, 1, 128, dtype=torch.bool)


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=1)


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k)
    values[:, :, pos] = v
    out = F.scaled_dot_product_attention(
        q,
        repeated(keys),
        repeated(values),
        attn_mask=mask,
    )
    return out + 1


def written_out(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k)
    values.index_copy_(2, pos, v)
    scores = q @ repeated(keys).transpose(-1, -2) * 0.25
    weights = torch.softmax(scores + mask, dim=-1)
    return weights @ repeated(values)


def before(function: object, mask: Tensor) -> Surroundings:
    """The drawing of the only site of ``function``, before the rewrite."""
    new = [torch.randn(1, heads, 1, 16) for heads in (4, 2, 2)]
    caches = [torch.zeros(1, 2, 128, 16) for _ in range(2)]
    with kvcompile.collect_reports() as report:
        torch.compile(function, backend=kvcompile.kvquant())(*new, *caches, torch.tensor([3]), mask)  # type: ignore[call-overload]
    ((around,),) = (graph.surroundings for graph in report.graphs)
    assert around.before is not None
    assert around.after is not None
    return around.before


def line_of(function: object, text: str) -> str:
    """The file and the line of ``function`` that begins with ``text``."""
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno  # type: ignore[attr-defined]
    line = next(number for number in range(first, len(lines)) if lines[number].strip().startswith(text))
    return f"{HERE}:{line + 1}"


def test_boxes_hold_the_calls_of_the_user_with_file_and_line() -> None:
    boxes = {box.label: box.detail for box in before(step, MASK).boxes}
    assert boxes["key write"][:2] == ("keys.index_copy_(2, pos, k)", line_of(step, "keys.index_copy_"))
    assert boxes["value write"][:2] == ("values[:, :, pos] = v", line_of(step, "values["))
    code, where, value = boxes["attention"]
    assert code == "F.scaled_dot_product_attention(q, repeated(keys), repeated(values), attn_mask=mask)"
    assert where == line_of(step, "out = F.")
    assert value == "float32 [1, 4, 1, 16]"
    assert boxes["key read"][:2] == ("x.repeat_interleave(2, dim=1)", line_of(repeated, "return"))


def test_no_box_names_an_operator_that_the_user_did_not_call() -> None:
    drawn = before(step, MASK)
    roles = {"key cache", "key write", "key read", "value cache", "value write", "value read", "attention"}
    assert {box.label for box in drawn.boxes} == roles | {"input", "return out + 1"}
    words = {word for box in drawn.boxes for line in box.detail for word in line.split()}
    assert words.isdisjoint({"index_put", "_scaled_dot_product_flash_attention_for_cpu", "kvcompile.sdpa", "clone"})
    assert str(draw(drawn)[0]).count("F.scaled_dot_product_attention(q,") == 2, "in the box, and in its tooltip"


def test_attention_that_is_written_out_is_the_lines_that_compute_it() -> None:
    drawn = before(written_out, torch.zeros(1, 1, 1, 128))
    code = [box.detail[0] for box in drawn.boxes if box.kind == "attention"]
    assert "torch.softmax(scores + mask, dim=-1)" in code
    assert "scores = q @ repeated(keys).transpose(-1, -2) * 0.25" in code
    assert "return weights @ repeated(values)" in code


def test_attention_without_a_file_is_one_box_with_its_kind() -> None:
    program = "def step(q, k, v, keys, values, pos, mask):\n    keys.index_copy_(2, pos, k)\n"
    program += "    values.index_copy_(2, pos, v)\n    return attention(q, keys, values, mask, enable_gqa=True)\n"
    names = {"attention": F.scaled_dot_product_attention}
    exec(program, names)
    boxes = {box.label: box.detail for box in before(names["step"], MASK).boxes}
    assert boxes["attention"] == ("kvcompile.sdpa", "float32 [1, 4, 1, 16]"), "the page shows the kind in its place"
    assert boxes["key write"] == ("index_put, copy_", "float32 [1, 2, 128, 16]")
