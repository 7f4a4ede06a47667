"""A value that is assigned to a cache is rounded to the cache's dtype and then quantized, as in eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared_fixtures import WITHOUT_VECTORS
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.graph.cast_to_cache import converted
from kvcompile.passes.graph.inline import insert_call

BATCH, NUM_HEADS, MAX_LEN, HEAD_DIM = 2, 2, 70, 64
POLICY = "int8_per_token_head"

Write = Callable[[Tensor, Tensor], None]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def slice_assignment(cache: Tensor, k: Tensor) -> None:
    cache[:, :, 3 : 3 + k.shape[2]] = k


def copy_of_a_part(cache: Tensor, k: Tensor) -> None:
    cache.narrow(2, 3, k.shape[2]).copy_(k)


def select_assignment(cache: Tensor, k: Tensor) -> None:
    cache[:, :, 3] = k[:, :, 0]


def some_sequences(cache: Tensor, k: Tensor) -> None:
    cache[1:, :, 3 : 3 + k.shape[2]] = k[1:]


def steps_on_both(
    write: Write, dtype: torch.dtype, k: Tensor, v: Tensor, write_values: Write | None = None, **options: Any
) -> list[tuple[Tensor, Tensor]]:
    """The output and the caches of a compiled step, each with the result of eager code on packed copies."""
    writes = write, write_values or write

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        writes[0](keys, k), writes[1](values, v)
        return F.scaled_dot_product_attention(q, keys, values)

    q, *caches = (torch.randn(BATCH, NUM_HEADS, n, HEAD_DIM).to(dtype) for n in (1, MAX_LEN, MAX_LEN))
    packed = [
        PackedTensor.from_dense(cache.clone(), PackedLayout(POLICY, role, HEAD_DIM))
        for cache, role in zip(caches, ("key", "value"), strict=True)
    ]
    options |= {"policy": POLICY, "on_unsupported": "error"}
    compiled = torch.compile(step, backend="kvquant", options=options)
    out, expected = compiled(q, k, v, *caches), step(q, k, v, *packed)
    return [(out, expected), *((cache.packed, eager.packed) for cache, eager in zip(caches, packed, strict=True))]


@pytest.mark.usefixtures("without_code_generation", "operators_traced")
@pytest.mark.parametrize("write", [slice_assignment, copy_of_a_part, select_assignment, some_sequences])
def test_every_assignment_of_another_dtype_stores_the_bytes_of_eager_code(write: Write) -> None:
    new = torch.randn(2, BATCH, NUM_HEADS, 1, HEAD_DIM)
    _, *caches = steps_on_both(write, torch.bfloat16, *new)
    assert all(torch.equal(compiled, eager) for compiled, eager in caches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, WITHOUT_VECTORS),
        pytest.param(torch.float16, {}, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, {}, marks=pytest.mark.slow),
    ],
)
def test_generated_code_keeps_the_rounding(dtype: torch.dtype, options: dict[str, Any]) -> None:
    k, v = torch.randn(2, BATCH, NUM_HEADS, 2, HEAD_DIM)
    v[..., 0] = 1e5  # infinite in float16
    (out, expected), *caches = steps_on_both(slice_assignment, dtype, k, v, **options)
    assert all(torch.equal(compiled, eager) for compiled, eager in caches)
    assert torch.equal(out.isnan(), expected.isnan())
    assert bool(out.isnan().any()) == (dtype == torch.float16)


def cast_by_the_model(cache: Tensor, k: Tensor) -> None:
    slice_assignment(cache, (k * 1.1).to(cache.dtype))


def cast_before_a_view(cache: Tensor, k: Tensor) -> None:
    slice_assignment(cache, (k * 1.1).mT.to(cache.dtype).contiguous().mT)


@pytest.mark.slow
@pytest.mark.parametrize(("write", "dtype"), [(cast_before_a_view, torch.bfloat16), (cast_by_the_model, torch.float32)])
def test_generated_code_keeps_the_rounding_of_the_model(write: Write, dtype: torch.dtype) -> None:
    """The model's cast of float32 keys rounds, and so does a product of values in the dtype of the cache."""
    k, v = torch.randn(2, BATCH, NUM_HEADS, 2, HEAD_DIM)
    _, *caches = steps_on_both(write, torch.bfloat16, k, v.to(dtype), cast_by_the_model)
    assert all(torch.equal(compiled, eager) for compiled, eager in caches)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("source", ["placeholder", "cast"])
def test_compiled_code_that_computes_stored_values_rounds_them_through_their_bits(device: str, source: str) -> None:
    """On CUDA a store is an operator, whose operands lie in memory and are rounded."""
    graph = Graph()
    with FakeTensorMode():
        cache, k = (torch.empty(2, 2, n, 16, dtype=torch.bfloat16, device=device) for n in (70, 1))
    held, value = graph.placeholder("cache"), graph.placeholder("k")
    held.meta["val"], value.meta["val"] = cache, k.float() if source == "cast" else k
    if source == "cast":
        value = insert_call(graph, torch.ops.prims.convert_element_type.default, value, torch.bfloat16)
    value = insert_call(graph, torch.ops.aten.permute.default, value, [0, 1, 2, 3])
    asks = converted(graph, value, held) is not value
    assert asks == (device == "cpu" and source == "cast")


@pytest.mark.usefixtures("without_code_generation", "operators_traced")
def test_a_cache_that_would_change_its_dtype_stays_plain() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return F.scaled_dot_product_attention(q, keys, values), keys, values

    compiled = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})
    q, k, v = torch.randn(3, BATCH, NUM_HEADS, 1, HEAD_DIM)
    caches = torch.randn(2, BATCH, NUM_HEADS, MAX_LEN, HEAD_DIM).bfloat16()
    for result, plain in zip(compiled(q, k, v, *caches), step(q, k, v, *caches), strict=True):
        torch.testing.assert_close(result, plain)
    (site,) = last_report().sites
    assert site.reason_code == "unknown_write"
    assert "its result is torch.float32, but the cache is torch.bfloat16" in str(site.reason)
