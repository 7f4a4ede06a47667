"""Positions that a step reads from a tensor with ``.item()``, in one graph, as ExecuTorch's and other static caches do.

``torch._dynamo.config.capture_scalar_outputs`` keeps such a step in one graph. Compiled steps equal plain code in a
lossless format. Graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch._dynamo
import torch.nn.functional as F
from releases import needs_release
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import kvcompile
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.prove.uses import UseChecker

BATCH, HEADS, MAX_LEN, HEAD_DIM = 2, 2, 70, 32

Write = Callable[[Tensor, Tensor, int], object]
"""Writes vectors [batch, n, heads, head_dim] to a cache [batch, tokens, heads, head_dim] from a position on."""

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler", "without_code_generation"),
    # PyTorch's own trace of a copy to a slice from such a position warns, also without this backend (meta_copy_).
    pytest.mark.filterwarnings("ignore:Raw SymInt value:UserWarning"),
]

one_graph = torch._dynamo.config.patch(capture_scalar_outputs=True)


def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None = None) -> Tensor:
    """Keys and values are [batch, tokens, heads, head_dim]."""
    return F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), visible)


def narrow(cache: Tensor, x: Tensor, start: int) -> None:
    cache.narrow(1, start, x.shape[1]).copy_(x)


def assigned_slice(cache: Tensor, x: Tensor, start: int) -> None:
    torch._check(start >= 0)
    torch._check(start + x.shape[1] <= MAX_LEN)
    cache[:, start : start + x.shape[1]] = x


@pytest.mark.parametrize(
    ("write", "lengths"),
    [
        (narrow, (63, 1, 1)),
        (assigned_slice, (63, 1, 1)),
        pytest.param(
            *(narrow, (63, 1, 1, 3)),
            marks=[pytest.mark.slow, needs_release("2.13", "a guard on strides takes too many arguments")],
        ),
    ],
)
@one_graph
def test_a_cache_that_is_written_from_a_position_in_a_tensor_is_packed(write: Write, lengths: tuple[int, ...]) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        start = positions[0].item()
        write(keys, k, start), write(values, v, start)
        visible = torch.arange(MAX_LEN) <= positions[:, None]
        return attend(q, keys, values, visible)

    caches = [torch.zeros(BATCH, MAX_LEN, HEADS, HEAD_DIM) for _ in range(2)]
    expected = [x.clone() for x in caches]
    run = torch.compile(
        step, backend="kvquant", fullgraph=True, options={"policy": "float32", "on_unsupported": "error"}
    )
    start = 0
    for n in lengths:
        q, k, v = torch.randn(BATCH, HEADS, n, HEAD_DIM), *torch.randn(2, BATCH, n, HEADS, HEAD_DIM)
        positions = torch.arange(start, start + n)
        out = run(q, k, v, *caches, positions)
        torch.testing.assert_close(out, step(q, k, v, *expected, positions), rtol=1e-4, atol=1e-5)
        start += n
    for cache, other in zip(caches, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.dequantize(), other)
    assert [site.reason for site in kvcompile.last_report().sites] == [None]
    with pytest.raises((IndexError, RuntimeError)):  # past the last token
        run(q, k, v, *caches, torch.arange(MAX_LEN - 1, MAX_LEN + 2))
    assert torch.equal(caches[0].dequantize(), expected[0])


def selected(cache: Tensor, x: Tensor, positions: Tensor) -> None:
    cache.select(1, positions[0].item()).copy_(x[:, 0])


def behind_a_sum(cache: Tensor, x: Tensor, positions: Tensor) -> None:
    cache.narrow(1, positions[0].item() + positions[1].item(), x.shape[1]).copy_(x)


def narrowed(cache: Tensor, x: Tensor, positions: Tensor) -> None:
    cache.narrow(1, positions[0].item(), x.shape[1]).copy_(x)  # in the graph, the slice's end has a case for -1


@pytest.mark.parametrize("write", [selected, behind_a_sum, narrowed])
@one_graph
def test_caches_that_arrive_packed_stay_packed(write: Callable[..., None]) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        write(keys, k, positions), write(values, v, positions)
        return attend(q, keys, values)

    caches = [torch.randn(BATCH, 2 * MAX_LEN, HEADS, HEAD_DIM) for _ in range(2)]
    expected = [x.clone() for x in caches]
    run = torch.compile(
        step, backend="kvquant", fullgraph=True, options={"policy": "float32", "on_unsupported": "error"}
    )
    with kvcompile.collect_reports() as report:
        for position in (3, 64, 139):
            q, k, v = torch.randn(BATCH, HEADS, 1, HEAD_DIM), *torch.randn(2, BATCH, 1, HEADS, HEAD_DIM)
            given = k, v, *caches, torch.tensor([position, 0])
            torch.testing.assert_close(run(q, *given), step(q, k, v, *expected, given[-1]), rtol=1e-4, atol=1e-5)
    assert len(report.sites) == 2  # a graph for plain caches, and one for packed caches
    for cache, other in zip(caches, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.dequantize(), other)


def cut_and_extended(q: Tensor, new: Tensor, past: list[Tensor], number: Tensor) -> Any:
    count = _number(number, past[0].shape[1])
    keys, values = (torch.cat([x[:, :count], new], 1) for x in past)
    return attend(q, keys, values), keys, values


def extended_by_some(q: Tensor, new: Tensor, past: list[Tensor], number: Tensor) -> Any:
    count = _number(number, new.shape[1])
    keys, values = (torch.cat([x, new[:, :count]], 1) for x in past)
    return attend(q, keys, values), keys, values


def new_rows(q: Tensor, new: Tensor, past: list[Tensor], number: Tensor) -> Any:
    keys, values = (new[:, : _number(number, new.shape[1])] + place for place in (1, 2))
    return attend(q, keys, values), keys, values


def filled_to_the_end(q: Tensor, new: Tensor, past: list[Tensor], number: Tensor) -> Any:
    for x in past:
        x[:, number.item() :] = 0.5
    return attend(q, *past)


def read_to_the_end(q: Tensor, new: Tensor, past: list[Tensor], number: Tensor) -> Any:
    start = number.item()
    for x in past:
        x[:, :2] = new[:, :2]
    keys, values = (x[:, start:].transpose(1, 2) for x in past)
    return torch.softmax(q @ keys.mT, -1) @ values


def chosen_tokens(q: Tensor, new: Tensor, past: list[Tensor], number: Tensor) -> Any:
    for x in past:
        x[:, :3] = new
    places = (torch.arange(past[0].shape[1]) <= number).nonzero()[:, 0]
    keys, values = (x[:, places].transpose(1, 2) for x in past)
    return torch.softmax(q @ keys.mT, -1) @ values


def _number(data: Tensor, most: int) -> int:
    number = data.item()
    torch._check(number >= 1)
    torch._check(number <= most)
    return number


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (cut_and_extended, "size_from_data"),
        (extended_by_some, "size_from_data"),
        pytest.param(
            *(new_rows, "size_from_data"), marks=needs_release("2.13", "Inductor guards on a size that depends on data")
        ),
        (filled_to_the_end, "size_from_data"),
        (read_to_the_end, "size_from_data"),
        (chosen_tokens, "unrecognised"),
    ],
)
@one_graph
def test_a_size_from_data_is_refused_and_the_result_stays_right(step: Callable[..., Any], code: str) -> None:
    run = torch.compile(
        step, backend="kvquant", fullgraph=True, options={"policy": "float32", "on_unsupported": "ignore"}
    )
    past = [torch.randn(BATCH, 6, HEADS, HEAD_DIM) for _ in range(2)]
    for number in (2, 3):
        q, new = torch.randn(BATCH, HEADS, 1, HEAD_DIM), torch.randn(BATCH, 3, HEADS, HEAD_DIM)
        copies = [x.clone() for x in past]
        torch.testing.assert_close(run(q, new, past, torch.tensor(number)), step(q, new, copies, torch.tensor(number)))
        assert torch.equal(past[0], copies[0])
    assert {site.reason_code for site in kvcompile.last_report().sites} == {code}


@pytest.mark.usefixtures("without_code_generation")
def test_a_use_with_a_data_dependent_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def undecided(self: UseChecker, cache: object) -> None:
        raise GuardOnDataDependentSymNode(sympy.Symbol("u0") > 1)

    monkeypatch.setattr(UseChecker, "check_reads", undecided)
    torch._dynamo.reset()

    def step(q: Tensor, new: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for x in (keys, values):
            x[:, 2:3] = new
        return attend(q, keys, values)

    past = [torch.randn(BATCH, 6, HEADS, HEAD_DIM) for _ in range(2)]
    options = {"policy": "float32", "on_unsupported": "ignore"}
    torch.compile(step, backend="kvquant", fullgraph=True, options=options)(
        torch.randn(BATCH, HEADS, 1, HEAD_DIM), torch.randn(BATCH, 1, HEADS, HEAD_DIM), *past
    )
    (site,) = kvcompile.last_report().sites
    assert "only known from the data of a step" in str(site.reason)
