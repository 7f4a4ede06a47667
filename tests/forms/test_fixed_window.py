"""Several tokens enter a sliding window of fixed size at once. Attention also reads the tokens that leave it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor

from kvcompile import last_report
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.canonical.drop_whole_copies import drop_whole_copies
from kvcompile.policy.policy import Policy

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WINDOW = 2, 4, 2, 64, 70

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")

Update = Callable[[Tensor, Tensor], Tensor]
"""Adds new vectors [batch, heads, n, head_dim] to a window; returns the vectors that attention reads."""


def read_the_leaving_tokens(window: Tensor, x: Tensor) -> Tensor:
    whole = torch.cat([window[:, :, 1:], x], 2)
    window.copy_(whole[:, :, -WINDOW:])
    return whole


def read_the_remaining_tokens(window: Tensor, x: Tensor) -> Tensor:
    window.copy_(torch.cat([window, x], -2)[:, :, -WINDOW:, :])
    return window


def make_room_first(window: Tensor, x: Tensor) -> Tensor:
    window.copy_(torch.cat([window[:, :, x.shape[2] :], x], 2))
    return window


def tokens_before_heads(window: Tensor, x: Tensor) -> Tensor:
    whole = torch.cat([window[:, 1:], x.transpose(1, 2)], 1)
    window.copy_(whole[:, -WINDOW:])
    return whole.transpose(1, 2)


def fill_up(window: Tensor, x: Tensor) -> Tensor:
    """A window whose last 4 tokens are not in use yet."""
    whole = torch.cat([window[:, :, : WINDOW - 4], x], 2)
    window.copy_(whole[:, :, -WINDOW:])
    return whole


def read_by(update: Update, past: Tensor, x: Tensor) -> Tensor:
    """The vectors that attention reads, [batch, heads, tokens, head_dim]: the window and the vectors that enter it."""
    begin, end = {read_the_leaving_tokens: (1, WINDOW), tokens_before_heads: (1, WINDOW), fill_up: (0, WINDOW - 4)}.get(
        update, (x.shape[2], WINDOW)
    )
    return torch.cat([past[:, :, begin:end], x], 2)


def compiled(update: Update, policy: str, on_unsupported: str = "error") -> Callable[..., Tensor]:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, update(keys, k), update(values, v), enable_gqa=True)

    return torch.compile(
        step, backend="kvquant", options={"policy": reading_packed(policy), "on_unsupported": on_unsupported}
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("update", "policy", "steps"),
    [
        (read_the_leaving_tokens, "int8_per_token_head", (3, 5, 200)),
        pytest.param(read_the_leaving_tokens, "int8_per_token_head", (3, 1, 5, 64, 200), marks=pytest.mark.slow),
        (read_the_remaining_tokens, "turboquant_4bit_nc", (1, 64, 69)),
        (make_room_first, "fp8_e4m3", (3, 69)),
        (tokens_before_heads, "turboquant_k8v4", (3, 7)),
        (fill_up, "int4_per_token_head", (4, 9)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_token_is_quantized_once_and_read_by_all_queries_that_see_it(
    update: Update, policy: str, steps: tuple[int, ...]
) -> None:
    formats = Policy.load(policy).formats_for("", 0, 1)
    assert formats is not None
    layouts = [formats.layout(role, HEAD_DIM, torch.float32) for role in ("key", "value")]
    token_dim = 1 if update is tokens_before_heads else 2
    step = compiled(update, policy)
    windows = [torch.randn(BATCH, NUM_KV_HEADS, WINDOW, HEAD_DIM) for _ in layouts]
    caches = [window.transpose(token_dim, 2).clone(memory_format=torch.contiguous_format) for window in windows]
    for n in steps:
        q = torch.randn(BATCH, NUM_HEADS, n, HEAD_DIM)
        new = torch.randn(2, BATCH, NUM_KV_HEADS, n, HEAD_DIM).unbind()
        out = step(q, *new, *caches)
        read = [read_by(update, window, x) for window, x in zip(windows, new, strict=True)]
        windows = [x[:, :, -WINDOW:] for x in read]
        packed = [PackedTensor.from_dense(x, layout).dequantize() for x, layout in zip(read, layouts, strict=True)]
        expected = F.scaled_dot_product_attention(q, *packed, enable_gqa=True)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        for cache, window, layout in zip(caches, windows, layouts, strict=True):
            assert isinstance(cache, PackedTensor)
            expected = PackedTensor.from_dense(window, layout).dequantize()
            torch.testing.assert_close(cache.dequantize().transpose(token_dim, 2), expected, rtol=0, atol=1e-6)
    assert {cache.kind for site in last_report().sites for cache in site.caches} == {"static"}


def summed_up(window: Tensor, x: Tensor) -> Tensor:
    whole = read_the_leaving_tokens(window, x)
    x.copy_(whole.sum())
    return whole


def heads_moved_besides(window: Tensor, x: Tensor) -> Tensor:
    whole = torch.cat([window[:, :, 1:], x], 2)
    window.copy_(whole[:, :, -WINDOW:].flip(1))
    return whole


def a_token_twice(window: Tensor, x: Tensor) -> Tensor:
    whole = torch.cat([window[:, :, 1:], x, x], 2)
    window.copy_(whole[:, :, -WINDOW:])
    return whole


def seen_before(window: Tensor, x: Tensor) -> Tensor:
    return read_the_leaving_tokens(window, x + window.mean(2, keepdim=True))


REFUSED: dict[Update, str] = {
    summed_up: "used_elsewhere",
    heads_moved_besides: "computed_from_cache",
    a_token_twice: "unknown_write",
    seen_before: "used_elsewhere",
}


@pytest.mark.parametrize("update", REFUSED, ids=lambda update: update.__name__)
def test_any_other_use_is_refused_with_its_reason(update: Update) -> None:
    q, k, v = (torch.randn(BATCH, heads, 3, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    keys, values = torch.randn(2, BATCH, NUM_KV_HEADS, WINDOW, HEAD_DIM).unbind()
    keys, values = keys.clone(), values.clone()
    plain = keys.clone(), values.clone()
    expected = F.scaled_dot_product_attention(q, *map(update, plain, (k.clone(), v.clone())), enable_gqa=True)
    out = compiled(update, "int8_per_token_head", "ignore")(q, k, v, keys, values)
    torch.testing.assert_close(out, expected)
    assert torch.equal(keys, plain[0])
    assert torch.equal(values, plain[1])
    (site,) = last_report().sites
    assert site.reason_code == REFUSED[update]


def test_windows_that_are_copied_into_each_other_are_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        wholes = [torch.cat([window[:, :, 1:], x], 2) for window, x in ((keys, k), (values, v))]
        keys.copy_(wholes[1][:, :, -WINDOW:]), values.copy_(wholes[0][:, :, -WINDOW:])
        return F.scaled_dot_product_attention(q, *wholes, enable_gqa=True)

    torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})(
        torch.randn(BATCH, NUM_HEADS, 3, HEAD_DIM),
        *(torch.randn(BATCH, NUM_KV_HEADS, n, HEAD_DIM) for n in (3, 3, WINDOW, WINDOW)),
    )
    (site,) = last_report().sites
    assert site.reason_code == "unknown_write"


def test_a_format_whose_tokens_share_scales_is_refused() -> None:
    q, k, v = (torch.randn(BATCH, heads, 3, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    keys, values = (torch.randn(BATCH, NUM_KV_HEADS, WINDOW, HEAD_DIM) for _ in range(2))
    compiled(read_the_leaving_tokens, "int4", "ignore")(q, k, v, keys, values)
    (site,) = last_report().sites
    assert "moves tokens" in str(site.reason)


def test_a_copy_of_an_input_is_not_dropped() -> None:
    """Two inputs that swap their values would each read the new value of the other."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    doubled = graph.call_function(aten.mul.Tensor, (other, 2))
    shorter = graph.call_function(aten.slice.Tensor, (doubled, 0, 0, 3))
    nodes = [one, other, doubled, shorter]
    sources = [other, doubled, shorter]
    copies = [graph.call_function(aten.copy.default, (one, source)) for source in sources]
    for node in (*nodes, *copies):
        node.meta["val"] = torch.empty(3 if node is shorter else 4)
    graph.output(tuple(copies))
    drop_whole_copies(graph)
    assert graph.output_node().args[0] == (copies[0], doubled, copies[2])
