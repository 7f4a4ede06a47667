"""Caches of latents are packed, and dequantized where the model computes keys and values from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

import kvcompile.compilation.rewriter
from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.notes.surroundings import operation_name
from kvcompile.passes.packing import Packing
from kvcompile.passes.pipeline import Pass

BATCH, NUM_HEADS, MAX_LEN, WIDTH = 2, 4, 70, 64
RANK, NOPE, ROPE, V_DIM = 48, 16, 32, 32
"""Number of channels of a latent, of the two parts of a key, and of a value."""
POLICY = "int8_per_token_head"

interpreted = pytest.mark.usefixtures("without_code_generation")


class LatentAttention(nn.Module):
    """Multi-head latent attention that caches latents and the rotary channels of keys."""

    expand: Callable[[LatentAttention, Tensor, Tensor], tuple[Tensor, Tensor]]

    def __init__(self, expand: Any, token_axis: int = 2) -> None:
        super().__init__()
        self.expand, self.token_axis = expand, token_axis
        self.query = nn.Linear(WIDTH, NUM_HEADS * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(WIDTH, RANK + ROPE, bias=False)
        self.up = nn.Linear(RANK, NUM_HEADS * (NOPE + V_DIM), bias=False)
        shape = [BATCH, 1, MAX_LEN] if token_axis == 2 else [BATCH, MAX_LEN, 1]
        self.register_buffer("latents", torch.zeros(*shape, RANK))
        self.register_buffer("rotary", torch.zeros(*shape, ROPE))

    def new(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The query [B, H, T, D] of tokens [B, T, WIDTH], and the latents and rotary channels to cache."""
        q = self.query(x).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
        latents, rotary = self.down(x).unsqueeze(3 - self.token_axis).split([RANK, ROPE], -1)
        return q, latents, rotary.cos()

    def attend(self, q: Tensor, latents: Tensor, rotary: Tensor, mask: Tensor | None) -> Tensor:
        if self.token_axis == 1:
            latents, rotary = latents.transpose(1, 2), rotary.transpose(1, 2)
        key, value = self.expand(self, latents, rotary)
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, latents, rotary = self.new(x)
        for cache, new in ((self.latents, latents), (self.rotary, rotary)):
            cache.index_copy_(self.token_axis, positions, new)
        mask = torch.arange(MAX_LEN, device=x.device) <= positions[:, None]
        return self.attend(q, self.latents, self.rotary, mask)


def both_parts(self: LatentAttention, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Keys without their rotary channels, and values, both of all heads."""
    x = self.up(latents).view(BATCH, -1, NUM_HEADS, NOPE + V_DIM).transpose(1, 2)
    nope, value = x.split([NOPE, V_DIM], -1)
    return nope, value


def copied_into_new_keys(self: LatentAttention, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    nope, value = both_parts(self, latents)
    key = latents.new_empty(*nope.shape[:-1], NOPE + ROPE)
    key[..., :NOPE].copy_(nope)
    key[..., NOPE:].copy_(rotary.expand(-1, NUM_HEADS, -1, -1))
    return key, value


def concatenated(self: LatentAttention, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    nope, value = both_parts(self, latents)
    return torch.cat([nope, rotary.repeat(1, NUM_HEADS, 1, 1)], -1), value


def by_einsum(self: LatentAttention, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    weight = self.up.weight.view(NUM_HEADS, -1, RANK)
    x = torch.einsum("btr,hdr->bhtd", latents[:, 0], weight)
    return torch.cat([x[..., :NOPE], rotary.expand(-1, NUM_HEADS, -1, -1)], -1), x[..., NOPE:]


def attention(expand: Any = concatenated, token_axis: int = 2) -> LatentAttention:
    torch.manual_seed(0)
    return LatentAttention(expand, token_axis).eval()


def on_packed_caches(module: LatentAttention) -> LatentAttention:
    module = copy.deepcopy(module)
    for name, role in (("latents", "key"), ("rotary", "value")):
        plain = getattr(module, name)
        layout = PackedLayout(POLICY, role, plain.shape[-1])
        setattr(module, name, PackedTensor.from_dense(plain, layout, "bhtd" if module.token_axis == 2 else "bthd"))
    return module


def compiled(fn: Any, policy: Any = POLICY, on_unsupported: str = "error") -> Any:
    return torch.compile(fn, backend="kvquant", options={"policy": policy, "on_unsupported": on_unsupported})


def run(step: Any, lengths: tuple[int, ...] = (66, 4), device: str = "cpu") -> list[Any]:
    """The outputs of a prefill longer than a block and of a chunk."""
    x = torch.randn(BATCH, MAX_LEN, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    chunks = zip(x.split(lengths, 1), torch.arange(MAX_LEN, device=device).split(lengths), strict=True)
    with torch.no_grad():
        return [step(chunk, positions) for chunk, positions in chunks]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Graph]]:
    """The graphs ``before`` and ``after`` the rewrite."""
    seen: dict[str, list[Graph]] = {"before": [], "after": []}
    run = kvcompile.compilation.rewriter.run

    def remember(packing: Packing) -> Iterator[Pass]:
        seen["before"].append(copy.deepcopy(packing.gm.graph))
        yield from run(packing)
        seen["after"].append(copy.deepcopy(packing.gm.graph))

    monkeypatch.setattr(kvcompile.compilation.rewriter, "run", remember)
    return seen


def count(graph: Graph, *names: str) -> int:
    """The number of operations of a graph with one of these names."""
    return sum(operation_name(node) in names for node in graph.nodes if node.op == "call_function")


@pytest.mark.sampled(3)
@interpreted
@pytest.mark.usefixtures("operators_traced")
@pytest.mark.parametrize(("expand", "token_axis"), [(copied_into_new_keys, 2), (concatenated, 1), (by_einsum, 2)])
def test_latents_in_buffers_are_packed_and_dequantized_for_the_projection(
    expand: Any, token_axis: int, graphs: dict[str, list[Graph]]
) -> None:
    module = attention(expand, token_axis)
    eager = on_packed_caches(module)
    lengths = (66, 4)
    if expand is not concatenated:  # caches that arrive plain take another graph, and so does another length
        module, lengths = on_packed_caches(module), (35, 35)
    for actual, expected in zip(run(compiled(module), lengths), run(eager, lengths), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for name in ("latents", "rotary"):
        assert torch.equal(getattr(module, name).packed, getattr(eager, name).packed)
    (site,) = {site.attention: site for site in last_report().sites}.values()
    assert site.attention.endswith("computed from latents")
    assert [(cache.role, cache.kind, cache.shape[3]) for cache in site.caches] == [
        ("key", "static", RANK),
        ("value", "static", ROPE),
    ]
    for before, after in zip(graphs["before"], graphs["after"], strict=True):
        assert count(before, "index_put") == count(after, "index_put") == 2
        assert count(before, "mm", "bmm") == count(after, "mm", "bmm") == 5  # 3 projections, 2 products of attention
        inputs = [node.meta["val"] for node in after.find_nodes(op="placeholder")]
        assert sum(isinstance(value, Tensor) and value.dtype == torch.uint8 for value in inputs) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [POLICY, "fp8_e4m3", "int4_per_token_head"])
def test_latents_on_a_gpu_are_packed_and_dequantized_for_the_projection(policy: str) -> None:
    torch._dynamo.reset()
    module = attention().to("cuda")
    exact, step = run(copy.deepcopy(module), device="cuda"), compiled(module, policy)
    first = run(step, device="cuda")  # packs the caches; the second run writes the same tokens to the packed caches
    eager = copy.deepcopy(module)
    for results in (first, run(step, device="cuda")):
        for actual, expected, plain in zip(results, run(eager, device="cuda"), exact, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
            assert 0 < (actual - plain).norm() < 0.3 * plain.norm()
    assert isinstance(module.latents, PackedTensor)


def growing_step(module: LatentAttention, latents: Tensor, rotary: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A step with caches that grow by ``cat`` and stay with the caller."""
    q, new_latents, new_rotary = module.new(x)
    if latents is not None:
        new_latents, new_rotary = torch.cat([latents, new_latents], 2), torch.cat([rotary, new_rotary], 2)
    mask = torch.ones(x.shape[1], new_latents.shape[2], dtype=torch.bool).tril(new_latents.shape[2] - x.shape[1])
    return module.attend(q, new_latents, new_rotary, mask), new_latents, new_rotary


@interpreted
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_latents_that_grow_are_packed_from_the_first_call_on(dynamic: bool | None) -> None:
    """Without ``dynamic``, the number of tokens is a symbol in the second graph."""
    module, static = attention(), on_packed_caches(attention())
    step = torch.compile(growing_step, backend="kvquant", options={"policy": POLICY}, dynamic=dynamic)
    caches: list[Any] = [None, None]

    def call(x: Tensor, positions: Tensor) -> Tensor:
        out, *caches[:] = step(module, *caches, x)
        return out

    for actual, expected in zip(run(call), run(static), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert [type(cache) for cache in caches] == [PackedTensor] * 2
    assert torch.equal(caches[0].dequantize(), static.latents.dequantize())
    assert [site.reason for site in last_report().sites] == [None]


@interpreted
def test_packed_latents_keep_the_formats_they_arrive_in() -> None:
    module, eager = on_packed_caches(attention()), on_packed_caches(attention())
    step = compiled(module, {"version": 1, "default": {"dtype": "fp8_e4m3"}})
    for actual, expected in zip(run(step, (70,)), run(eager, (70,)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert module.latents.format_name == POLICY


@interpreted
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_latents_of_512_channels_take_a_format_of_latents_and_their_rotary_part_another(device: str) -> None:
    policy = {"version": 1, "default": {"key": {"dtype": "fp8_ds_mla"}, "value": {"dtype": "fp8_e4m3"}}}
    q, x, weight = (torch.randn(shape).to(device) for shape in ((1, 2, 1, 64), (1, 1, 70, 544), (2 * 64, 512)))
    latents, rotary = (torch.zeros(1, 1, 128, width, device=device) for width in (512, 32))

    def step(latents: Tensor, rotary: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        latents.index_copy_(2, positions, x[..., :512]), rotary.index_copy_(2, positions, x[..., 512:])
        nope, value = F.linear(latents, weight / 23).unflatten(-1, (2, 64)).squeeze(1).transpose(1, 2).split(32, -1)
        return F.scaled_dot_product_attention(q, torch.cat([nope, rotary.expand(-1, 2, -1, -1)], -1), value)

    layouts = PackedLayout("fp8_ds_mla", "key", 512), PackedLayout("fp8_e4m3", "value", 32)
    packed = [PackedTensor.from_dense(x.clone(), layout) for x, layout in zip((latents, rotary), layouts, strict=True)]
    args = x, torch.arange(70, device=device)
    torch.testing.assert_close(compiled(step, policy)(latents, rotary, *args), step(*packed, *args))
    assert [latents.format_name, rotary.format_name] == ["fp8_ds_mla", "fp8_e4m3"]


def write(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Tensor:
    """Write latents and rotary channels of new tokens to caches; returns the query."""
    q, new, rotary = m.new(x)
    c.index_copy_(2, pos, new), r.index_copy_(2, pos, rotary)
    return q


def latents_summed_up(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Any:
    return m.attend(write(m, c, r, x, pos), c, r, None), c.sum()


def a_view_of_rotary_parts_escapes(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Any:
    q = write(m, c, r, x, pos)
    rotary = r.repeat(1, NUM_HEADS, 1, 1)
    key = torch.cat([both_parts(m, c)[0], rotary], -1)
    return F.scaled_dot_product_attention(q, key, both_parts(m, c)[1]), rotary


def latents_read_before_their_write(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Any:
    before = c.clone()
    return m.attend(write(m, c, r, x, pos), before + c, r, None)


def latents_written_after_they_are_read(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Any:
    out = m.attend(write(m, c, r, x, pos), c, r, None)
    c.index_copy_(2, pos + 1, m.new(x)[1])
    return out


def latents_updated_out_of_place(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Any:
    q, new, rotary = m.new(x)
    c = c.index_copy(2, pos, new)
    r.index_copy_(2, pos, rotary)
    return m.attend(q, c, r, None)


def latents_with_some_channels_written(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Any:
    q, new, rotary = m.new(x)
    c[:, :, :1, :16] = new[..., :1, :16]
    r.index_copy_(2, pos, rotary)
    return m.attend(q, c, r, None)


def latents_that_the_query_reads(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Any:
    q = write(m, c, r, x, pos)
    return m.attend(q * c.mean(), c, r, None)


def latents_that_are_scaled_and_not_projected(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Any:
    q = write(m, c, r, x, pos)
    key = torch.cat([c[..., :NOPE], r], -1)
    return F.scaled_dot_product_attention(q, key.expand(-1, NUM_HEADS, -1, -1), 2 * r.expand(-1, NUM_HEADS, -1, -1))


def vectors_of_two_heads(m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor) -> Any:
    q, new, rotary = m.new(x)
    c.view(1, BATCH, MAX_LEN, -1).index_copy_(2, pos, new.view(1, BATCH, 1, -1))
    r.index_copy_(2, pos, rotary)
    return m.attend(q, c, r, None)


def a_feature_map_that_attention_is_computed_from(
    m: LatentAttention, c: Tensor, r: Tensor, x: Tensor, pos: Tensor
) -> Any:
    _, features, rotary = m.new(x.expand(-1, 4, -1))
    q = m.query(F.pad(features[:, 0], (0, WIDTH - RANK))).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
    return m.attend(q, features, rotary, None), features


REFUSED: dict[Callable[..., Any], str] = {
    latents_summed_up: "used_elsewhere",
    a_view_of_rotary_parts_escapes: "escaping_view",
    latents_read_before_their_write: "used_elsewhere",
    latents_written_after_they_are_read: "written_after_read",
    latents_updated_out_of_place: "not_written_back",
    latents_with_some_channels_written: "unknown_write",
    latents_that_the_query_reads: "used_elsewhere",
    latents_that_are_scaled_and_not_projected: "computed_from_cache",
    vectors_of_two_heads: "computed_from_cache",
    a_feature_map_that_attention_is_computed_from: "used_elsewhere",
}


@interpreted
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_graphs_that_only_resemble_latents_are_refused_with_a_reason(fn: Callable[..., Any]) -> None:
    module = attention()
    x, pos = torch.randn(BATCH, 1, WIDTH), torch.tensor([5])
    caches = [torch.randn(BATCH, 1, MAX_LEN, width) for width in (RANK, ROPE)]
    expected_caches = copy.deepcopy(caches)
    with torch.no_grad():
        out = compiled(fn, on_unsupported="ignore")(module, *caches, x, pos)
        expected = fn(module, *expected_caches, x, pos)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(caches, expected_caches, rtol=0, atol=0)
    assert {type(cache) for cache in caches} == {Tensor}
    assert [site.reason_code for site in last_report().sites] == [REFUSED[fn]]


def step_of_latents(width: int) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]:
    """A step whose latents have ``width`` channels, an empty cache of them, and positions."""
    weight = torch.randn(64, width) / width**0.5
    q, x = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, width)

    def step(latents: Tensor, positions: Tensor) -> Tensor:
        latents.index_copy_(2, positions, x)
        return F.scaled_dot_product_attention(q, *F.linear(latents, weight).split(32, -1))

    return step, torch.zeros(1, 1, 64, width), torch.tensor([5])


@interpreted
def test_latents_too_wide_for_a_format_are_skipped_and_the_reason_says_how_wide() -> None:
    step, latents, positions = step_of_latents(528)
    compiled(step, on_unsupported="ignore")(latents, positions)
    (site,) = last_report().sites
    assert site.reason_code == "unsupported_format"
    assert "head_dim 528" in str(site.reason)


@interpreted
def test_latents_of_512_channels_are_packed_on_a_cpu() -> None:
    step, latents, positions = step_of_latents(512)
    packed = PackedTensor.from_dense(latents.clone(), PackedLayout("int8_per_token_head", "key", 512))
    torch.testing.assert_close(compiled(step)(latents, positions), step(packed, positions))
    assert isinstance(latents, PackedTensor)
    assert torch.equal(latents.dequantize(), packed.dequantize())
