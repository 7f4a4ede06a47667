"""Attention as public code bases write it, each with its own kind of cache, is packed and keeps its meaning.

The layers have only the tensor operations of their models. Graphs run node by node.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import kvcompile
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 2, 4, 2, 64, 140
CHUNKS = (70, 1)
POLICIES = ["int8_per_token_head", "turboquant_4bit_nc"]

Caches = dict[str, Tensor]
Layer = Callable[[Tensor, Tensor, Tensor, Caches, int], Tensor]
"""Takes queries, keys and values [batch, n, heads, head_dim], caches and a first position; writes and attends."""

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def causal(n: int, kv_len: int, start: int) -> Tensor:
    return torch.arange(kv_len) <= torch.arange(start, start + n)[:, None]


def packed_copy(plain: Tensor, like: Tensor) -> Tensor:
    """``plain`` in the format of ``like``."""
    if isinstance(like, PackedTensor):
        return PackedTensor.from_dense(plain, like.packed_layout, like.axes, growing=like.growing)
    if isinstance(like, PackedStack):
        parts = {place: (part.packed_layout, part.axes) for place, part in like.items()}  # type: ignore[attr-defined]
        return PackedStack.from_dense(plain, parts, like.stacked_dims)
    return plain.clone()


def dense(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, PackedSubclass) else x


def check_layer(
    layer: Layer, caches: Caches, policy: str, num_kv_heads: int = NUM_KV_HEADS, chunks: Sequence[int] = CHUNKS
) -> kvcompile.report.report.Report:
    """Run a compiled layer beside eager code on packed caches, and compare outputs and caches after every chunk."""
    run = torch.compile(layer, backend="kvquant", options={"policy": reading_packed(policy), "on_unsupported": "error"})
    expected: Caches = {}
    start = 0
    with kvcompile.collect_reports() as report:
        for n in chunks:
            q, k, v = (torch.randn(BATCH, n, heads, HEAD_DIM) for heads in (NUM_HEADS, num_kv_heads, num_kv_heads))
            before = copy.deepcopy(caches)
            out = run(q, k, v, caches, start)
            expected = expected or {name: packed_copy(x, caches[name]) for name, x in before.items()}
            if before:  # a call that makes its caches reads its rows in full precision
                torch.testing.assert_close(out, layer(q, k, v, expected, start), rtol=1e-3, atol=1e-3)
            else:
                expected = copy.deepcopy(caches)
            for name, cache in caches.items():
                torch.testing.assert_close(dense(cache), dense(expected[name]), rtol=0, atol=1e-5)
            start += n
    assert report.sites
    return report


def sequences_first(*names: str, num_heads: int = NUM_KV_HEADS) -> Caches:
    return {name: torch.zeros(BATCH, MAX_LEN, num_heads, HEAD_DIM) for name in names}


def repeat_kv(x: Tensor) -> Tensor:
    """[B, S, H, D] with every KV head repeated for its query heads."""
    return x[:, :, :, None].expand(-1, -1, -1, NUM_HEADS // NUM_KV_HEADS, -1).flatten(2, 3)


def by_products(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Written-out attention of tensors [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * HEAD_DIM**-0.5
    weights = F.softmax(scores.masked_fill(~visible, -torch.inf).float(), -1).type_as(q)
    return torch.matmul(weights, v).transpose(1, 2)


def llama(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """Meta's reference, which casts its caches to the device and dtype of its activations in every step."""
    end = start + q.shape[1]
    for name, x in (("keys", k), ("values", v)):
        caches[name] = caches[name].to(x)
        caches[name][:BATCH, start:end] = x
    keys, values = (repeat_kv(caches[name][:BATCH, :end]) for name in ("keys", "values"))
    return by_products(q, keys, values, causal(q.shape[1], end, start))


def tinygrad(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """Keys and values in one tensor, which the layer returns."""
    end = start + q.shape[1]
    caches["kv"] = caches["kv"].to(k)
    caches["kv"][:, :, start:end] = torch.stack([k, v])
    keys, values = (repeat_kv(caches["kv"][role, :, :end]) for role in (0, 1))
    return by_products(q, keys, values, causal(q.shape[1], end, start))


def mistral(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """A ring buffer, written by an index that is repeated for all heads and channels."""
    positions = torch.arange(start, start + q.shape[1])
    slots = (positions % MAX_LEN)[None, :, None, None].repeat(BATCH, 1, NUM_KV_HEADS, HEAD_DIM)
    caches["keys"].scatter_(1, slots, k)
    caches["values"].scatter_(1, slots, v)
    return by_products(q, repeat_kv(caches["keys"]), repeat_kv(caches["values"]), causal(q.shape[1], MAX_LEN, start))


def one_head_for_all(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """Multi-query attention without a dimension of heads, [B, S, D]."""
    positions = torch.arange(start, start + q.shape[1])
    caches["keys"].index_copy_(1, positions, k[:, :, 0])
    caches["values"].index_copy_(1, positions, v[:, :, 0])
    scores = torch.einsum("bnhd,bsd->bhns", q, caches["keys"]) * HEAD_DIM**-0.5
    weights = scores.masked_fill(~causal(q.shape[1], MAX_LEN, start), -torch.inf).softmax(-1)
    return torch.einsum("bhns,bsd->bnhd", weights, caches["values"])


def one_growing_head(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """Multi-query attention whose keys and values grow by concatenation."""
    for name, x in (("keys", k[:, :, 0] + 1), ("values", v[:, :, 0] + 1)):
        caches[name] = torch.cat([caches[name], x], 1) if caches.get(name) is not None else x
    keys, values = caches["keys"].unsqueeze(1), caches["values"].unsqueeze(1)
    visible = causal(q.shape[1], keys.shape[2], start)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, visible, enable_gqa=True)
    return out.transpose(1, 2)


def deepseek(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """DeepSeek's reference in absorbed form: queries and outputs are projected to the latents, which all heads share.

    The rotary part of the scores comes from a separate small cache, which stays plain.
    """
    end = start + q.shape[1]
    caches["latents"][:BATCH, start:end] = k[:, :, 0]
    caches["rotary"][:BATCH, start:end] = v[:, :, 0, :16]
    scores = torch.einsum("bshc,btc->bsht", q, caches["latents"][:BATCH, :end])
    scores = scores + torch.einsum("bshr,btr->bsht", q[..., :16], caches["rotary"][:BATCH, :end])
    scores = (scores * HEAD_DIM**-0.5).masked_fill(~causal(q.shape[1], end, start)[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bsht,btc->bshc", weights, caches["latents"][:BATCH, :end])


def torch_multi_head(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """[S, B * H, D], as in ``nn.MultiheadAttention``: sequences and heads form one batch of matrices."""
    n = q.shape[1]
    q, k, v = (x.transpose(0, 1).reshape(n, -1, HEAD_DIM) + 1 for x in (q, k, v))
    for name, x in (("keys", k), ("values", v)):
        caches[name] = torch.cat([caches[name], x]) if caches.get(name) is not None else x
    scores = torch.bmm(q.transpose(0, 1) * HEAD_DIM**-0.5, caches["keys"].permute(1, 2, 0))
    weights = scores.masked_fill(~causal(n, len(caches["keys"]), start), -torch.inf).softmax(-1)
    out = torch.bmm(weights, caches["values"].transpose(0, 1)).transpose(0, 1)
    return out.reshape(n, BATCH, NUM_HEADS, HEAD_DIM).transpose(0, 1)


def merged_heads(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """[B * H, S, D], as in sequence-to-sequence toolkits: each head of each sequence is an entry of the batch."""
    n = q.shape[1]
    q, k, v = (x.transpose(1, 2).reshape(-1, n, HEAD_DIM) + 1 for x in (q, k, v))
    for name, x in (("keys", k), ("values", v)):
        caches[name] = torch.cat([caches[name], x], 1) if caches.get(name) is not None else x
    kv_len = caches["keys"].shape[1]
    scores = torch.baddbmm(torch.zeros(()), q, caches["keys"].mT, beta=0, alpha=HEAD_DIM**-0.5)
    scores = scores.view(BATCH, NUM_HEADS, n, kv_len).masked_fill(~causal(n, kv_len, start), -torch.inf)
    out = torch.bmm(scores.softmax(-1).view(-1, n, kv_len), caches["values"])
    return out.view(BATCH, NUM_HEADS, n, HEAD_DIM).transpose(1, 2)


def falcon(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """[B * num_kv_heads, S, D] of fixed size, which attention views as [B, num_kv_heads, S, D]."""
    n = q.shape[1]
    for name, x in (("keys", k), ("values", v)):
        caches[name][:, start : start + n] = x.transpose(1, 2).reshape(-1, n, HEAD_DIM)
    keys, values = (caches[name].view(-1, NUM_KV_HEADS, MAX_LEN, HEAD_DIM) for name in ("keys", "values"))
    visible = causal(n, MAX_LEN, start)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, visible, enable_gqa=True)
    return out.transpose(1, 2)


def one_sequence(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """[S, H, D], as in a program for one sequence; here for the first sequence."""
    end = start + q.shape[1]
    caches["keys"][start:end], caches["values"][start:end] = k[0], v[0]
    keys, values = (caches[name][None, :end] for name in ("keys", "values"))
    return by_products(q[:1], repeat_kv(keys), repeat_kv(values), causal(q.shape[1], end, start))


@pytest.mark.parametrize(("layer", "policy"), [(llama, POLICIES[0]), (mistral, POLICIES[1])])
def test_a_cache_in_separate_tensors_is_packed(layer: Layer, policy: str) -> None:
    caches = sequences_first("keys", "values")
    check_layer(layer, caches, policy)
    assert all(isinstance(cache, PackedTensor) for cache in caches.values())


def test_a_cache_of_keys_and_values_may_be_returned_whole() -> None:
    caches = {"kv": torch.zeros(2, BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM)}
    check_layer(tinygrad, caches, POLICIES[0])
    assert isinstance(caches["kv"], PackedStack)


def test_operations_of_packed_caches_in_eager_code_are_not_compiled() -> None:
    def step(cache: Tensor, stack: Tensor) -> Tensor:
        total = torch.zeros(())
        for role in range(2):
            torch._dynamo.graph_break()  # in a loop: Dynamo compiles only the functions that this one calls
            total += cache[:, 0].sum() + stack[role, :, 1].sum()
        return total

    caches = sequences_first("keys", "values")
    stack = {"kv": torch.zeros(2, BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM)}
    check_layer(llama, caches, POLICIES[0], chunks=(3,))
    check_layer(tinygrad, stack, POLICIES[0], chunks=(3,))
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(step, backend=lambda gm, inputs: graphs.append(gm) or gm.forward)
    torch.testing.assert_close(compiled(caches["keys"], stack["kv"]), step(caches["keys"], stack["kv"]))
    assert not graphs


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layer", "shape", "num_kv_heads", "policy"),
    [
        (one_head_for_all, (BATCH, MAX_LEN, HEAD_DIM), 1, "int4"),
        (one_growing_head, None, 1, "int8_per_token_head"),
        (torch_multi_head, None, NUM_HEADS, "turboquant_4bit_nc"),
        (merged_heads, None, NUM_HEADS, "int4"),
        (falcon, (BATCH * NUM_KV_HEADS, MAX_LEN, HEAD_DIM), NUM_KV_HEADS, "turboquant_4bit_nc"),
        (one_sequence, (MAX_LEN, NUM_KV_HEADS, HEAD_DIM), NUM_KV_HEADS, "int8_per_token_head"),
    ],
)
def test_a_cache_of_three_dimensions_has_one_head_or_one_sequence(
    layer: Layer, shape: tuple[int, ...] | None, num_kv_heads: int, policy: str
) -> None:
    caches = {name: torch.zeros(shape) for name in ("keys", "values")} if shape else {}
    report = check_layer(layer, caches, policy, num_kv_heads)
    for cache in caches.values():
        assert isinstance(cache, PackedTensor)
        assert cache.dim() == 3
    assert {cache.shape[-1] for site in report.sites for cache in site.caches} == {HEAD_DIM}


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.view(NUM_KV_HEADS, BATCH, MAX_LEN, HEAD_DIM).transpose(0, 1),  # heads before sequences
        lambda x: x.view(BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM)[:, 1:].expand(-1, NUM_KV_HEADS, -1, -1),
        lambda x: x.view(BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM)[1:].expand(BATCH, -1, -1, -1),
        lambda x: x.view(-1, MAX_LEN // 2, 2, HEAD_DIM).transpose(1, 2)[:BATCH],  # tokens in two groups
    ],
)
def test_parts_of_a_dimension_other_than_all_sequences_and_heads_are_refused(
    read: Callable[[Tensor], Tensor],
) -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys[:, 3:4], values[:, 3:4] = k, k
        return F.scaled_dot_product_attention(q, read(keys), read(values), enable_gqa=True)

    q, k = torch.randn(BATCH, NUM_HEADS, 1, HEAD_DIM), torch.randn(BATCH * NUM_KV_HEADS, 1, HEAD_DIM)
    caches = [torch.randn(BATCH * NUM_KV_HEADS, MAX_LEN, HEAD_DIM) for _ in range(2)]
    expected = step(q, k, *(x.clone() for x in caches))
    out = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})(q, k, *caches)
    torch.testing.assert_close(out, expected)
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == "unknown_read"


def channels_before_heads(k: Tensor, keys: Tensor) -> Tensor:
    keys = keys.view(BATCH, MAX_LEN, -1)
    keys[:, 3:4] = k.transpose(2, 3).flatten(2)
    return keys.view(BATCH, MAX_LEN, HEAD_DIM, NUM_KV_HEADS).permute(0, 3, 1, 2)


def tokens_last(k: Tensor, keys: Tensor) -> Tensor:
    keys = keys.view(BATCH, HEAD_DIM, NUM_KV_HEADS, MAX_LEN)
    keys[..., 3:4] = k.permute(0, 3, 2, 1)
    return keys.permute(0, 2, 3, 1)


def flattened(k: Tensor, keys: Tensor) -> Tensor:
    keys.view(-1, NUM_KV_HEADS, HEAD_DIM).index_copy_(0, torch.arange(BATCH) * MAX_LEN, k[:, 0])
    return keys.view(BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2)


def added(k: Tensor, keys: Tensor) -> Tensor:
    keys = keys.view(BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM)
    keys.add_(k * F.one_hot(torch.tensor(3), MAX_LEN)[:, None, None])  # as in T5X
    return keys.transpose(1, 2)


@pytest.mark.parametrize(
    ("write", "shape", "code", "detail"),
    [
        (channels_before_heads, (BATCH, MAX_LEN, -1), "channels_not_last", "its last dimension holds several heads"),
        (tokens_last, (BATCH, HEAD_DIM, NUM_KV_HEADS, MAX_LEN), "channels_not_last", "its last dimension holds tokens"),
        (flattened, (BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM), "unknown_write", "a view of the cache with 3 dimensions"),
        (added, (BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM), "unknown_write", "replaces the whole cache"),
    ],
)
def test_a_cache_that_cannot_be_packed_is_refused_with_a_reason(
    write: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], code: str, detail: str
) -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, write(k, keys), write(k, values), enable_gqa=True)

    q, k = torch.randn(BATCH, NUM_HEADS, 1, HEAD_DIM), torch.randn(BATCH, 1, NUM_KV_HEADS, HEAD_DIM)
    caches = [torch.randn(BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM).view(shape).clone() for _ in range(2)]
    expected = step(q, k, *(x.clone() for x in caches))
    out = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})(q, k, *caches)
    torch.testing.assert_close(out, expected)
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == code
    assert detail in str(site.reason)


@pytest.mark.parametrize("computed", [False, True])
def test_a_copy_over_the_whole_cache_is_refused_with_a_reason(computed: bool) -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys.copy_(k * 2 if computed else k)
        values.copy_(keys)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    q, k = torch.randn(BATCH, NUM_HEADS, 1, HEAD_DIM), torch.randn(BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM)
    expected = step(q, k, k.clone(), k.clone())
    caches = [torch.zeros_like(k) for _ in range(2)]
    out = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})(q, k, *caches)
    torch.testing.assert_close(out, expected)
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == "overwritten"
    source = "the result of aten.mul (" if computed else "k, and"
    assert f"its key cache keys is overwritten as a whole with {source}" in str(site.reason)
    assert "cache.index_copy_(dim, torch.arange(num_tokens), new)" in str(site.remedy)


def test_attention_on_shared_latents_is_packed() -> None:
    caches = {"latents": torch.zeros(BATCH, MAX_LEN, HEAD_DIM), "rotary": torch.zeros(BATCH, MAX_LEN, 16)}
    check_layer(deepseek, caches, POLICIES[0], num_kv_heads=1)
    assert isinstance(caches["latents"], PackedTensor)
    assert type(caches["rotary"]) is Tensor


def test_plain_caches_of_three_dimensions_are_not_changed() -> None:
    def step(
        q: Tensor, k: Tensor, kept: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([kept[0], k], 1), torch.cat([kept[1], k], 1)
        scores = torch.einsum("bnhd,bsd->bhns", q, keys).softmax(-1)
        out = torch.einsum("bhns,bsd->bnhd", scores, values * 2)  # values are new
        for cache in caches:
            cache[:, :1] = k
        return F.scaled_dot_product_attention(out, *(x[:, None] for x in caches), enable_gqa=True), keys, values

    compiled = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})
    q, k = torch.randn(BATCH, NUM_HEADS, 3, HEAD_DIM), torch.randn(BATCH, 1, HEAD_DIM)
    kept = torch.randn(BATCH, 5, HEAD_DIM), torch.randn(BATCH, 5, HEAD_DIM)
    caches = torch.randn(BATCH, 9, HEAD_DIM), torch.randn(BATCH, 9, HEAD_DIM)
    expected = step(q.transpose(1, 2), k, kept, tuple(x.clone() for x in caches))
    out, keys, values = compiled(q.transpose(1, 2), k, kept, caches)
    assert sorted(site.reason_code or "" for site in kvcompile.last_report().sites) == ["", "computed_from_cache"]
    assert all(isinstance(cache, PackedTensor) for cache in caches)
    torch.testing.assert_close(out, expected[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close((keys, values), expected[1:])


def test_a_returned_cache_is_the_callers_beside_weights_of_a_tensor_subclass() -> None:
    weight = TwoTensor(torch.eye(HEAD_DIM), torch.eye(HEAD_DIM))

    def step(q: Tensor, k: Tensor, v: Tensor, caches: Caches, weight: Tensor) -> Tensor:
        return llama(q @ weight, k, v, caches, 3)

    caches = sequences_first("keys", "values")
    run = torch.compile(step, backend="kvquant", options={"on_unsupported": "error"})
    for _ in range(2):
        q, k, v = (torch.randn(BATCH, 1, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
        assert isinstance(run(q, k, v, caches, weight), TwoTensor)
        for cache, x in zip(caches.values(), (k, v), strict=True):
            assert isinstance(cache, PackedTensor)
            torch.testing.assert_close(cache.dequantize()[:, 3:4], x, rtol=0, atol=0.05)
