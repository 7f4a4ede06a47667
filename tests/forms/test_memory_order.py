"""A cache may have its dimensions in any order in memory, as ``projection(x).transpose(1, 2)`` has.

Compiled steps equal eager code on packed caches. Graphs run node by node.
"""

from __future__ import annotations

import copy
import io
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor, nn
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, SOURCE, MAX_LEN, HEAD_DIM = 2, 3, 20, 70, 32
FORMAT = "int8_per_token_head"
ORDERS = list(itertools.permutations(range(4)))
AS_PROJECTED = (0, 2, 1, 3)
"""[batch, tokens, heads, head_dim] in memory."""

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

all_orders = pytest.mark.parametrize(
    "order", [pytest.param(order, marks=() if order == AS_PROJECTED else pytest.mark.slow) for order in ORDERS]
)


def in_memory(order: Sequence[int], tokens: int, random: bool = True) -> Tensor:
    """A cache [batch, heads, tokens, head_dim] whose dimensions lie in memory in ``order``; a view, as in models."""
    shape = (BATCH, HEADS, tokens, HEAD_DIM)
    made = (torch.randn if random else torch.zeros)([shape[dim] for dim in order])
    return made.permute([order.index(dim) for dim in range(4)])


def packed(plain: Sequence[Tensor]) -> list[PackedTensor]:
    layouts = (PackedLayout(FORMAT, role, HEAD_DIM) for role in ("key", "value"))
    return [PackedTensor.from_dense(x, own) for x, own in zip(plain, layouts, strict=True)]


def compiled(step: Any, **options: Any) -> Any:
    options = {"policy": reading_packed(FORMAT), "on_unsupported": "error", **options}
    return torch.compile(step, backend="kvquant", options=options)


def rows(n: int = 1) -> list[Tensor]:
    return list(torch.randn(3, BATCH, HEADS, n, HEAD_DIM))


def decoder_step(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cross_keys: Tensor, cross_values: Tensor, pos: Tensor
) -> Tensor:
    keys.index_copy_(2, pos, k)
    values.index_copy_(2, pos, v)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.arange(MAX_LEN) <= pos[:, None])
    return F.scaled_dot_product_attention(out, cross_keys, cross_values)


def check_decoding(run: Callable[..., Tensor], held: list[Tensor], expected: list[PackedTensor]) -> None:
    for start, n in ((0, 3), (3, 1), (63, 1), (64, 1)):
        new, pos = rows(n), torch.arange(start, start + n)
        result = decoder_step(*new, *expected, pos)
        torch.testing.assert_close(run(*new, *held, pos), result, rtol=1e-4, atol=1e-5)
    for cache, other in zip(held, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.packed, other.packed)


@all_orders
@torch.no_grad()
def test_caches_of_self_and_cross_attention_are_packed_and_keep_their_strides(order: tuple[int, ...]) -> None:
    counters.clear()
    held = [in_memory(order, MAX_LEN, random=False) for _ in range(2)]
    cross = kvcompile.pack_([in_memory(order, SOURCE) for _ in range(2)])
    expected, strides = [*packed(held), *packed(cross)], [x.stride() for x in (*held, *cross)]
    check_decoding(compiled(decoder_step), [*held, *cross], expected)
    assert [x.stride() for x in (*held, *cross)] == strides
    assert counters["stats"]["unique_graphs"] == 2  # of three tokens and of one


class CrossAttention(nn.Module):
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)

    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, self.keys, self.values)


@torch.no_grad()
def test_buffers_that_a_projection_made_are_packed_after_the_mark() -> None:
    project, x = nn.Linear(16, HEADS * HEAD_DIM), torch.randn(BATCH, SOURCE, 16)
    model = CrossAttention(*(project(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for _ in range(2)))
    expected = packed([model.keys, model.values])
    run, q = compiled(kvcompile.pack_(model)), rows()[0]
    for _ in range(2):
        torch.testing.assert_close(run(q), F.scaled_dot_product_attention(q, *expected), rtol=1e-4, atol=1e-5)
    for cache, other in zip((model.keys, model.values), expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.packed, other.packed)


@torch.no_grad()
def test_buffers_that_a_step_writes_are_packed() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("keys", "values"):
                self.register_buffer(name, torch.zeros(BATCH, MAX_LEN, HEADS, HEAD_DIM).transpose(1, 2))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
            self.keys[:, :, pos], self.values[:, :, pos] = k, v
            mask = torch.arange(MAX_LEN) <= pos[:, None]
            return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)

    layer, expected = Layer(), Layer()
    expected.keys, expected.values = packed([expected.keys, expected.values])
    run = compiled(layer)
    for position in (0, 1, 64):
        new, pos = rows(), torch.tensor([position])
        torch.testing.assert_close(run(*new, pos), expected(*new, pos), rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.keys.packed, expected.keys.packed)
    assert torch.equal(layer.values.packed, expected.values.packed)


@torch.no_grad()
def test_a_write_through_a_reshape_that_is_a_view_in_this_order_reaches_the_packed_cache() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        for cache, x in ((keys, k), (values, v)):
            merged = cache.transpose(1, 2).reshape(BATCH, MAX_LEN, HEADS * HEAD_DIM)
            merged.index_copy_(1, pos, x.transpose(1, 2).flatten(2))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.arange(MAX_LEN) <= pos[:, None])

    held = [in_memory(AS_PROJECTED, MAX_LEN, random=False) for _ in range(2)]
    expected = [x.clone() for x in held]
    run = compiled(step, policy={"default": {"dtype": "float32"}}, on_unsupported="ignore")
    for start, n in ((0, 3), (3, 1), (4, 1)):
        new, pos = rows(n), torch.arange(start, start + n)
        torch.testing.assert_close(run(*new, *held, pos), step(*new, *expected, pos), rtol=1e-4, atol=1e-5)
    for cache, other in zip(held, expected, strict=True):
        assert torch.equal(cache.clone(), other)


@torch.no_grad()
@pytest.mark.parametrize("writes_a_view", [True, False], ids=["a view in this order", "a copy in this order"])
def test_a_second_graph_on_the_packed_cache_writes_what_eager_code_writes(writes_a_view: bool) -> None:
    def other_step(q: Tensor, keys: Tensor, values: Tensor, own: Tensor, new: Tensor) -> Tensor:
        own = own.transpose(1, 2) if writes_a_view else own
        own.flatten(2)[:, 1] = new
        return F.scaled_dot_product_attention(q, keys, values)

    held = [in_memory(AS_PROJECTED, MAX_LEN) for _ in range(2)]
    run, pos = compiled(decoder_step), torch.tensor([3])
    run(*rows(), *held, *kvcompile.pack_([in_memory(AS_PROJECTED, SOURCE) for _ in range(2)]), pos)
    assert isinstance(held[0], PackedTensor)
    plain, q, others = held[0].dequantize(), rows()[0], packed([torch.randn(BATCH, HEADS, MAX_LEN, HEAD_DIM)] * 2)
    new = torch.randn(HEADS * HEAD_DIM if writes_a_view else MAX_LEN * HEAD_DIM)
    other_step(q, *others, plain, new)
    compiled(other_step)(q, *others, held[0], new)
    torch.testing.assert_close(held[0].dequantize(), plain, rtol=0, atol=0.03)


def saved(cache: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    result: Tensor = torch.load(file, weights_only=True)
    return result


def saved_to_a_file(cache: Tensor) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        kvcompile.save_cache(cache, path)
        result: Tensor = kvcompile.load_cache(path)
    return result


COPIES = {"clone": Tensor.clone, "deepcopy": copy.deepcopy, "torch.load": saved, "load_cache": saved_to_a_file}


@all_orders
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@torch.no_grad()
def test_copies_keep_the_order_of_dimensions_in_memory(copied: Callable[[Tensor], Tensor], order: Any) -> None:
    plain = in_memory(order, MAX_LEN).clone()
    cache = packed([plain, plain])[0].with_stride(plain.stride())
    twin, plain_twin = copied(cache), copied(plain)
    assert twin.stride() == plain_twin.stride()
    for x in (twin, plain_twin):
        x.transpose(1, 2).flatten(2)[:, 1] = 7.0
    torch.testing.assert_close(twin.dequantize(), plain_twin, rtol=0, atol=0.1)
    torch.testing.assert_close(cache.dequantize(), plain, rtol=0, atol=0.1)
    assert cache.clone(memory_format=torch.contiguous_format).is_contiguous()


AS_STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "the cache": lambda c: c.as_strided((3, 7), (1, 20), 50),
    "the cache itself": lambda c: c.as_strided(c.shape, c.stride()),
    "tokens": lambda c: c[:, :, 5:9].as_strided((40,), (1,)),
    "a transposed cache": lambda c: c.transpose(1, 2).as_strided((2, 5), (7, 1), 3),
    "a head": lambda c: c[:, 1].as_strided((9,), (2,)),
}


@all_orders
@pytest.mark.parametrize("view", AS_STRIDED.values(), ids=AS_STRIDED.keys())
@torch.no_grad()
def test_as_strided_counts_elements_in_the_order_of_the_memory(
    view: Callable[[Tensor], Tensor], order: tuple[int, ...]
) -> None:
    plain = in_memory(order, MAX_LEN).clone()
    cache = PackedTensor.from_dense(plain, PackedLayout("float32", "key", HEAD_DIM)).with_stride(plain.stride())
    seen, expected = view(cache), view(plain)
    assert torch.equal(seen.clone(), expected)
    for x in (seen, expected):
        x.mul_(2)
    assert torch.equal(seen.clone(), expected)
    assert torch.equal(cache.dequantize(), plain)


@all_orders
@torch.no_grad()
def test_compiled_code_calls_as_strided_on_a_clone_and_the_error_without_it_says_so(order: tuple[int, ...]) -> None:
    def of_a_clone(cache: Tensor) -> Tensor:
        return cache.clone().as_strided((3, 7), (1, 20), 50) * 2

    def of_the_cache(cache: Tensor) -> Tensor:
        return cache.as_strided((3, 7), (1, 20), 50) * 2

    plain = in_memory(order, MAX_LEN).clone()
    cache = PackedTensor.from_dense(plain, PackedLayout("float32", "key", HEAD_DIM)).with_stride(plain.stride())
    assert torch.equal(compiled(of_a_clone)(cache), of_the_cache(plain))
    with pytest.raises(Exception, match=r"as_strided of a packed KV cache \(2, 3, 70, 32\) in compiled code") as caught:
        compiled(of_the_cache)(cache)
    (line,) = (line for line in str(caught.value).splitlines() if "in compiled code" in line)
    assert "call as_strided on a clone() of it, or outside the compiled function" in line


@torch.no_grad()
def test_code_for_one_order_does_not_serve_packed_caches_in_another() -> None:
    """``reshape`` is a view in one order and a copy in the other: the write reaches the cache in one of them only."""

    def step(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys[:, :, :1], values[:, :, :1] = q, q
        return F.scaled_dot_product_attention(q, keys, values) * keys.stride(1)

    run, q = compiled(step), rows()[0]
    shape = (BATCH, HEADS, MAX_LEN, HEAD_DIM)
    both = [[in_memory(AS_PROJECTED, MAX_LEN) for _ in range(2)], [torch.randn(shape) for _ in range(2)]]
    assert both[0][0].stride(1) != both[1][0].stride(1)
    for held in (*both, *both):  # plain, then packed
        out = run(q, *held)
        expected = F.scaled_dot_product_attention(q, *held) * held[0].stride(1)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-2)
    assert all(isinstance(cache, PackedTensor) for held in both for cache in held)


@torch.no_grad()
def test_a_view_of_a_tensor_that_the_caller_keeps_stays_plain_and_the_note_names_the_remedy() -> None:
    base = [torch.randn(BATCH, SOURCE, HEADS, HEAD_DIM) for _ in range(2)]
    keys, values = kvcompile.pack_([x.transpose(1, 2) for x in base])
    q = rows()[0]
    run = compiled(F.scaled_dot_product_attention)
    assert torch.equal(run(q, keys, values), F.scaled_dot_product_attention(q, keys, values))
    assert type(keys) is type(values) is Tensor
    (note,) = kvcompile.last_report().notes
    assert "it is a view of a tensor that is in use; delete that tensor, or copy it" in note
    del base
    run(q, keys, values)
    assert isinstance(keys, PackedTensor)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.randn(2, 3, 70, 64)[..., :32], "have gaps between them; copy it"),
        (lambda: torch.randn(2, 3, 70, 32)[:1], "bytes of a storage of"),
        (lambda: torch.randn(1, 3, 70, 32).expand(2, -1, -1, -1), "overlap in memory"),
    ],
    ids=["channels of a larger tensor", "sequences of a larger tensor", "one sequence for all"],
)
def test_pack_refuses_a_tensor_that_does_not_fill_its_memory_and_accepts_its_clone(
    make: Callable[[], Tensor], reason: str
) -> None:
    tensor = make()
    for owner in (tensor, [tensor], {"keys": tensor}):
        with pytest.raises(ValueError, match=reason) as caught:
            kvcompile.pack_(owner)
        assert "clone()" in str(caught.value)
        assert "\n" not in str(caught.value)
    kvcompile.pack_(tensor.clone())


@torch.no_grad()
def test_a_module_may_have_other_buffers_that_do_not_fill_their_memory() -> None:
    model = CrossAttention(*(in_memory(AS_PROJECTED, SOURCE) for _ in range(2)))
    model.register_buffer("angles", torch.randn(1, 1, 8).expand(2, 3, 8))
    compiled(kvcompile.pack_(model))(rows()[0])
    assert isinstance(model.keys, PackedTensor)
    assert type(model.angles) is Tensor
