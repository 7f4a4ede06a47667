"""Pre-RoPE keys: attention applies RoPE to packed keys where it reads them, and no key exists in the cache's dtype.

Graphs run node by node, unless generated code is the point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_computed_keys import (
    BATCH,
    HEAD_DIM,
    LOSSLESS,
    LOSSY,
    MAX_LEN,
    NUM_KV_HEADS,
    attend,
    caches,
    compiled,
    growing_step,
    packed,
    roles_dequantized_in,
    rotate_halves,
    rotate_neighbours,
    rows,
    static_step,
)
from torch import Tensor
from torch._dynamo import mark_dynamic

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.prove.fuse_computed import ROPE_NOTE

Step = Callable[..., Any]

COMPUTED_NOTE = "keys computed from their cache"
TOKENS = torch.arange(MAX_LEN)

without_code = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def note_of(step: Step, policy: Any, *arguments: Any) -> tuple[Any, str]:
    """The result of a compiled step, and the words of the report about its keys."""
    with kvcompile.collect_reports() as report:
        found = compiled(step, policy)(*arguments)
    (site,) = report.sites
    return found, site.attention.split(", ")[-1]


def plain_caches_in(graph: torch.fx.Graph) -> list[str]:
    """The nodes that hold every token and channel of a cache as numbers, for all sequences and heads."""
    values = ((node.name, node.meta.get("val")) for node in graph.nodes)
    tensors = ((name, x) for name, x in values if isinstance(x, Tensor) and x.is_floating_point())
    return [name for name, x in tensors if x.numel() >= BATCH * NUM_KV_HEADS * MAX_LEN * HEAD_DIM]


def pos_of_last(n: int = 1) -> Tensor:
    return torch.arange(MAX_LEN - n, MAX_LEN)


def test_no_node_of_the_graph_holds_the_keys(fresh_compiler: None, rewritten_graphs: list[torch.fx.Graph]) -> None:
    _, note = note_of(static_step(rotate_halves), LOSSY, *rows(1), *caches(), pos_of_last())
    assert note == ROPE_NOTE
    assert plain_caches_in(rewritten_graphs[-1]) == []


def test_layers_share_their_factors(fresh_compiler: None, rewritten_graphs: list[torch.fx.Graph]) -> None:
    layer = static_step(rotate_halves)

    def step(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        *stored, pos = rest
        q = layer(q, k, v, *stored[:2], pos)
        return layer(q, k, v, *stored[2:], pos)

    with kvcompile.collect_reports() as report:
        compiled(step, LOSSY)(*rows(1), *caches(), *caches(), pos_of_last())
    assert [site.attention.split(", ")[-1] for site in report.sites] == [ROPE_NOTE] * 2
    calls = rewritten_graphs[-1].find_nodes(op="call_function", target=torch.ops.kvcompile.attention.default)
    assert len(calls) == 2
    assert calls[0].args[-1] is calls[1].args[-1]


@without_code
@pytest.mark.parametrize(("n", "expected_note"), [(8, ROPE_NOTE), (9, COMPUTED_NOTE)])
def test_more_than_16_queries_of_a_kv_head_read_dequantized_keys(n: int, expected_note: str) -> None:
    given = caches()
    expected, arguments, pos = [x.clone() for x in given], rows(n), torch.arange(n)
    step = static_step(rotate_halves)
    found, note = note_of(step, LOSSLESS, *arguments, *given, pos)
    assert note == expected_note
    torch.testing.assert_close(found, step(*arguments, *expected, pos), rtol=1e-5, atol=1e-5)


@without_code
@pytest.mark.parametrize("policy", ["int4_per_token_head", "turboquant_3bit"])
def test_keys_of_a_format_with_another_basis_are_dequantized_by_an_operator(
    policy: str, rewritten_graphs: list[torch.fx.Graph]
) -> None:
    given = caches()
    _, note = note_of(static_step(rotate_halves), policy, *rows(1), *given, pos_of_last())
    assert note == COMPUTED_NOTE
    assert roles_dequantized_in(rewritten_graphs[-1]) == ["key"]


@without_code
def test_tables_may_be_buffers_that_positions_index() -> None:
    angles = TOKENS[:, None] * 0.01 * torch.arange(1, HEAD_DIM // 2 + 1)
    cos, sin = (torch.cat([of(angles)] * 2, -1) for of in (torch.cos, torch.sin))

    def compute(x: Tensor, pos: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[pos] + torch.cat([-second, first], -1) * sin[pos]

    step, given = static_step(compute), caches()
    expected, arguments, pos = packed(given), rows(2), pos_of_last(2)
    found, note = note_of(step, LOSSY, *arguments, *given, pos)
    assert note == ROPE_NOTE
    torch.testing.assert_close(found, step(*arguments, *expected, pos), rtol=1e-5, atol=1e-5)


@without_code
def test_a_bfloat16_model_gets_at_least_its_own_precision() -> None:
    def compute(x: Tensor, pos: Tensor) -> Tensor:
        return rotate_halves(x.float(), pos).type_as(x)

    step, given = static_step(compute), [x.bfloat16() for x in caches()]
    arguments, pos = [x.bfloat16() for x in rows(1)], pos_of_last()
    exact = [x.float() for x in given]
    expected = step(*(x.float() for x in arguments), *exact, pos)
    plain = step(*arguments, *(x.clone() for x in given), pos)
    found, note = note_of(step, {"default": {"dtype": "bfloat16"}}, *arguments, *given, pos)
    assert note == ROPE_NOTE
    assert (found - expected).norm() <= 1.2 * (plain - expected).norm()


@without_code
def test_one_site_may_apply_rope_to_keys_that_another_site_computes_otherwise() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
        return attend(q, rotate_halves(keys, TOKENS), values, pos) + attend(q, keys.tanh(), values, pos)

    given = caches()
    expected, arguments, pos = packed(given), rows(1), pos_of_last()
    with kvcompile.collect_reports() as report:
        found = compiled(step, LOSSY)(*arguments, *given, pos)
    assert [site.attention.split(", ")[-1] for site in report.sites] == [ROPE_NOTE, COMPUTED_NOTE]
    torch.testing.assert_close(found, step(*arguments, *expected, pos), rtol=1e-5, atol=1e-5)


@without_code
def test_rope_is_applied_to_exact_tokens_too() -> None:
    policy = {"default": {"dtype": LOSSY}, "residual_length": 64, "sink_tokens": 64}
    step, given = static_step(rotate_neighbours), caches()
    expected = [x.clone() for x in given]
    arguments, pos = rows(1), pos_of_last()
    found, note = note_of(step, policy, *arguments, *given, pos)
    assert note == ROPE_NOTE
    torch.testing.assert_close(found, step(*arguments, *expected, pos), rtol=0.02, atol=0.02)


def test_generated_code_of_growing_caches_applies_rope_to_packed_keys(fresh_compiler: None) -> None:
    """The caches are packed from the start; ``test_computed_keys.py`` tests the graphs of the first calls."""
    step = growing_step(rotate_halves)
    run = compiled(step, LOSSLESS)
    expected: Sequence[Tensor] = caches(66)
    layouts = (PackedLayout("float32", role, HEAD_DIM) for role in ("key", "value"))
    pairs = zip(expected, layouts, strict=True)
    past = tuple(PackedTensor.from_dense(x, layout, growing=True) for x, layout in pairs)
    with kvcompile.collect_reports() as report:
        for _ in range(3):
            for cache in past:
                mark_dynamic(cache, 2)
            arguments = rows(1)
            out, past = run(*arguments, past)
            result, expected = step(*arguments, expected)
            torch.testing.assert_close(out, result, rtol=1e-5, atol=1e-5)
            assert isinstance(past[0], PackedTensor)
    (site,) = report.sites
    assert site.attention.split(", ")[-1] == ROPE_NOTE


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["int8_per_token_head", "turboquant_4bit_nc"])
@pytest.mark.parametrize("tokens", [1024, 8192, 32768])
@torch.no_grad()
def test_generated_code_of_a_gpu_computes_the_factors_of_every_channel(tokens: int, policy: str) -> None:
    """Inductor chooses a kernel's block size by the number of tokens. Triton 3.6 was wrong for some block sizes."""

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, *tables: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
        first, second = keys.chunk(2, -1)
        after_rope = keys * tables[0] + torch.cat([-second, first], -1) * tables[1]
        return F.scaled_dot_product_attention(q, after_rope, values, enable_gqa=True)

    def new(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length, 128, dtype=torch.bfloat16, device="cuda")

    angles = torch.arange(tokens, device="cuda")[:, None] * 10000.0 ** (-torch.arange(0, 128, 2, device="cuda") / 128)
    tables = [torch.cat([part] * 2, -1).bfloat16() for part in (angles.cos(), angles.sin())]
    pos = torch.tensor([tokens - 1], device="cuda")
    arguments = (new(8, 1), new(2, 1), new(2, 1), new(2, tokens), new(2, tokens), pos, *tables)
    run = compiled(step, policy)
    run(*arguments)
    assert isinstance(arguments[3], PackedTensor)
    found, expected = run(*arguments).float(), step(*arguments).float()
    assert (found - expected).norm() < 0.02 * expected.norm()
