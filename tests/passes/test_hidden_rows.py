"""Rows from which every key is hidden are NaN or zeros on packed caches, as they are in the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from releases import is_before
from torch import Tensor
from torch.fx import Graph

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("seed_without_grad")

LOWEST = torch.finfo(torch.float32).min
ROWS, TOKENS = 3, 70

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attention of query, keys, values and a bool mask [3, 70]. True hides a key, and row 1 hides every key."""


def filled_with_infinity(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def infinity_added(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.mT + torch.where(hidden, -torch.inf, 0.0)).softmax(-1) @ v


def an_unknown_mask_added(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.mT + hidden.float().log1p().mul(-torch.inf).nan_to_num(0.0, neginf=-torch.inf)).softmax(-1) @ v


def two_lowest_numbers_added(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    mask = torch.zeros(ROWS, TOKENS).masked_fill(hidden, LOWEST)
    return (q @ k.mT + mask + mask).softmax(-1) @ v


def a_mask_that_overflows_when_it_is_cast(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.mT + torch.where(hidden, LOWEST, 0.0).half().float()).softmax(-1) @ v


def a_mask_changed_in_place(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    mask = torch.zeros(ROWS, TOKENS)
    mask.masked_fill_(hidden, -torch.inf)
    return (q @ k.mT + mask).softmax(-1) @ v


def exponentials_divided(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    weights = (q @ k.mT).masked_fill(hidden, -torch.inf).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def the_lowest_number_added(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    mask = torch.where(hidden, LOWEST, torch.zeros((), dtype=q.dtype))[None, None].expand(2, 1, -1, -1)
    return (q @ k.mT + mask[:, :, :, : k.shape[2]]).softmax(-1) @ v


def at_least_the_lowest_number(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = q @ k.mT + torch.where(hidden, -torch.inf, 0.0)
    return scores.clamp(min=LOWEST).softmax(-1) @ v


def nan_made_zero(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num() @ v


def beside_sinks(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(hidden, -torch.inf)
    sinks = torch.ones(2).view(1, -1, 1, 1).expand(2, -1, ROWS, 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)


NAN = (
    filled_with_infinity,
    infinity_added,
    an_unknown_mask_added,
    two_lowest_numbers_added,
    a_mask_that_overflows_when_it_is_cast,
    a_mask_changed_in_place,
    exponentials_divided,
)
ZERO = (nan_made_zero, beside_sinks, sdpa)
MEAN = (the_lowest_number_added, at_least_the_lowest_number)


def arguments() -> list[Any]:
    roles: tuple[Role, Role] = ("key", "value")
    caches = [
        PackedTensor.from_dense(torch.randn(2, 2, TOKENS, 16), PackedLayout("int8_per_token_head", role, 16))
        for role in roles
    ]
    hidden = torch.arange(TOKENS) > torch.arange(ROWS)[:, None] + 50
    hidden[1] = True
    return [torch.randn(2, 2, ROWS, 16), *caches, hidden]


def both(form: Form, given: list[Any]) -> tuple[Tensor, Tensor]:
    """The result on packed caches, and the result of the same code in eager mode on the dequantized caches."""
    q, k, v, hidden = copy.deepcopy(given)
    expected = form(q, k.dequantize(), v.dequantize(), hidden)
    torch._dynamo.reset()
    out = torch.compile(form, backend="kvquant", fullgraph=True, options={"on_unsupported": "error"})(*given)
    assert {site.reason for site in last_report().sites} == {None}
    return out, expected


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("without_code_generation", "operators_traced")
@pytest.mark.parametrize("form", [*NAN, *ZERO, *MEAN], ids=lambda form: form.__name__)
def test_a_row_without_a_visible_key_equals_the_row_of_the_model(form: Form) -> None:
    if form is a_mask_that_overflows_when_it_is_cast and is_before("2.13"):
        pytest.skip("Inductor drops the cast to half, also in plain graphs")
    out, expected = both(form, arguments())
    row = expected[:, :, 1]
    assert row.isnan().all() if form in NAN else row.count_nonzero() == (0 if form in ZERO else row.numel())
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def reductions(graph: Graph) -> int:
    """The number of nodes of a graph that ask whether every key is hidden from a row."""
    names = ("aten.any.dim", "aten.all.dim")
    return sum(str(node.target) in names for node in graph.nodes)


@pytest.mark.parametrize("form", [*NAN, *ZERO, *MEAN], ids=lambda form: form.__name__)
def test_nothing_is_computed_where_the_graph_shows_that_no_row_is_nan(
    form: Form, rewritten_graphs: list[Graph]
) -> None:
    both(form, arguments())
    assert reductions(rewritten_graphs[0]) == (form in NAN)


def test_layers_that_share_a_mask_look_for_its_hidden_rows_once(rewritten_graphs: list[Graph]) -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return filled_with_infinity(filled_with_infinity(q, k, v, hidden).nan_to_num(), k, v, hidden)

    both(layers, arguments())
    assert len(last_report().sites) == 2
    assert reductions(rewritten_graphs[0]) == 1


@pytest.mark.slow
def test_generated_code_keeps_nan_too() -> None:
    out, expected = both(filled_with_infinity, arguments())
    assert expected.isnan().sum() == 2 * 2 * 16
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.usefixtures("without_code_generation", "operators_traced")
def test_attention_on_no_keys_at_all_is_zero() -> None:
    q, k, v, hidden = arguments()
    out, expected = both(filled_with_infinity, [q, k[:, :, :0], v[:, :, :0], hidden[:, :0]])
    assert not expected.any()
    torch.testing.assert_close(out, expected)
