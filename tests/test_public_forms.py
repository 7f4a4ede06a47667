"""Attention as public code bases write it, each with its own way to keep a cache: packed, it means what it says.

The layers have the tensor operations of their models and nothing else of them. Graphs run node by node.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvcompile
from kvcompile.packed_stack import PackedStack
from kvcompile.packed_subclass import PackedSubclass
from kvcompile.packed_tensor import PackedTensor

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 2, 4, 2, 64, 140
CHUNKS = (70, 5, 1, 1)
POLICIES = ["int8_per_token_head", "turboquant_4bit_nc"]

Caches = dict[str, Tensor]
Layer = Callable[[Tensor, Tensor, Tensor, Caches, int], Tensor]
"""Attention of new tokens, queries [batch, n, num_heads, head_dim], at a first position; it writes its caches."""

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def causal(n: int, kv_len: int, start: int) -> Tensor:
    return torch.arange(kv_len) <= torch.arange(start, start + n)[:, None]


def packed_copy(plain: Tensor, like: Tensor) -> Tensor:
    """What ``plain`` is in the format of ``like``."""
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
) -> kvcompile.report.Report:
    """Run a compiled layer beside eager code on packed caches: outputs and caches are the same after every chunk."""
    run = torch.compile(layer, backend="kvquant", options={"policy": policy, "on_unsupported": "error"})
    expected: Caches = {}
    start = 0
    with kvcompile.collect_reports() as report:
        for n in chunks:
            q, k, v = (torch.randn(BATCH, n, heads, HEAD_DIM) for heads in (NUM_HEADS, num_kv_heads, num_kv_heads))
            before = copy.deepcopy(caches)
            out = run(q, k, v, caches, start)
            expected = expected or {name: packed_copy(x, caches[name]) for name, x in before.items()}
            if before:  # otherwise the layer has made its caches of rows that are not quantized yet
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
    """[B, S, H, D] with every head as often as there are queries for it."""
    return x[:, :, :, None].expand(-1, -1, -1, NUM_HEADS // NUM_KV_HEADS, -1).flatten(2, 3)


def by_products(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Written out, of tensors [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * HEAD_DIM**-0.5
    weights = F.softmax(scores.masked_fill(~visible, -torch.inf).float(), -1).type_as(q)
    return torch.matmul(weights, v).transpose(1, 2)


def llama(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """Meta's reference brings its caches to the device and dtype of its activations at every step."""
    end = start + q.shape[1]
    for name, x in (("keys", k), ("values", v)):
        caches[name] = caches[name].to(x)
        caches[name][:BATCH, start:end] = x
    keys, values = (repeat_kv(caches[name][:BATCH, :end]) for name in ("keys", "values"))
    return by_products(q, keys, values, causal(q.shape[1], end, start))


def tinygrad(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """Keys and values in one tensor, returned as above."""
    end = start + q.shape[1]
    caches["kv"] = caches["kv"].to(k)
    caches["kv"][:, :, start:end] = torch.stack([k, v])
    keys, values = (repeat_kv(caches["kv"][role, :, :end]) for role in (0, 1))
    return by_products(q, keys, values, causal(q.shape[1], end, start))


def mistral(q: Tensor, k: Tensor, v: Tensor, caches: Caches, start: int) -> Tensor:
    """A rotating buffer, written by an index that is repeated for all heads and channels."""
    positions = torch.arange(start, start + q.shape[1])
    slots = (positions % MAX_LEN)[None, :, None, None].repeat(BATCH, 1, NUM_KV_HEADS, HEAD_DIM)
    caches["keys"].scatter_(1, slots, k)
    caches["values"].scatter_(1, slots, v)
    return by_products(q, repeat_kv(caches["keys"]), repeat_kv(caches["values"]), causal(q.shape[1], MAX_LEN, start))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", [llama, mistral])
def test_a_cache_of_its_own_tensors_is_packed(layer: Layer, policy: str) -> None:
    caches = sequences_first("keys", "values")
    check_layer(layer, caches, policy)
    assert all(isinstance(cache, PackedTensor) for cache in caches.values())


def test_a_cache_of_keys_and_values_may_be_returned_as_it_is() -> None:
    caches = {"kv": torch.zeros(2, BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM)}
    check_layer(tinygrad, caches, POLICIES[0])
    assert isinstance(caches["kv"], PackedStack)


def test_what_packed_caches_do_in_eager_code_is_not_compiled() -> None:
    def step(cache: Tensor, stack: Tensor) -> Tensor:
        total = torch.zeros(())
        for role in range(2):
            torch._dynamo.graph_break()  # in a loop: Dynamo leaves this function, and looks into those that it calls
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
