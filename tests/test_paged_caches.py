"""Paged caches: pools of slots that sequences share, written by a slot mapping and read by a block table."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed_caches import INT8, assert_same, quantized, values
from torch import Tensor, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

import kvcompile
import kvcompile.backend
from kvcompile.adoption import adopt
from kvcompile.kernels.layout import PackedLayout
from kvcompile.packed_pool import PackedPool
from kvcompile.packed_stack import PackedStack
from kvcompile.packed_tensor import PackedTensor
from kvcompile.policy import Policy

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 4, 2, 64, 16, 37
POLICY = "int8_per_token_head"

pytestmark = pytest.mark.usefixtures("seed_without_grad")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def slots_of(block_table: Tensor) -> Tensor:
    """[batch, tokens] from [batch, blocks]."""
    return (block_table[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=block_table.device)).flatten(1)


Step = Callable[..., Tensor]


def index_copy_and_index(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys.index_copy_(0, slots.flatten(), k.flatten(0, 1))
    values.index_copy_(0, slots.flatten(), v.flatten(0, 1))
    read = slots_of(table)
    return attend(q, keys[read].transpose(1, 2), values[read].transpose(1, 2), mask)


def assignment_and_index_select(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys[slots], values[slots] = k, v
    read = slots_of(table)
    gathered = (x.index_select(0, read.flatten()).view(*read.shape, -1, HEAD_DIM) for x in (keys, values))
    return attend(q, *(x.transpose(1, 2) for x in gathered), mask)


def repeated_heads_and_other_dtype(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys.index_put_((slots - keys.shape[0],), k), values.index_put_((slots,), v)
    read = slots_of(table)
    groups = q.shape[1] // keys.shape[1]
    k, v = (x[read].double().transpose(1, 2).repeat_interleave(groups, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask).to(q.dtype)


def written_out_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys[slots], values[slots] = k, v
    read = slots_of(table)
    groups = q.shape[1] // keys.shape[1]
    k, v = (x[read].repeat_interleave(groups, 2) for x in (keys, values))
    scores = torch.einsum("bhqd,bthd->bhqt", q, k) * HEAD_DIM**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhqt,bthd->bhqd", weights, v)


def all_sequences_as_one(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    """As continuous batching does it: queries of all sequences in a row, and a mask of one block a sequence."""
    keys[slots], values[slots] = k, v
    batch, num_heads, q_len, _ = q.shape
    read = slots_of(table).flatten()
    own = torch.eye(batch, dtype=torch.bool)[:, None, :, None]
    mask = (mask[:, 0, :, None] & own).reshape(batch * q_len, -1)
    gathered = (x.index_select(0, read).transpose(0, 1)[None] for x in (keys, values))
    out = attend(q.transpose(0, 1).reshape(1, num_heads, -1, HEAD_DIM), *gathered, mask)
    return out.view(num_heads, batch, q_len, HEAD_DIM).transpose(0, 1)


def blocks_viewed_as_slots(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys.view(-1, *keys.shape[2:]).index_copy_(0, slots.flatten(), k.flatten(0, 1))
    values.flatten(0, 1)[slots] = v
    k, v = (x[table].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    return attend(q, k, v, mask)


def blocks_and_offsets(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    keys[block, offset] = k
    values[block - values.shape[0], offset - BLOCK_SIZE] = v
    gathered = (x.index_select(0, table.flatten()).view(table.shape[0], -1, *x.shape[2:]) for x in (keys, values))
    return attend(q, *(x.transpose(1, 2) for x in gathered), mask)


def blocks_of_which_the_first_tokens_are_read(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Tensor:
    keys[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = k
    values[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = v
    read = 2 * BLOCK_SIZE + 5
    k, v = (x[table.int()].permute(0, 3, 1, 2, 4).flatten(2, 3)[:, :, :read] for x in (keys, values))
    return attend(q, k, v, mask[..., :read])


FORMS: dict[Step, bool] = {
    index_copy_and_index: False,
    assignment_and_index_select: False,
    repeated_heads_and_other_dtype: False,
    written_out_attention: False,
    all_sequences_as_one: False,
    blocks_viewed_as_slots: True,
    blocks_and_offsets: True,
    blocks_of_which_the_first_tokens_are_read: True,
}
"""Ways to write and read paged caches, and whether their pools are made of blocks."""


def plain_pools(fn: Step, device: str = "cpu") -> tuple[Tensor, Tensor]:
    shape = (NUM_BLOCKS, BLOCK_SIZE) if FORMS[fn] else (NUM_BLOCKS * BLOCK_SIZE,)
    return tuple(torch.randn(*shape, NUM_KV_HEADS, HEAD_DIM, device=device) for _ in range(2))


def packed_pool(x: Tensor, role: str, format_name: str = POLICY) -> PackedPool | PackedTensor:
    layout = PackedLayout(format_name, role, x.shape[-1])
    return PackedPool.from_dense(x, layout) if x.dim() == 4 else PackedTensor.from_dense(x, layout, 0)


def reference_pools(pools: tuple[Tensor, Tensor], format_name: str = POLICY) -> list[Any]:
    return [packed_pool(x.clone(), role, format_name) for x, role in zip(pools, ("key", "value"), strict=True)]


def inputs(q_len: int, num_blocks: int, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """Query, keys and values of new tokens; slot mapping, block table and mask. Behind its tokens a sequence has block
    0, which others use, as padding."""
    q = torch.randn(BATCH, NUM_HEADS, q_len, HEAD_DIM)
    k, v = torch.randn(2, BATCH, q_len, NUM_KV_HEADS, HEAD_DIM).unbind()
    table = 1 + torch.randperm(NUM_BLOCKS - 1)[: BATCH * num_blocks].view(BATCH, num_blocks)
    first = torch.tensor([[BLOCK_SIZE + 3], [num_blocks * BLOCK_SIZE - q_len - 2]])
    positions = first + torch.arange(q_len)
    slots = table.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    table[0, 1 + (BLOCK_SIZE + 3 + q_len) // BLOCK_SIZE :] = 0
    mask = (torch.arange(num_blocks * BLOCK_SIZE) <= positions[:, :, None])[:, None]
    return [x.to(device) for x in (q, k, v)], [x.to(device) for x in (slots, table, mask)]


def compiled(
    fn: Step, policy: Any = POLICY, on_unsupported: str = "error", options: dict[str, Any] | None = None, **kwargs: Any
) -> Step:
    torch._dynamo.reset()
    options = {"policy": policy, "on_unsupported": on_unsupported, **(options or {})}
    return torch.compile(fn, backend="kvquant", fullgraph=True, options=options, **kwargs)


def assert_close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def rewritten_graphs(without_code_generation: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that go to Inductor."""
    graphs: list[Any] = []
    interpret = kvcompile.backend.compile_fx_inner

    def remember(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        graphs.append(copy.deepcopy(gm.graph))
        return interpret(gm, example_inputs, **kwargs)

    monkeypatch.setattr(kvcompile.backend, "compile_fx_inner", remember)
    return graphs


@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: fn.__name__)
def test_every_form_is_packed_and_means_what_it_does_on_packed_pools(fn: Step, rewritten_graphs: list[Any]) -> None:
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


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", [assignment_and_index_select, blocks_and_offsets])
def test_packed_pools_arrive_and_all_sizes_may_be_symbols(fn: Step) -> None:
    pools = reference_pools(plain_pools(fn))
    reference = copy.deepcopy(pools)
    step = compiled(fn, dynamic=True)
    for q_len, num_blocks in ((2, 3), (3, 5)):
        new, places = inputs(q_len, num_blocks)
        assert_close(step(*new, *pools, *places), fn(*new, *reference, *places))
    for pool, expected in zip(pools, reference, strict=True):
        assert_close(pool.dequantize(), expected.dequantize())


@pytest.mark.usefixtures("without_code_generation")
def test_one_tensor_may_hold_the_pools_of_keys_and_values() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, *places: Tensor) -> Tensor:
        return blocks_and_offsets(q, k, v, kv[0], kv[1], *places)

    kv = torch.stack(plain_pools(blocks_and_offsets))
    layouts = {(index,): (PackedLayout(POLICY, role, HEAD_DIM), 0) for index, role in enumerate(("key", "value"))}
    reference = PackedStack.from_dense(kv, layouts)
    run = compiled(step)
    for _ in range(2):
        new, places = inputs(1, 3)
        assert_close(run(*new, kv, *places), step(*new, reference, *places))
    assert isinstance(kv, PackedStack)
    assert [type(pool) for pool in kv.parts] == [PackedPool, PackedPool]
    assert torch.equal(kv.dequantize(), reference.dequantize())


@pytest.mark.usefixtures("without_code_generation")
def test_layers_may_read_one_pool_by_tables_of_their_own() -> None:
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

    run = compiled(step)
    for _ in range(2):
        new, places = inputs(1, 3)
        assert_close(run(layers, *new, *places), step(expected, *new, *places))
    for layer, other in zip(layers, expected, strict=True):
        assert torch.equal(layer.keys.dequantize(), other.keys.dequantize())
        assert torch.equal(layer.values.dequantize(), other.values.dequantize())
    plain = 2 * NUM_BLOCKS * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * 4
    assert kvcompile.cache_nbytes(layers) < 0.3 * plain


def test_operators_serve_gpus(rewritten_graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They run their specifications on a CPU."""
    monkeypatch.setattr("kvcompile.passes.insert_ops._uses_kernels", lambda data: True)
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

    monkeypatch.setattr("kvcompile.backend.compile_fx_inner", compile_fx_inner)
    monkeypatch.setattr("kvcompile.passes.insert_ops._uses_kernels", lambda data: True)
    monkeypatch.setattr("kvcompile.passes.rewrite_caches.Rewritten.on_cuda", True)
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
    places[0][0] = NUM_BLOCKS * BLOCK_SIZE  # there is room for it in the last block of the packed data


def out_of_range_block(places: list[Tensor]) -> None:
    places[1][0, 0] = NUM_BLOCKS


def out_of_range_negative_block(places: list[Tensor]) -> None:
    places[1][0, 0] = -NUM_BLOCKS - 1


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", [index_copy_and_index, blocks_viewed_as_slots, blocks_and_offsets])
def test_what_lies_outside_the_pool_is_an_error(fn: Step) -> None:
    pools, step = reference_pools(plain_pools(fn)), compiled(fn)
    new, places = inputs(1, 3)
    step(*new, *pools, *places)
    spoils = [out_of_range_slot, out_of_range_block]
    if FORMS[fn]:  # slots that are computed from a negative block may lie in the pool
        spoils.append(out_of_range_negative_block)
    for spoil in spoils:
        spoilt = [place.clone() for place in places]
        spoil(spoilt)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            step(*new, *pools, *spoilt)


# What only looks like a paged cache.


def pool_returned_from_a_gather(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots], values[slots] = k, v
    gathered = keys[slots_of(table)].transpose(1, 2)
    return attend(q, gathered, values[slots_of(table)].transpose(1, 2), mask), gathered


def pool_summed_up(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    return index_copy_and_index(q, k, v, keys, values, slots, table, mask), keys.sum()


def pool_gathered_besides(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    return index_copy_and_index(q, k, v, keys, values, slots, table, mask), keys[slots].mean()


def pool_read_before_its_write(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    before = [x[slots_of(table)].transpose(1, 2) for x in (keys, values)]
    keys[slots], values[slots] = k, v
    return attend(q, *before, mask)


def pool_only_read(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    return attend(q, *(x[slots_of(table)].transpose(1, 2) for x in (keys, values)), mask)


def pool_updated_out_of_place(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys, values = (x.index_put((slots,), new) for x, new in ((keys, k), (values, v)))
    return attend(q, *(x[slots_of(table)].transpose(1, 2) for x in (keys, values)), mask), keys, values


def pool_that_sums_up_its_tokens(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys.index_put_((slots,), k, accumulate=True)
    values[slots] = v
    return attend(q, *(x[slots_of(table)].transpose(1, 2) for x in (keys, values)), mask)


def pool_with_other_slots_for_every_head(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    heads = torch.arange(keys.shape[1])
    keys[slots[..., None] - heads, heads] = k
    values[slots] = v
    return attend(q, *(x[slots_of(table)].transpose(1, 2) for x in (keys, values)), mask)


def pool_whose_heads_are_gathered_as_tokens(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots], values[slots] = k, v
    k, v = (x[table[:, :NUM_KV_HEADS]] for x in (keys, values))
    return attend(q, k, v, mask[..., :NUM_KV_HEADS])


def pool_scaled(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots], values[slots] = k, v
    return attend(q, keys[slots_of(table)].transpose(1, 2) * 2, values[slots_of(table)].transpose(1, 2), mask)


def pool_for_keys_and_values(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots] = k
    return attend(q, *(keys[slots_of(table)].transpose(1, 2) for _ in range(2)), mask)


REFUSED: dict[Step, tuple[str, str]] = {
    pool_returned_from_a_gather: ("escaping_view", "the caller"),
    pool_summed_up: ("gathered", "aten.sum"),
    pool_gathered_besides: ("used_elsewhere", "gather_slots"),
    pool_read_before_its_write: ("plain_read_only", "not packed"),
    pool_only_read: ("plain_read_only", "not written in this graph"),
    pool_updated_out_of_place: ("gathered", "the caller"),
    pool_that_sums_up_its_tokens: ("gathered", "index_put"),
    pool_with_other_slots_for_every_head: ("gathered", "index_put"),
    pool_whose_heads_are_gathered_as_tokens: ("unknown_read", "gather_slots"),
    pool_scaled: ("computed_from_cache", "not a view"),
    pool_for_keys_and_values: ("shared_key_value", "sequences share it"),
}


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_what_only_looks_like_a_paged_cache_is_refused_with_its_reason(fn: Step) -> None:
    new, places = inputs(1, 3)
    pools = plain_pools(index_copy_and_index)
    expected_pools = [pool.clone() for pool in pools]
    out = compiled(fn, on_unsupported="ignore")(*new, *pools, *places)
    torch.testing.assert_close(out, fn(*new, *expected_pools, *places), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(list(pools), expected_pools, rtol=0, atol=0)
    code, detail = REFUSED[fn]
    reasons = {site.reason_code: str(site.reason) for site in kvcompile.last_report().sites}
    assert code in reasons
    assert detail in reasons[code]
    assert None not in reasons


@pytest.mark.usefixtures("without_code_generation")
def test_a_refused_pool_stays_plain_beside_packed_ones() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, *pools_and_places: Tensor) -> Any:
        *pools, slots, table, mask = pools_and_places
        out = blocks_and_offsets(q, k, v, *pools[:2], slots, table, mask)
        return out, blocks_and_offsets(q, k, v, *pools[2:], slots, table, mask), pools[2][table].sum()

    new, places = inputs(1, 3)
    pools = [*plain_pools(blocks_and_offsets), *plain_pools(blocks_and_offsets)]
    expected_pools = [*reference_pools(tuple(pools[:2])), pools[2].clone(), pools[3].clone()]
    out = compiled(step, on_unsupported="ignore")(*new, *pools, *places)
    for actual, expected in zip(out, step(*new, *expected_pools, *places), strict=True):
        assert_close(actual, expected)
    assert [type(pool) for pool in pools] == [PackedPool, PackedPool, Tensor, Tensor]
    assert torch.equal(pools[2], expected_pools[2])
    assert torch.equal(pools[3], expected_pools[3])


@pytest.mark.usefixtures("without_code_generation")
def test_a_format_that_scales_tokens_together_is_refused() -> None:
    pools = plain_pools(index_copy_and_index)
    new, places = inputs(1, 3)
    compiled(index_copy_and_index, "int4", on_unsupported="ignore")(*new, *pools, *places)
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == "unsupported_format"
    assert "neighbouring slots" in str(site.reason)
    assert type(pools[0]) is Tensor


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", [index_copy_and_index, blocks_and_offsets])
def test_a_prompt_that_attends_to_itself_only_writes_to_packed_pools(fn: Step) -> None:
    def prefill(x: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        k, v = x * 2, x + 1
        place = (slots // BLOCK_SIZE, slots % BLOCK_SIZE) if FORMS[fn] else (slots,)
        keys.index_put_(place, k), values.index_put_(place, v)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(k, k, v, is_causal=True)

    pools = reference_pools(plain_pools(fn))
    expected_pools = copy.deepcopy(pools)
    (_, x, _), (slots, *_) = inputs(5, 3)
    assert_close(compiled(prefill)(x, *pools, slots), prefill(x, *expected_pools, slots))
    for pool, expected in zip(pools, expected_pools, strict=True):
        assert torch.equal(pool.dequantize(), expected.dequantize())


# Eager code on a packed pool of blocks.


def pair(layout: PackedLayout = INT8) -> tuple[PackedPool, Tensor]:
    """A packed pool, and the plain pool that it must be indistinguishable from."""
    x = values(9, 5, 3, layout.head_dim)
    return PackedPool.from_dense(x, layout), quantized(x, layout)


def test_a_pool_looks_like_the_plain_one() -> None:
    pool, plain = pair()
    assert (pool.shape, pool.dtype, pool.device) == (plain.shape, plain.dtype, plain.device)
    assert torch.equal(pool.dequantize(), plain)
    assert torch.equal(pool + 1, plain + 1)
    assert torch.equal(pool[torch.tensor([[3, 0], [8, 3]])], plain[torch.tensor([[3, 0], [8, 3]])])
    assert torch.equal(pool.index_select(0, torch.tensor([4, 4])), plain.index_select(0, torch.tensor([4, 4])))
    assert "PackedPool" in repr(pool)
    assert pool.slots.packed.shape[:2] == (1, 1)  # 45 slots need one block of packed data, whatever a block of theirs


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "blocks and slots": lambda pool, x: pool.__setitem__(([1, 8, -1], [4, 0, -2]), x[:3, 0]),
    "blocks": lambda pool, x: pool.index_put_((torch.tensor([7, 2]),), x[:2]),
    "index_copy_": lambda pool, x: pool.index_copy_(0, torch.tensor([7, 2]), x[:2]),
    "slots of a view": lambda pool, x: pool.view(-1, *pool.shape[2:]).index_copy_(0, torch.tensor([44, 3]), x[0, :2]),
    "mask of slots": lambda pool, x: pool.__setitem__(torch.arange(45).view(9, 5) % 7 == 0, x[0, 0]),
    "one slot": lambda pool, x: pool[3, 2].copy_(x[0, 0]),
    "some blocks": lambda pool, x: pool[2:4].copy_(x[:2]),
    "another pool": lambda pool, x: pool.copy_(x),
    "other blocks": lambda pool, x: pool.view(3, 15, 3, -1).__setitem__((1, slice(2, 4)), x[0, :2]),
    "one number": lambda pool, x: pool.fill_(1.5),
    "zeros": lambda pool, x: pool[1:].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_of_vectors_quantizes_them(write: Callable[[Tensor, Tensor], Any]) -> None:
    pool, plain = pair()
    x = quantized(values(*plain.shape), INT8)
    write(pool, x), write(plain, x)
    assert torch.equal(pool.dequantize(), quantized(plain, INT8))


def test_any_other_write_raises_and_loses_nothing() -> None:
    pool, plain = pair()
    for write in (lambda: pool.mul_(2), lambda: pool[..., 0].zero_(), lambda: pool[:, 1].zero_()):
        with pytest.raises((NotImplementedError, RuntimeError), match=r"packed|read"):
            write()
    assert torch.equal(pool.dequantize(), plain)
    with pytest.raises(IndexError):
        pool[torch.tensor([9]), torch.tensor([0])] = plain[0, :1]


def test_a_pool_is_copied_saved_and_loaded_packed(tmp_path: Path) -> None:
    pool, plain = pair()
    file = io.BytesIO()
    torch.save(pool, file)
    file.seek(0)
    kvcompile.save_cache({"keys": pool}, tmp_path / "pool.safetensors")
    copies = [
        copy.deepcopy(pool),
        pool.clone(),
        torch.load(file),
        kvcompile.load_cache(tmp_path / "pool.safetensors")["keys"],
    ]
    pool.zero_()
    for copied in copies:
        assert isinstance(copied, PackedPool)
        assert torch.equal(copied.dequantize(), plain)


def test_slots_are_seen_as_blocks_and_back() -> None:
    pool, plain = pair()
    slots = pool.flatten(0, 1)
    assert isinstance(slots, PackedTensor)
    assert_same(slots, plain.flatten(0, 1))
    blocks = slots.unflatten(0, (9, 5))
    assert isinstance(blocks, PackedPool)
    blocks[0].zero_()
    assert torch.equal(pool[0], torch.zeros_like(plain[0]))
    assert torch.equal(pool[1:].dequantize(), plain[1:])


def test_adoption_leaves_a_pool_of_blocks_or_slots() -> None:
    x = values(9, 5, 3, INT8.head_dim)
    blocks, slots = x.clone(), x.flatten(0, 1).clone()
    adopt(blocks, INT8, 0), adopt(slots, INT8, 0)
    assert isinstance(blocks, PackedPool)
    assert isinstance(slots, PackedTensor)
    assert torch.equal(blocks.dequantize().flatten(0, 1), slots.dequantize())
