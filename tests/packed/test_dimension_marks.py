"""Sizes of packed caches are marked as dynamic or static like sizes of plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formats_of_every_kind import in_turn
from torch import Tensor
from torch._dynamo import mark_dynamic, mark_static, maybe_mark_dynamic
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

HEAD_DIM, BLOCK_SIZE = 64, 16
KEY, VALUE = (PackedLayout("int8_per_token_head", role, HEAD_DIM) for role in ("key", "value"))

Caches = Sequence[Tensor]
Step = Callable[[Caches, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Caches]]


def attend(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    mask = torch.arange(keys.shape[2]) <= position[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def static(caches: Caches, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Caches]:
    keys, values = (cache.index_copy_(2, position, new) for cache, new in zip(caches, (k, v), strict=True))
    return attend(q, keys, values, position), caches


def growing(caches: Caches, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Caches]:
    keys, values = (torch.cat([cache, new], 2) for cache, new in zip(caches, (k, v), strict=True))
    return attend(q, keys, values, position), [keys, values]


def stack(caches: Caches, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Caches]:
    (kv,) = caches
    kv[0].index_copy_(2, position, k), kv[1].index_copy_(2, position, v)
    return attend(q, kv[0], kv[1], position), caches


def growing_stack(caches: Caches, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Caches]:
    kv = torch.cat([caches[0], torch.stack([k, v])], 3)
    return attend(q, kv[0], kv[1], position), [kv]


def pool(caches: Caches, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Caches]:
    slots = torch.arange(q.shape[0])[:, None] * 5 * BLOCK_SIZE + position
    for cache, new in zip(caches, (k, v), strict=True):
        cache.view(-1, 2, HEAD_DIM)[slots] = new.transpose(1, 2)
    table = torch.arange(q.shape[0] * 5).view(-1, 5)
    keys, values = (cache[table].flatten(1, 2).transpose(1, 2) for cache in caches)
    return attend(q, keys, values, position), caches


def latents(caches: Caches, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Caches]:
    latents = caches[0].index_copy_(1, position, k[:, 0])[:, None].expand(-1, 4, -1, -1)
    return attend(q, latents, latents, position), caches


@dataclass(frozen=True)
class Kind:
    """Makes plain and packed caches of one kind for given numbers of sequences and tokens; names these dimensions."""

    make: Callable[[int, int], list[Tensor]]
    pack: Callable[[list[Tensor]], Caches]
    dims: tuple[int, ...]


def pair(batch: int, tokens: int) -> list[Tensor]:
    return [torch.randn(batch, 2, tokens, HEAD_DIM) for _ in range(2)]


def packed(axes: str = "bhtd", **how: Any) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda caches: [
        PackedTensor.from_dense(cache, layout, axes, **how)
        for cache, layout in zip(caches, (KEY, VALUE)[: len(caches)], strict=True)
    ]


def packed_stack(**how: Any) -> Callable[[list[Tensor]], Caches]:
    return lambda caches: [PackedStack.of_parts(packed(**how)(list(caches[0].unbind())), [2], [0])]


KINDS: dict[Step, Kind] = {
    static: Kind(pair, packed(), (0, 2)),
    growing: Kind(pair, packed(growing=True), (0, 2)),
    stack: Kind(lambda *size: [torch.stack(pair(*size))], packed_stack(), (1, 3)),
    growing_stack: Kind(lambda *size: [torch.stack(pair(*size))], packed_stack(growing=True), (1, 3)),
    pool: Kind(
        lambda batch, tokens: [torch.randn(5 * batch + 3, BLOCK_SIZE, 2, HEAD_DIM) for _ in range(2)],
        lambda caches: [PackedPool.from_dense(x, layout) for x, layout in zip(caches, (KEY, VALUE), strict=True)],
        (0,),
    ),
    latents: Kind(lambda batch, tokens: [torch.randn(batch, tokens, HEAD_DIM)], packed("btd"), (0, 1)),
}


def graphs(step: Step, mark: Callable[[Tensor, int], None], *, is_packed: bool) -> list[int]:
    """How many graphs were compiled after each step: two with caches of one size, two with caches of another.

    Packed caches must give the same results as plain caches, and stay packed.
    """
    torch._dynamo.reset()
    counters.clear()
    kind, result = KINDS[step], []
    options: Any = {"policy": "int8_per_token_head", "on_unsupported": "error"}
    backend: Any = {"backend": "kvquant", "options": options} if is_packed else {"backend": "eager"}
    compiled = torch.compile(step, **backend)
    for batch, tokens in ((2, 70), (3, 140)):
        caches: Caches = kind.make(batch, tokens)
        packed_caches = kind.pack(list(caches))
        for position in (69, 70) if step in (growing, growing_stack) else (5, 6):
            new = [torch.randn(batch, heads, 1, HEAD_DIM) for heads in (4, 1 if step is latents else 2, 2)]
            for x in new:
                maybe_mark_dynamic(x, 0)
            for cache in packed_caches if is_packed else caches:
                for dim in kind.dims:
                    mark(cache, dim)
            at = torch.tensor([position])
            expected, caches = step(caches, *new, at) if is_packed else compiled(caches, *new, at)
            if is_packed:
                out, packed_caches = compiled(packed_caches, *new, at)
                torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)
                assert not any(type(cache) is Tensor for cache in packed_caches)
            result.append(counters["stats"]["unique_graphs"])
    return result


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", KINDS, ids=lambda step: step.__name__)
def test_sequences_and_tokens_that_are_marked_as_dynamic_are_compiled_once(step: Step) -> None:
    assert graphs(step, mark_dynamic, is_packed=True) == [1] * 4


@pytest.mark.parametrize(("step", "mark"), in_turn([growing, stack], [maybe_mark_dynamic, mark_static]))
def test_a_mark_costs_no_more_graphs_than_on_plain_caches(step: Step, mark: Callable[[Tensor, int], None]) -> None:
    plain = graphs(step, mark, is_packed=False)
    assert all(ours <= theirs for ours, theirs in zip(graphs(step, mark, is_packed=True), plain, strict=True))


def test_a_cache_that_grows_through_grouped_queries_is_marked_after_every_call() -> None:
    @torch.compile(backend="kvquant", options={"on_unsupported": "error"})
    def step(q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        k, v = k * 2, v * 2
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        keys, values = (x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, is_causal=past is None), (k, v)

    past = None
    for tokens in (21, 1, 1, 1):
        _, past = step(*(torch.randn(1, heads, tokens, HEAD_DIM) for heads in (4, 2, 2)), past)
        for cache in past:
            mark_dynamic(cache, 2)
    assert counters["stats"]["unique_graphs"] == 2
    assert past is not None
    assert past[0].shape == (1, 2, 24, HEAD_DIM)


def test_a_mark_that_was_given_to_a_plain_cache_holds_when_it_is_packed() -> None:
    step = torch.compile(static, backend="kvquant", options={"on_unsupported": "error"})
    for tokens in (70, 140):
        caches = pair(2, tokens)
        for cache in caches:
            mark_dynamic(cache, 2)
        for position in (5, 6):
            step(caches, *(torch.randn(2, heads, 1, HEAD_DIM) for heads in (4, 2, 2)), torch.tensor([position]))
        assert all(isinstance(cache, PackedTensor) for cache in caches)
    assert kvcompile.last_report().totals.rewritten == 1


def test_mark_unbacked_is_refused_by_pytorch_as_docs_limits_says() -> None:
    """If this fails, PyTorch implements ``mark_unbacked`` here. A marked cache must then run. Change docs/limits.md."""
    (cache, _) = KINDS[growing].pack(pair(2, 70))
    with pytest.raises(AssertionError, match="not implemented yet"):
        mark_unbacked(cache, 2)


def test_the_error_for_a_size_that_must_be_constant_names_the_cache_and_not_its_inner_tensors() -> None:
    caches = KINDS[growing].pack(pair(2, 70))
    mark_dynamic(caches[0], 3)
    with pytest.raises(Exception, match=r"L\['caches'\]\[0\]\.size\(\)\[3\]") as error:
        torch.compile(growing, backend="kvquant")(
            caches, *(torch.randn(2, heads, 1, HEAD_DIM) for heads in (4, 2, 2)), torch.tensor([70])
        )
    assert "inner" not in str(error.value)


def test_a_growing_cache_compiles_with_symbolic_sizes_from_the_first_call() -> None:
    """The guards of such a graph read inner tensors, and Dynamo watches the code that they run."""
    grow_with_symbolic_sizes((1, 64, 5))


@pytest.mark.slow
def test_attention_in_plain_pytorch_has_symbolic_sizes_too(operators_traced: None) -> None:
    grow_with_symbolic_sizes((1, 1, 64, 5))


def grow_with_symbolic_sizes(counts: Sequence[int]) -> None:
    """Append ``counts`` tokens to caches that arrive plain, and compare results with plain caches."""

    def step(q, k, v, keys, values):
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        return F.scaled_dot_product_attention(q, keys, values), keys, values

    run = torch.compile(step, backend="kvquant", options={"policy": "float32"}, dynamic=True)
    keys, values = torch.randn(2, 1, 2, 3, 32)
    plain = keys, values
    for count in counts:
        new = torch.randn(3, 1, 2, count, 32).unbind()
        out, keys, values = run(*new, keys, values)
        expected, *plain = step(*new, *plain)
        assert isinstance(keys, PackedTensor)
        torch.testing.assert_close(out, expected)
