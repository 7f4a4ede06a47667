"""Caches with more sequences than a step are packed: ``cache[:batch, :, positions] = k``, as in Meta's Llama."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import cases_by_device
from policies import reading_packed
from torch import Tensor

from kvcompile import last_report
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

MAX_BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 4, 4, 2, 64, 140
POLICIES = ["int8_per_token_head", "int4", "turboquant_4bit_nc"]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(
    step: Callable[..., Any], policy: str = POLICIES[0], dynamic: bool | None = None, **how: Any
) -> Callable[..., Any]:
    options = {"policy": reading_packed(policy), "on_unsupported": "error", **how}
    return torch.compile(step, backend="kvquant", options=options, dynamic=dynamic)


def packed_copy(cache: Tensor, role: str, policy: str, axes: str) -> PackedTensor:
    formats = Policy.load(policy).formats_for("", 0, 1)
    assert formats is not None
    return PackedTensor.from_dense(cache.clone(), formats.layout(role, HEAD_DIM, cache.dtype), axes)


def new_tokens(batch: int, n: int, device: str) -> list[Tensor]:
    """Query, keys and values of ``n`` tokens, [batch, n, heads, head_dim]."""
    return [torch.randn(batch, n, heads, HEAD_DIM, device=device) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def of_the_first(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    batch, n = k.shape[:2]
    keys[:batch, start : start + n], values[:batch, start : start + n] = k, v
    visible = torch.arange(start + n, device=q.device) <= torch.arange(start, start + n, device=q.device)[:, None]
    return attend(q, keys[:batch, : start + n], values[:batch, : start + n], visible)


def of_later_sequences(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    batch, n = k.shape[:2]
    positions = torch.arange(start, start + n, device=q.device)
    keys[1 : 1 + batch].index_copy_(1, positions, k)
    values[1 : 1 + batch].index_copy_(1, positions, v)
    visible = torch.arange(MAX_LEN, device=q.device) <= positions[:, None]
    return attend(q, keys[1 : 1 + batch], values[1 : 1 + batch], visible)


def of_one_and_heads_first(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    positions = torch.arange(start, start + k.shape[1], device=q.device)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    keys[-1:, :, positions], values[-1:, :, positions] = k.transpose(1, 2), v.transpose(1, 2)
    visible = torch.arange(MAX_LEN, device=q.device) <= positions[:, None]
    return attend(q, keys[-1:].transpose(1, 2), values[-1:].transpose(1, 2), visible)


def of_the_first_behind_tokens(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    batch, n = k.shape[:2]
    keys[start : start + n, :batch], values[start : start + n, :batch] = k.transpose(0, 1), v.transpose(0, 1)
    visible = torch.arange(MAX_LEN, device=q.device) <= torch.arange(start, start + n, device=q.device)[:, None]
    return attend(q, keys[:, :batch].transpose(0, 1), values[:, :batch].transpose(0, 1), visible)


def of_the_first_in_products(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """As in Meta's Llama. Products drop the dimension of one sequence, or of the first token."""
    batch, n = k.shape[:2]
    keys[:batch, start : start + n], values[:batch, start : start + n] = k, v
    read = (x[:batch, : start + n].repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 2) for x in (keys, values))
    q, k, v = (x.transpose(1, 2) for x in (q, *read))
    hidden = torch.full((n, n), float("-inf"), device=q.device).triu(1)
    mask = torch.hstack([torch.zeros(n, start, device=q.device), hidden])
    return ((q @ k.transpose(2, 3)) / HEAD_DIM**0.5 + mask).softmax(-1) @ v


STEPS = {of_the_first: (2, "bthd"), of_later_sequences: (2, "bthd"), of_one_and_heads_first: (1, "bthd")}
STEPS |= {of_the_first_behind_tokens: (3, "tbhd"), of_the_first_in_products: (1, "bthd")}


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("node_by_node_on_cpu")
@pytest.mark.parametrize(
    ("step", "policy", "device"),
    cases_by_device(
        on_gpu=itertools.product(STEPS, POLICIES),
        on_cpu=[
            (of_the_first, "turboquant_4bit_nc"),
            (of_later_sequences, "int4"),
            (of_one_and_heads_first, "int4"),
            (of_the_first_behind_tokens, "int8_per_token_head"),
            (of_the_first_in_products, "int8_per_token_head"),
        ],
        generated_on_cpu=[(of_later_sequences, "int4")],
    ),
)
def test_only_the_sequences_of_a_step_are_written_and_read(
    step: Callable[..., Tensor], policy: str, device: str
) -> None:
    batch, axes = STEPS[step]
    sizes = {"b": MAX_BATCH, "h": NUM_KV_HEADS, "t": MAX_LEN, "d": HEAD_DIM}
    caches = [torch.randn([sizes[axis] for axis in axes], device=device) for _ in range(2)]
    expected = [packed_copy(cache, role, policy, axes) for cache, role in zip(caches, ("key", "value"), strict=True)]
    run = compiled(step, policy)
    start = 0
    for n in (70, 1, 5) if step is of_the_first_behind_tokens else (70, 1):  # each length takes a graph
        new = new_tokens(batch, n, device)
        torch.testing.assert_close(run(*new, *caches, start), step(*new, *expected, start), rtol=1e-3, atol=1e-3)
        start += n
    for cache, other in zip(caches, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        torch.testing.assert_close(cache.dequantize(), other.dequantize(), rtol=0, atol=1e-5)
    assert all("of some sequences" in cache.write_form for cache in last_report().sites[0].caches)


@pytest.mark.usefixtures("without_code_generation")
def test_the_first_token_of_several_sequences_is_packed() -> None:
    caches = [torch.randn(MAX_BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]
    run, expected = compiled(of_the_first_in_products, "float32"), [cache.clone() for cache in caches]
    for start in range(3):
        new = new_tokens(2, 1, "cpu")
        torch.testing.assert_close(run(*new, *caches, start), of_the_first_in_products(*new, *expected, start))
    for cache, other in zip(caches, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.dequantize(), other)


@pytest.mark.parametrize("starts_packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_how_many_sequences_and_which_may_change_from_step_to_step(
    starts_packed: bool, request: pytest.FixtureRequest
) -> None:
    """One graph serves packed caches. Plain caches, a first sequence 0 and one token take separate graphs."""
    if not starts_packed:
        request.getfixturevalue("operators_traced")
    request.getfixturevalue("without_code_generation")

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, first: int, start: int) -> Tensor:
        batch, n = k.shape[:2]
        rows, places = slice(first, first + batch), slice(start, start + n)
        keys[rows, places], values[rows, places] = k, v
        visible = torch.arange(MAX_LEN) < start + n
        return attend(q, keys[rows], values[rows], visible.expand(n, -1))

    caches = [torch.randn(MAX_BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]
    expected = [
        packed_copy(cache, role, POLICIES[0], "bthd") for cache, role in zip(caches, ("key", "value"), strict=True)
    ]
    run = torch.compile(
        step, backend="kvquant", options={"policy": POLICIES[0], "on_unsupported": "error"}, dynamic=True
    )
    if starts_packed:
        caches = [cache.clone() for cache in expected]
    of_one_graph = (2, 2, 3, 9), (3, 1, 5, 62)
    for batch, first, n, start in of_one_graph if starts_packed else ((2, 0, 3, 0), (3, 1, 5, 62), (2, 2, 1, 7)):
        new = new_tokens(batch, n, "cpu")
        out = run(*new, *caches, first, start)
        torch.testing.assert_close(out, step(*new, *expected, first, start), rtol=1e-4, atol=1e-5)
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(cache.dequantize(), other.dequantize())


def other_sequences(cache: Tensor, x: Tensor) -> None:
    part = cache[:2].clone()
    part[:, 3:4] = x
    cache[1:3] = part


def whole_sequences(cache: Tensor, x: Tensor) -> None:
    cache[:2] = x.expand(-1, MAX_LEN, -1, -1)


def sequences_that_are_no_neighbours(cache: Tensor, x: Tensor) -> None:
    cache[:, 3:4][::2] = x


def moved_tokens(cache: Tensor, x: Tensor) -> None:
    cache[:2] = cache[:2].roll(-1, 1)
    cache[:2, -1:] = x


OTHER_WRITES = [other_sequences, whole_sequences, sequences_that_are_no_neighbours, moved_tokens]


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("write", OTHER_WRITES, ids=lambda write: write.__name__)
def test_sequences_that_are_not_written_by_tokens_are_refused(write: Callable[[Tensor, Tensor], None]) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        write(keys, k), write(values, v)
        return attend(q, keys[:2], values[:2], torch.ones(1, MAX_LEN, dtype=torch.bool))

    caches = [torch.randn(MAX_BATCH, MAX_LEN, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    new = new_tokens(2, 1, "cpu")
    out = compiled(step, on_unsupported="ignore")(*new, *caches)
    torch.testing.assert_close(out, step(*new, *expected))
    assert [type(cache) for cache in caches] == [Tensor, Tensor]
    torch.testing.assert_close(caches, expected, rtol=0, atol=0)
    assert last_report().sites[0].reason_code == "unknown_write"


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("dim", [0, 2])
def test_a_piece_of_a_split_of_sequences_or_tokens_serves_as_keys_and_values(dim: int) -> None:
    def step(q: Tensor, new: Tensor, cache: Tensor) -> Tensor:
        cache.index_copy_(2, torch.arange(5), new)
        first, second = cache.chunk(2, dim)
        keys = [first, second] if dim == 0 else [first]
        return torch.cat([F.scaled_dot_product_attention(q, x, x) for x in keys])

    cache = torch.randn(MAX_BATCH, NUM_HEADS, MAX_LEN, HEAD_DIM)
    expected = packed_copy(cache, "key", POLICIES[0], "bhtd")
    q = torch.randn(MAX_BATCH // 2 if dim == 0 else MAX_BATCH, NUM_HEADS, 1, HEAD_DIM)
    new = torch.randn(MAX_BATCH, NUM_HEADS, 5, HEAD_DIM)
    torch.testing.assert_close(compiled(step)(q, new, cache), step(q, new, expected), rtol=1e-3, atol=1e-3)
    assert isinstance(cache, PackedTensor)


Stacked = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes query, keys and values [batch, heads, n, head_dim], a stack of caches, and the positions of the new tokens."""


def attend_heads_first(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def roles_before_sequences(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, pos: Tensor) -> Tensor:
    keys, values = kv[:, : q.shape[0]]
    keys.index_copy_(2, pos, k)
    values[:, :, pos] = v
    return attend_heads_first(q, keys, values)


def roles_behind_sequences(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, pos: Tensor) -> Tensor:
    end = 1 + q.shape[0]
    kv[1:end, 0, :, 5 : 5 + k.shape[2]] = k
    kv[1:end, 1].index_copy_(2, pos, v)
    return attend_heads_first(q, kv[1:end, 0], kv[1:end, 1])


def all_layers(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, pos: Tensor) -> Tensor:
    """The write of a layer puts the sequences of all layers back, after attention has read the layers before."""
    some = kv[:, :, : q.shape[0]]
    for keys, values in zip(*some, strict=True):
        keys[:, :, pos], values[:, :, pos] = k, v
        q = q + attend_heads_first(q, keys, values)
    return q


def all_layers_at_once(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, pos: Tensor) -> Tensor:
    some = kv[:, :, : q.shape[0]]
    for layer in range(2):
        some[:, layer, :, :, pos] = torch.stack([k, v])
        q = q + attend_heads_first(q, *some[:, layer])
    return q


CACHE = (MAX_BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM)
STACKED: dict[Stacked, tuple[int, ...]] = {
    roles_before_sequences: (2, *CACHE),
    roles_behind_sequences: (MAX_BATCH, 2, *CACHE[1:]),
    all_layers: (2, 2, *CACHE),
    all_layers_at_once: (2, 2, *CACHE),
}


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("step", "shape"), STACKED.items(), ids=lambda given: getattr(given, "__name__", ""))
def test_some_sequences_of_a_stack_are_written_and_read(step: Stacked, shape: tuple[int, ...], dynamic: bool) -> None:
    kv, batch = torch.randn(shape), 2
    expected, pos = kv.clone(), torch.tensor([5, 6])
    q, k, v = (torch.randn(batch, heads, 2, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    with torch.no_grad():
        run = compiled(step, "float32", dynamic=dynamic)
        torch.testing.assert_close(run(q, k, v, kv, pos), step(q, k, v, expected, pos), rtol=1e-4, atol=1e-5)
    assert isinstance(kv, PackedStack)
    torch.testing.assert_close(kv.dequantize(), expected, rtol=0, atol=0)
