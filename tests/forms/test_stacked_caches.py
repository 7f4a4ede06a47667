"""One tensor may hold keys and values, or all layers. Its caches are packed like separate inputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import cases_by_device
from stack_forms import (
    BATCH,
    FORMS,
    HEAD_DIM,
    LAYERS,
    MAX_LEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    POLICY,
    Step,
    after_the_channels,
    assert_close,
    assignment,
    attend,
    both_at_once,
    by_layer,
    by_layer_and_sequence,
    compiled,
    index_copy,
    inputs,
    packed_parts,
    packed_stack,
    plain,
    plain_stack,
    roles_within_tokens,
)
from torch import Tensor
from torch.fx import Graph

from kvcompile import cache_nbytes, last_report
from kvcompile.errors import AliasedCacheError
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("seed_without_grad")


TWICE = (assignment, by_layer, both_at_once, roles_within_tokens, by_layer_and_sequence)
"""Forms that the default run also tests in the graph of a stack that arrives packed: one or two dimensions, written at
once or part by part."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fn", "begins"),
    [
        *((fn, (3, 9) if fn in TWICE else (3,)) for fn in FORMS),
        *(pytest.param(fn, (3, 9), marks=pytest.mark.slow) for fn in FORMS if fn not in TWICE),
    ],
    ids=lambda param: getattr(param, "__name__", None),
)
def test_every_form_equals_eager_code_on_packed_caches_and_frees_the_plain_tensor(
    fn: Step, begins: tuple[int, ...], rewritten_graphs: list[Graph]
) -> None:
    cache = plain_stack(fn)
    reference = packed_stack(fn, cache)
    storage = cache.untyped_storage()._weak_ref()
    step = compiled(fn)
    for begin in begins:  # the second call finds the packed stack
        args = inputs(6, begin)
        assert_close(step(cache, *args), fn(reference, *args))
    assert isinstance(cache, PackedStack)
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    for (index, part), expected in zip(cache.items(), reference.parts, strict=True):
        assert part.cache_meta == expected.cache_meta, index
        assert_close(part.dequantize(), expected.dequantize())
    sources = {source.source for site in last_report().sites for source in site.caches}
    name = next(iter(sources)).partition("'")[2].partition("'")[0]
    assert sources == {f"L['{name}'][{subscript(fn, part)}]" for part in packed_parts(fn)}
    for graph in rewritten_graphs:
        assert not graph.find_nodes(op="call_function", target=torch.ops.aten.select_scatter.default)
        placeholders = graph.find_nodes(op="placeholder")
        assert len(placeholders) == len(packed_parts(fn)) + 4
        assert all(node.meta["val"].dim() <= 4 for node in placeholders)


@pytest.mark.usefixtures("without_code_generation")
def test_parts_behind_the_channels_are_packed() -> None:
    cache, args = plain_stack(after_the_channels), inputs(6, 3)
    reference = packed_stack(after_the_channels, cache)
    assert_close(compiled(after_the_channels)(cache, *args), after_the_channels(reference, *args))
    assert isinstance(cache, PackedStack)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    "fn",
    [both_at_once, *(pytest.param(fn, marks=pytest.mark.slow) for fn in (roles_within_tokens, by_layer_and_sequence))],
    ids=lambda fn: fn.__name__,
)
def test_sizes_may_be_symbols(fn: Step) -> None:
    cache = plain_stack(fn)
    reference = packed_stack(fn, cache)
    step = compiled(fn, dynamic=True)
    for n, begin in ((6, 3), (4, 64)):
        args = inputs(n, begin)
        assert_close(step(cache, *args), fn(reference, *args))
    assert_close(plain(cache), reference.dequantize())


def subscript(fn: Step, part: tuple[int, ...]) -> str:
    dims = FORMS[fn].dims
    return ", ".join(str(part[dims.index(dim)]) if dim in dims else ":" for dim in range(max(dims) + 1))


def layer_1(cache: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    cache[1, 0, :, :, pos], cache[1, 1, :, :, pos] = k, v
    return attend(q, cache[1, 0], cache[1, 1], pos)


def layer_1_beside_others_that_are_computed_from_each_other(cache: Tensor, *rest: Tensor) -> Tensor:
    cache[0, 0], cache[0, 1] = cache[0, 1] * 0.5, cache[0, 0].roll(1, 2) + 1
    return layer_1(cache, *rest)


PARTLY: dict[str, tuple[Step, Any]] = {
    "the policy leaves a layer alone": (
        by_layer,
        {"version": 1, "rules": [{"match": {"layers": "0"}, "dtype": "auto"}], "default": {"dtype": POLICY}},
    ),
    "the graph does not use it": (layer_1, POLICY),
    "the graph uses it in other ways": (layer_1_beside_others_that_are_computed_from_each_other, POLICY),
}


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(("fn", "policy"), PARTLY.values(), ids=PARTLY.keys())
def test_a_part_that_is_not_packed_stays_plain_beside_packed_ones(fn: Step, policy: Any) -> None:
    cache = plain_stack(by_layer)
    packed = {part: how for part, how in packed_parts(by_layer).items() if part[0] == 1}
    reference = PackedStack.from_dense(cache, packed)
    step = compiled(fn, policy)
    for begin in (0, 6):
        args = inputs(6, begin)
        assert_close(step(cache, *args), fn(reference, *args))
        assert [type(part) for part in cache.parts] == [Tensor, Tensor, PackedTensor, PackedTensor]
        assert_close(cache.dequantize(), reference.dequantize())


def test_a_graph_knows_the_strides_of_plain_parts_beside_packed_ones_and_without(rewritten_graphs: list[Graph]) -> None:
    """A plain part beside packed parts has its own memory. A part of a plain tensor is a view of it."""

    def fn(one: Tensor, other: Tensor, *rest: Tensor) -> Tensor:
        dropped = F.scaled_dot_product_attention(
            rest[0], other[0, :, 0], other[0, :, 1], dropout_p=0.5, enable_gqa=True
        )
        other[0, :, :, :, rest[-1]] = torch.stack(rest[1:3], 1)
        return by_layer_and_sequence(one, *rest) + dropped

    policy = {"version": 1, "rules": [{"match": {"layers": "1"}, "dtype": "auto"}], "default": {"dtype": POLICY}}
    one, other = plain_stack(by_layer_and_sequence), plain_stack(by_layer_and_sequence)
    compiled(fn, policy, on_unsupported="ignore")(one, other, *inputs(2, 5))
    (graph,) = rewritten_graphs
    known = {
        node.meta["val"].stride()
        for node in graph.find_nodes(op="placeholder")
        if node.meta["val"].shape == one[0, :, 0].shape
    }
    assert isinstance(one, PackedStack)
    plain_parts = [part for part in one.parts if type(part) is Tensor]
    assert known == {*(part.stride() for part in plain_parts), other[0, :, 0].stride()}
    assert len(known) == 2


@pytest.mark.usefixtures("without_code_generation")
def test_graphs_that_use_different_layers_pack_them_one_after_the_other() -> None:
    def fn(cache: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        cache[layer, 0, :, :, pos], cache[layer, 1, :, :, pos] = k, v
        return attend(q, cache[layer, 0], cache[layer, 1], pos)

    cache = plain_stack(by_layer)
    reference = PackedStack.from_dense(cache, packed_parts(by_layer))
    step = compiled(fn)
    for layer, packed in ((1, [False, True]), (0, [True, True])):
        args = inputs(1, 5)
        assert_close(step(cache, layer, *args), fn(reference, layer, *args))
        assert [isinstance(part, PackedTensor) for part in cache.parts[::2]] == packed
    assert_close(cache.dequantize(), reference.dequantize())


def summed_up(kv: Tensor, *rest: Tensor) -> Any:
    return assignment(kv, *rest), kv.sum()


def copied(kv: Tensor, *rest: Tensor) -> Any:
    return assignment(kv, *rest), kv.clone()


def written_through_a_view_of_all(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Any:
    kv.view(2 * BATCH, *kv.shape[2:])[:, :, pos] = torch.cat([k, v])
    return attend(q, kv[0], kv[1], pos)


def some_layers_scaled(cache: Tensor, *rest: Tensor) -> Any:
    cache[:1].mul_(0.5)
    return layer_1(cache, *rest)


def layer_chosen_by_a_tensor(cache: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Any:
    out = layer_1(cache, q, k, v, pos)
    return out + attend(q, cache[pos[:1] * 0 + 1][0, 0], cache[1, 1], pos)


def key_and_value_in_other_order(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Any:
    return assignment(kv, q, k, v, pos) + attend(q, kv[1], kv[0], pos)


def keys_become_keys_of_the_other_layer(cache: Tensor, *rest: Tensor) -> Any:
    cache[1, 0] = cache[0, 0]
    return layer_1(cache, *rest)


def layer_1_beside_others_that_swap_places(cache: Tensor, *rest: Tensor) -> Any:
    keys = cache[0, 0].clone()
    cache[0, 0] = cache[0, 1]
    cache[0, 1] = keys
    return layer_1(cache, *rest)


def a_part_is_returned(kv: Tensor, *rest: Tensor) -> Any:
    return assignment(kv, *rest), kv[0]


def all_at_once_and_summed_up(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Any:
    kv[:, :, :, pos] = torch.stack([k, v])
    return attend(q, kv[0], kv[1], pos), kv.sum()


def parts_swapped_at_once(kv: Tensor, *rest: Tensor) -> Any:
    kv.copy_(torch.stack([kv[1], kv[0]]))
    return assignment(kv, *rest)


def hidden_by_a_mask_of_both(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Any:
    kv[:, (torch.arange(BATCH * NUM_KV_HEADS) % 2 == 0).view(BATCH, NUM_KV_HEADS)] = 0
    return attend(q, kv[0], kv[1], pos)


def overlapping_parts(kv: Tensor, *rest: Tensor) -> Any:
    out = assignment(kv, *rest)
    return out + attend(rest[0], *kv.as_strided((2, *kv.shape[1:]), (0, *kv.stride()[1:])), rest[-1])


def accumulated_at_once(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Any:
    torch.ops.aten.index_put_(kv, [None, None, None, pos], torch.stack([k, v]), True)
    return attend(q, kv[0], kv[1], pos)


REFUSED: dict[Step, tuple[str, str]] = {
    summed_up: ("part_of_tensor", "aten.sum"),
    copied: ("part_of_tensor", "the caller"),
    written_through_a_view_of_all: ("part_of_tensor", "aten.view"),
    some_layers_scaled: ("part_of_tensor", "aten.mul"),
    layer_chosen_by_a_tensor: ("part_of_tensor", "aten.index"),
    layer_1_beside_others_that_swap_places: ("part_of_tensor", "aten.copy_"),
    all_at_once_and_summed_up: ("part_of_tensor", "aten.sum"),
    parts_swapped_at_once: ("part_of_tensor", "aten.copy_"),
    hidden_by_a_mask_of_both: ("part_of_tensor", "aten.index_put"),
    overlapping_parts: ("part_of_tensor", "aten.as_strided"),
    accumulated_at_once: ("unknown_write", "accumulates"),
    key_and_value_in_other_order: ("other_role", "value cache of another"),
    keys_become_keys_of_the_other_layer: ("not_written_back", "out of place"),
    a_part_is_returned: ("used_elsewhere", "the caller"),
}

REFUSED_BY_ANOTHER_CHECK: dict[Step, tuple[str, str]] = {
    hidden_by_a_mask_of_both: ("unknown_write", "aten.where"),
    keys_become_keys_of_the_other_layer: ("unknown_write", "aten.copy"),
}
"""The checks that refuse the same code since PyTorch 2.15, which writes it in other operators."""


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_other_uses_of_a_stack_are_refused_with_a_reason(fn: Step) -> None:
    of_layers = next(iter(inspect.signature(fn).parameters)) == "cache"
    sizes = (LAYERS, 2, BATCH) if of_layers else (2, BATCH)
    cache = torch.randn(*sizes, NUM_KV_HEADS, MAX_LEN, HEAD_DIM)
    expected_cache, args = cache.clone(), inputs(2, 5)
    out, expected = compiled(fn, on_unsupported="ignore")(cache, *args), fn(expected_cache, *args)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert type(cache) is Tensor
    assert torch.equal(cache, expected_cache)
    reasons = [REFUSED[fn], REFUSED_BY_ANOTHER_CHECK.get(fn, REFUSED[fn])]
    sites = last_report().sites
    found = [
        site for site in sites for code, words in reasons if site.reason_code == code and words in str(site.reason)
    ]
    assert found, sites
    assert all(site.reason_code for site in sites)


ALL = slice(None)
MASKS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "keys or values": ((2,), ()),
    "keys or values of a sequence": ((2, BATCH), ()),
    "tokens": ((MAX_LEN,), (ALL, ALL, ALL)),
    "heads": ((BATCH, NUM_KV_HEADS), (ALL,)),
    "everything": ((0,), (ALL,)),
}
"""For each mask its sizes, and the indices of the stack's dimensions before the mask."""


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(("size", "before"), MASKS.values(), ids=MASKS)
def test_an_assignment_by_a_mask_equals_eager_code_whether_or_not_the_stack_is_packed(
    size: tuple[int, ...], before: tuple[Any, ...]
) -> None:
    """PyTorch writes ``index_put``, which is refused, or since 2.15 ``where``, which has a part for each cache.

    Tokens that were never written are huge numbers, and hidden from attention.
    """

    def fn(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        kv[0, :, :, pos], kv[1, :, :, pos] = k, v
        kv[*before, mask if size != (0,) else torch.ones(BATCH, NUM_KV_HEADS, dtype=torch.bool)] = 0.25
        return attend(q, kv[0], kv[1], pos)

    cache = torch.full((2, BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM), 1e30)
    expected_cache = cache.clone()
    step = torch.compile(fn, backend="kvquant", options={"policy": "float32", "on_unsupported": "ignore"})
    for begin in (0, 2, 4):
        args = (*inputs(2, begin), torch.rand(size) < 0.5)
        torch.testing.assert_close(step(cache, *args), fn(expected_cache, *args), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(plain(cache), expected_cache, rtol=0, atol=0)
    sites = last_report().sites
    assert {site.reason_code for site in sites} <= {None, "part_of_tensor", "unknown_write"}, sites


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", [assignment, summed_up], ids=lambda fn: fn.__name__)
def test_a_packed_stack_is_used_by_any_graph(fn: Step) -> None:
    """A graph that uses the whole stack gets the values that eager code reads."""
    cache = PackedStack.from_dense(torch.randn(2, BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM), packed_parts(index_copy))
    reference = copy.deepcopy(cache)
    args = inputs(2, 5)
    out, expected = compiled(fn, on_unsupported="ignore")(cache, *args), fn(reference, *args)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (out, expected)), strict=True):
        assert_close(one, other)
    assert_close(cache.dequantize(), reference.dequantize())


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("read", [lambda keys, *rest: attend(*rest), lambda keys, *rest: keys[:, :1].sum()])
def test_a_packed_stack_beside_a_view_of_its_part_is_told_apart_at_run_time(read: Callable[..., Tensor]) -> None:
    def fn(kv: Tensor, keys: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        return assignment(kv, q, k, v, pos) + read(keys, q, keys, kv[1], pos)

    cache = PackedStack.from_dense(plain_stack(index_copy), packed_parts(index_copy))
    with pytest.raises(AliasedCacheError, match="share their storage"):
        compiled(fn)(cache, cache[0], *inputs(2, 5))


@pytest.mark.usefixtures("without_code_generation")
def test_a_stack_with_a_part_held_elsewhere_stays_plain_and_the_report_says_so() -> None:
    cache = plain_stack(index_copy)
    expected_cache, args, held = cache.clone(), inputs(2, 5), cache[1]
    torch.testing.assert_close(compiled(index_copy)(cache, *args), index_copy(expected_cache, *args))
    assert type(cache) is Tensor
    assert torch.equal(cache, expected_cache)
    assert torch.equal(held, expected_cache[1])
    assert any("a view of it" in note for note in last_report().notes)


class Decoder(torch.nn.Module):
    """A language model of two layers that keeps all its caches in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(97, NUM_HEADS * HEAD_DIM)
        sizes = NUM_HEADS * HEAD_DIM, 2 * NUM_KV_HEADS * HEAD_DIM
        self.projections = torch.nn.ModuleList(torch.nn.Linear(sizes[0], sum(sizes)) for _ in range(LAYERS))
        self.output = torch.nn.Linear(NUM_HEADS * HEAD_DIM, 97)
        self.register_buffer("cache", torch.zeros(LAYERS, 2, BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM))

    def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer, projection in enumerate(self.projections):
            heads = projection(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            q, k, v = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1)
            self.cache[layer, 0].index_copy_(2, pos, k)
            self.cache[layer, 1, :, :, pos] = v
            x = x + attend(q, self.cache[layer, 0], self.cache[layer, 1], pos).transpose(1, 2).flatten(2)
        return self.output(x)


@pytest.mark.parametrize("device", cases_by_device(on_gpu=[()], on_cpu=[()], generated_on_cpu=[()]))
@pytest.mark.usefixtures("node_by_node_on_cpu")
def test_a_model_with_one_tensor_for_all_layers_runs_as_on_eager_packed_caches(device: str) -> None:
    model = Decoder().to(device).eval()
    expected_model = copy.deepcopy(model)
    expected_model.cache = PackedStack.from_dense(model.cache, packed_parts(by_layer))
    step = compiled(model)
    begin = 0
    for n in (20, 1, 1) if device == "cpu" else (100, 7, *[1] * 30):
        ids, pos = torch.randint(97, (BATCH, n), device=device), torch.arange(begin, begin + n, device=device)
        assert_close(step(ids, pos), expected_model(ids, pos))
        begin += n
    assert isinstance(model.cache, PackedStack)
    assert cache_nbytes(model.cache) == cache_nbytes(expected_model.cache)
