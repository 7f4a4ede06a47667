"""Paged caches: pools of slots that sequences share, written by a slot mapping and read by a block table."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paged_steps import (
    BLOCK_SIZE,
    FORMS,
    HEAD_DIM,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    POLICY,
    Step,
    assert_close,
    assignment_and_index_select,
    attend,
    blocks_and_offsets,
    blocks_of_which_the_first_tokens_are_read,
    blocks_viewed_as_slots,
    compiled,
    heads_before_tokens,
    index_copy_and_index,
    inputs,
    packed_pool,
    plain_pools,
    reference_pools,
    slots_of,
)
from shared_fixtures import WITHOUT_VECTORS
from torch import Tensor, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Graph

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedStack
from kvcompile.policy.policy import Policy

pytestmark = pytest.mark.usefixtures("seed_without_grad")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: fn.__name__)
@pytest.mark.usefixtures("operators_traced")
def test_every_form_is_packed_and_equals_eager_code_on_packed_pools(fn: Step, rewritten_graphs: list[Graph]) -> None:
    pools = plain_pools(fn)
    reference = reference_pools(pools)
    storage = pools[0].untyped_storage()._weak_ref()
    new, places = inputs(2, 3)
    assert_close(compiled(fn)(*new, *pools, *places), fn(*new, *reference, *places))
    for pool, expected in zip(pools, reference, strict=True):
        assert type(pool) is type(expected)
        assert torch.equal(pool.dequantize(), expected.dequantize())
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    (site,) = kvcompile.last_report().sites
    assert [(cache.kind, cache.write_form) for cache in site.caches] == [("static", "index_put")] * 2
    (graph,) = rewritten_graphs
    floats = [value for node in graph.nodes if _is_float(value := node.meta.get("val"))]
    assert max(value.numel() for value in floats) < pools[0].numel()  # no pool is dequantized
    assert not [node for node in graph.nodes if str(node.target).startswith("kvcompile")]
    stores = graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)
    assert [tuple(node.meta["val"].shape[1:3]) for node in stores] == [(1, NUM_KV_HEADS)] * 2


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pools_may_arrive_packed_and_all_sizes_may_be_symbols(traced: bool, request: pytest.FixtureRequest) -> None:
    if traced:
        request.getfixturevalue("operators_traced")
    request.getfixturevalue("without_code_generation")

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *places: Tensor) -> Tensor:
        slots, table, mask = places
        keys[slots] = k
        values[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = v
        read = slots_of(table)
        k = keys.index_select(0, read.flatten()).view(*read.shape, -1, HEAD_DIM)
        return attend(q, k.transpose(1, 2), values[table].transpose(1, 2).flatten(2, 3), mask)

    pools = reference_pools((plain_pools(index_copy_and_index)[0], plain_pools(heads_before_tokens)[1]))
    reference = copy.deepcopy(pools)
    run = compiled(step, dynamic=True)
    for q_len, num_blocks in ((3, 5), (5, 7)):
        new, places = inputs(q_len, num_blocks)
        assert_close(run(*new, *pools, *places), step(*new, *reference, *places))
    for pool, expected in zip(pools, reference, strict=True):
        assert torch.equal(pool.dequantize(), expected.dequantize())


@pytest.mark.usefixtures("without_code_generation")
def test_the_size_of_a_block_may_be_the_size_of_a_later_input() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *places: Tensor) -> Tensor:
        *places, half = places
        torch._check(keys.shape[1] == 2 * half.shape[0])
        torch._check(values.shape[1] == 2 * half.shape[0])
        return blocks_and_offsets(q, k, v, keys, values, *places) + half.sum()

    pools = plain_pools(blocks_and_offsets)
    reference = reference_pools(pools)
    new, places = inputs(3, 5)
    half = torch.randn(BLOCK_SIZE // 2)
    out = compiled(step, dynamic=True)(*new, *pools, *places, half)
    assert_close(out, step(*new, *reference, *places, half))


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(("fn", "dim"), [(blocks_and_offsets, 0), (heads_before_tokens, 1)])
def test_one_tensor_may_hold_the_pools_of_keys_and_values(fn: Step, dim: int) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, *places: Tensor) -> Tensor:
        return fn(q, k, v, kv.select(dim, 0), kv.select(dim, 1), *places)

    kv = torch.stack(plain_pools(fn), dim)
    axes = "nhtd" if fn is heads_before_tokens else "nthd"
    layouts = {(at,): (PackedLayout(POLICY, role, HEAD_DIM), axes) for at, role in enumerate(("key", "value"))}
    reference = PackedStack.from_dense(kv, layouts, (dim,))
    run = compiled(step)
    for _ in range(2):
        new, places = inputs(1, 3)
        assert_close(run(*new, kv, *places), step(*new, reference, *places))
    assert isinstance(kv, PackedStack)
    assert [type(pool) for pool in kv.parts] == [PackedPool, PackedPool]
    assert torch.equal(kv.dequantize(), reference.dequantize())


@pytest.mark.usefixtures("without_code_generation")
def test_a_packed_pool_knows_that_heads_come_first_where_indices_name_whole_blocks() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        keys[table[:, 0]], values[table[:, 1]] = k, v
        return attend(q, *(x[table].transpose(1, 2).flatten(2, 3) for x in (keys, values)), mask)

    pools = reference_pools(plain_pools(heads_before_tokens))
    reference = copy.deepcopy(pools)
    (q, *_), (_, table, mask) = inputs(1, 3)
    k, v = torch.randn(2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.randn(BLOCK_SIZE, HEAD_DIM)  # v of all heads
    assert_close(compiled(step)(q, k, v, *pools, table, mask), step(q, k, v, *reference, table, mask))
    for pool, expected in zip(pools, reference, strict=True):
        assert torch.equal(pool.dequantize(), expected.dequantize())


@pytest.mark.usefixtures("without_code_generation")
def test_layers_may_read_one_pool_by_different_tables() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *places: Tensor) -> Tensor:
        slots, table, mask = places
        out = blocks_and_offsets(q, k, v, keys, values, slots, table, mask)
        other = slots_of(table.flip(1))
        read = (x.flatten(0, 1)[other].transpose(1, 2) for x in (keys, values))
        return attend(out, *read, mask.flip(3))

    pools = plain_pools(blocks_and_offsets)
    reference = reference_pools(pools)
    new, places = inputs(1, 3)
    assert_close(compiled(step)(*new, *pools, *places), step(*new, *reference, *places))


class PagedAttention(nn.Module):
    """A layer whose pools are buffers, as a hand-written model keeps them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *places: Tensor) -> Tensor:
        return blocks_and_offsets(q, k, v, self.keys, self.values, *places)


def test_generated_code_serves_layers_that_hold_their_pools() -> None:
    layers = nn.ModuleList([PagedAttention()])
    for layer in layers:
        layer.keys, layer.values = reference_pools((layer.keys, layer.values))
    expected = copy.deepcopy(layers)

    def step(layers: nn.ModuleList, q: Tensor, *rest: Tensor) -> Tensor:
        for layer in layers:
            q = q + layer(q, *rest)
        return q

    run = compiled(step, options=WITHOUT_VECTORS)
    for _ in range(2):
        new, places = inputs(1, 3)
        assert_close(run(layers, *new, *places), step(expected, *new, *places))
    for layer, other in zip(layers, expected, strict=True):
        assert torch.equal(layer.keys.dequantize(), other.keys.dequantize())
        assert torch.equal(layer.values.dequantize(), other.values.dequantize())
    plain = 2 * NUM_BLOCKS * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * 4
    assert kvcompile.cache_nbytes(layers) < 0.3 * plain


def test_operators_serve_gpus(rewritten_graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators run their specifications on a CPU."""
    monkeypatch.setattr("kvcompile.passes.rewrite.insert._uses_kernels", lambda data: True)
    fn = blocks_of_which_the_first_tokens_are_read
    pools = plain_pools(fn)
    reference = reference_pools(pools)
    new, places = inputs(1, 3)
    assert_close(compiled(fn)(*new, *pools, *places), fn(*new, *reference, *places))
    assert torch.equal(pools[0].dequantize(), reference[0].dequantize())
    (graph,) = rewritten_graphs
    gathers = graph.find_nodes(op="call_function", target=torch.ops.kvcompile.gather.default)
    assert len(gathers) == 2
    assert gathers[0].args[1] is gathers[1].args[1]  # slots are computed once for keys and values
    assert len(graph.find_nodes(op="call_function", target=torch.ops.kvcompile.attention.default)) == 1
    assert len(graph.find_nodes(op="call_function", target=auto_functionalized_v2)) == 1  # one store for both


def test_cuda_graphs_take_pools_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    call: dict[str, Any] = {}

    def compile_fx_inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        call.update(kwargs, references=[value for value in example_inputs if value.dtype == torch.uint8])
        raise InterruptedError

    monkeypatch.setattr("kvcompile.compilation.graph_compiler.compile_fx_inner", compile_fx_inner)
    monkeypatch.setattr("kvcompile.passes.rewrite.insert._uses_kernels", lambda data: True)
    monkeypatch.setattr("kvcompile.passes.calling.Rewritten.on_cuda", True)
    new, places = inputs(1, 3)
    step = compiled(blocks_and_offsets, options={"triton.cudagraphs": True})
    with pytest.raises(Exception, match="InterruptedError"):
        step(*new, *plain_pools(blocks_and_offsets), *places)
    assert call["cudagraphs"]
    assert [set(reference.stride()) for reference in call["references"]] == [{0}, {0}]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["", "cudagraphs"])
@pytest.mark.parametrize(
    ("fn", "policy"), [(assignment_and_index_select, POLICY), (blocks_and_offsets, "turboquant_4bit_nc")]
)
def test_kernels_serve_paged_caches_on_a_gpu(fn: Step, policy: str, options: dict[str, Any]) -> None:
    pools = plain_pools(fn, "cuda")
    format_names = Policy.load(policy).formats_for("", 0, 1)
    assert format_names is not None
    reference = [
        packed_pool(x.clone(), role, format_names.format_name(role))
        for x, role in zip(pools, ("key", "value"), strict=True)
    ]
    step = compiled(fn, policy, options=options)
    for _ in range(4):
        new, places = inputs(1, 5, "cuda")
        torch.compiler.cudagraph_mark_step_begin()
        out, expected = step(*new, *pools, *places).clone(), fn(*new, *reference, *places)
        assert (out - expected).norm() < 2e-3 * expected.norm()
    for pool, other in zip(pools, reference, strict=True):
        assert (pool.dequantize() - other.dequantize()).norm() < 1e-2 * other.dequantize().norm()


def out_of_range_slot(places: list[Tensor]) -> None:
    places[0][0] = NUM_BLOCKS * BLOCK_SIZE  # the last block of the packed data has room for it


def out_of_range_block(places: list[Tensor]) -> None:
    places[1][0, 0] = NUM_BLOCKS


def out_of_range_negative_block(places: list[Tensor]) -> None:
    places[1][0, 0] = -NUM_BLOCKS - 1


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", [index_copy_and_index, blocks_viewed_as_slots, blocks_and_offsets, heads_before_tokens])
def test_a_slot_outside_the_pool_is_an_error(fn: Step) -> None:
    pools, step = reference_pools(plain_pools(fn)), compiled(fn)
    new, places = inputs(1, 3)
    step(*new, *pools, *places)
    spoils = [out_of_range_slot, out_of_range_block]
    if FORMS[fn] != "slots":  # slots that are computed from a negative block may lie in the pool
        spoils.append(out_of_range_negative_block)
    for spoil in spoils:
        spoilt = [place.clone() for place in places]
        spoil(spoilt)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            step(*new, *pools, *spoilt)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", [index_copy_and_index, blocks_and_offsets])
def test_a_prompt_that_attends_to_itself_only_writes_to_packed_pools(fn: Step) -> None:
    def prefill(x: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        k, v = x * 2, x + 1
        place = (slots // BLOCK_SIZE, slots % BLOCK_SIZE) if FORMS[fn] == "blocks" else (slots,)
        keys.index_put_(place, k), values.index_put_(place, v)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(k, k, v, is_causal=True)

    pools = reference_pools(plain_pools(fn))
    expected_pools = copy.deepcopy(pools)
    (_, x, _), (slots, *_) = inputs(5, 3)
    assert_close(compiled(prefill)(x, *pools, slots), prefill(x, *expected_pools, slots))
    for pool, expected in zip(pools, expected_pools, strict=True):
        assert torch.equal(pool.dequantize(), expected.dequantize())
