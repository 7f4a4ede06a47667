"""Attention with no tokens, no keys, no heads or no sequences compiles, and equals the model's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from releases import is_before, needs_release
from torch import Tensor
from torch.fx import Graph

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.mark.values import NotUnderstood
from kvcompile.passes.mark.writer import GraphWriter

pytestmark = pytest.mark.usefixtures("without_code_generation", "operators_traced", "seed_without_grad")

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def sdpa_of_three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0])


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(q.shape[-2], k.shape[-2]).masked_fill(torch.arange(k.shape[-2]) < 2, -torch.inf)
    return (q[:, : k.shape[1]] @ k.mT * 0.25 + mask).softmax(-1) @ v


def groups_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bkgqd,bksd->bkgqs", q.reshape(q.shape[0], k.shape[1], 2, q.shape[2], q.shape[3]), k)
    return torch.einsum("bkgqs,bksd->bkgqd", scores.softmax(-1), v)


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q[:, : k.shape[1]] @ k.mT
    sinks = torch.arange(k.shape[1]).float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


EMPTY = {  # batch, new tokens, tokens of the cache, head_dim, KV heads
    "no tokens": (2, 0, 7, 16, 2),
    "no keys": (2, 0, 0, 16, 2),
    "no sequences": (0, 3, 7, 16, 2),
    "no heads": (2, 3, 7, 16, 0),
    "no channels": (2, 3, 7, 0, 2),
}


FORMS = (sdpa, sdpa_of_three_dimensions, written_out, groups_of_heads, with_sinks)


def each_form_and_size() -> list[Any]:
    """All sizes of the first form, and two of each other form; the rest is slow."""
    return [
        pytest.param(form, sizes, id=f"{form.__name__}-{name}", marks=() if i * (i + j) % 5 < 2 else pytest.mark.slow)
        for i, form in enumerate(FORMS)
        for j, (name, sizes) in enumerate(EMPTY.items())
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("form", "sizes"), each_form_and_size())
def test_an_empty_step_compiles_and_equals_the_model(form: Form, sizes: tuple[int, ...]) -> None:
    batch, new, tokens, head_dim, heads = sizes
    if form is sdpa_of_three_dimensions and not heads:
        pytest.skip("it takes the first head")
    if form is sdpa and not heads and is_before("2.13"):
        pytest.skip("the process crashes in PyTorch's own attention without heads")

    def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, position: Tensor) -> Tensor:
        kc.index_copy_(2, position, k)
        vc.index_copy_(2, position, v)
        return form(q, kc, vc)

    def result(backend: str, **kwargs: Any) -> Tensor:
        torch.manual_seed(0)
        q = torch.randn(batch, 2 * heads, new, head_dim)
        k, v = (torch.randn(batch, heads, new, head_dim) for _ in range(2))
        kc, vc = (torch.randn(batch, heads, tokens, head_dim) for _ in range(2))
        torch._dynamo.reset()
        compiled: Tensor = torch.compile(step, backend=backend, **kwargs)(q, k, v, kc, vc, torch.arange(new))
        return compiled

    out = result("kvquant", options={"on_unsupported": "ignore"})
    torch.testing.assert_close(out, result("eager"), rtol=0.1, atol=0.1)


def test_an_empty_step_of_attention_with_sinks_leaves_packed_caches_packed() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, position: Tensor) -> Tensor:
        kc.index_copy_(2, position, k)
        vc.index_copy_(2, position, v)
        return with_sinks(q, kc, vc)

    roles: tuple[Role, Role] = ("key", "value")
    layouts = [PackedLayout("int8_per_token_head", role, 16) for role in roles]
    caches = [PackedTensor.from_dense(torch.randn(2, 2, 7, 16), layout) for layout in layouts]
    given = [torch.randn(2, heads, 0, 16) for heads in (4, 2, 2)]
    compiled = torch.compile(step, backend="kvquant", options={"on_unsupported": "error"})
    assert compiled(*given, *caches, torch.arange(0)).shape == (2, 2, 0, 16)
    assert [site.reason for site in last_report().sites] == [None]


@needs_release("2.13", "fake tensors do not check the index of a select")
def test_an_operation_that_pytorch_rejects_is_not_inserted_and_its_attention_not_understood() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode():
        x.meta["example_value"] = torch.empty(2, 0)
    writer = GraphWriter(graph, x)
    with pytest.raises(NotUnderstood, match=r"select rejects its sizes: select.*index 0 out of range"):
        writer.call("select", writer.call("unsqueeze", x, 0), 2, 0)
    writer.undo()
    assert list(graph.nodes) == [x]
