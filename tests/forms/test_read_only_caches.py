"""Caches that steps only read, as dia's precomputed keys and values of cross-attention: packed after ``pack_``.

Compiled steps equal plain code in a lossless format, and eager code on packed caches in a lossy one. Graphs run node
by node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvcompile
from kvcompile import KVCompileError
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, KV_HEADS, SOURCE, HEAD_DIM = 2, 4, 2, 70, 32
LOSSLESS, LOSSY = "float32", "int8_per_token_head"

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def caches() -> list[Tensor]:
    return [torch.randn(BATCH, KV_HEADS, SOURCE, HEAD_DIM) for _ in range(2)]


def queries(n: int = 1) -> Tensor:
    return torch.randn(BATCH, HEADS, n, HEAD_DIM)


def compiled(step: Any, policy: str, **options: Any) -> Any:
    return torch.compile(step, backend="kvquant", options={"policy": policy, "on_unsupported": "ignore", **options})


class CrossAttention(nn.Module):
    """The encoder computes its buffers once. Its weight has the shape of a cache, but is not a cache."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)
        self.memory = nn.Parameter(torch.ones(BATCH, KV_HEADS, 3, HEAD_DIM), requires_grad=False)

    def forward(self, q: Tensor) -> Tensor:
        return attend(attend(q, self.keys, self.values), self.memory, self.memory)


def test_buffers_of_a_module_are_packed_after_the_mark_and_weights_never() -> None:
    model, plain = CrossAttention(*caches()), None
    plain = CrossAttention(model.keys.clone(), model.values.clone())
    assert kvcompile.pack_(model) is model
    assert type(model.keys) is Tensor  # until a compiled call reads it
    run = compiled(model, LOSSLESS)
    for n in (3, 1, 1):
        q = queries(n)
        torch.testing.assert_close(run(q), plain(q), rtol=1e-4, atol=1e-5)
    assert isinstance(model.keys, PackedTensor)
    assert isinstance(model.values, PackedTensor)
    assert torch.equal(model.keys.dequantize(), plain.keys)
    assert type(model.memory) is nn.Parameter
    report = kvcompile.last_report()
    assert [cache.kind for site in report.sites for cache in site.caches] == ["read-only"] * 2
    assert [site.reason_code for site in report.sites] == [None, "plain_read_only"]


def as_tensors(keys: Tensor, values: Tensor) -> tuple[Any, Callable[..., Tensor]]:
    return [keys, values], lambda q, held: attend(q, *held)


def as_a_dict(keys: Tensor, values: Tensor) -> tuple[Any, Callable[..., Tensor]]:
    return {"k": keys, "v": values}, lambda q, held: attend(q, held["k"], held["v"])


def as_rank_3(keys: Tensor, values: Tensor) -> tuple[Any, Callable[..., Tensor]]:
    held = [x.flatten(0, 1).clone() for x in (keys, values)]
    return held, lambda q, held: attend(q, *(x.view(BATCH, KV_HEADS, SOURCE, HEAD_DIM) for x in held))


@pytest.mark.parametrize("form", [as_tensors, as_a_dict, as_rank_3])
def test_arguments_are_packed_after_the_mark_and_equal_eager_code_on_packed_caches(
    form: Callable[..., tuple[Any, Callable[..., Tensor]]],
) -> None:
    held, step = form(*caches())
    tensors = list(held.values()) if isinstance(held, dict) else held
    layouts = [PackedLayout(LOSSY, role, HEAD_DIM) for role in ("key", "value")]
    order = "bhtd" if tensors[0].dim() == 4 else "btd"
    expected = [PackedTensor.from_dense(x, layout, order) for x, layout in zip(tensors, layouts, strict=True)]
    kvcompile.pack_(held)
    run = compiled(step, LOSSY, on_unsupported="error")
    for _ in range(2):
        q = queries()
        other: Any = dict(zip(held, expected, strict=True)) if isinstance(held, dict) else expected
        torch.testing.assert_close(run(q, held), step(q, other), rtol=1e-4, atol=1e-5)
    for cache, packed in zip(tensors, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.packed, packed.packed)


def test_without_the_mark_they_stay_plain_and_the_reason_names_the_remedy() -> None:
    keys, values = caches()
    q = queries()
    assert torch.equal(compiled(attend, LOSSY)(q, keys, values), attend(q, keys, values))
    assert type(keys) is type(values) is Tensor
    (site,) = kvcompile.last_report().sites
    assert site.reason == "its key cache keys is not written in this graph and is not packed"
    assert "kvcompile.pack_" in str(site.remedy)


def test_an_argument_under_a_key_with_a_dot_is_not_an_attribute() -> None:
    def step(q: Tensor, memory: dict[str, Tensor]) -> Tensor:
        return attend(q, memory["layer.keys"], memory["layer.values"])

    keys, values = caches()
    compiled(step, LOSSY)(queries(), {"layer.keys": keys, "layer.values": values})
    assert type(keys) is type(values) is Tensor
    assert [site.reason_code for site in kvcompile.last_report().sites] == ["plain_read_only"]


def test_a_marked_view_of_another_tensor_stays_plain_and_the_report_says_why() -> None:
    both = caches()
    keys, values = (x.view(x.shape) for x in both)
    kvcompile.pack_([keys, values])
    q = queries()
    torch.testing.assert_close(compiled(attend, LOSSY)(q, keys, values), attend(q, keys, values), rtol=1e-5, atol=1e-5)
    assert type(keys) is type(values) is Tensor
    assert any(
        "was not packed: it is a view of a tensor that is in use" in note for note in kvcompile.last_report().notes
    )


def test_another_use_of_a_marked_cache_keeps_it_plain() -> None:
    def step(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(q, keys, values) + keys.sum()

    keys, values = kvcompile.pack_(caches())
    q = queries()
    torch.testing.assert_close(compiled(step, LOSSY)(q, keys, values), step(q, keys, values), rtol=1e-5, atol=1e-5)
    assert type(keys) is Tensor
    assert [site.reason_code for site in kvcompile.last_report().sites] == ["used_elsewhere"]


@pytest.mark.parametrize(
    "owner",
    [
        torch.zeros(3),
        torch.zeros(2, 2, 2, 2, dtype=torch.int64),
        torch.zeros(2, 2, 2, 2, requires_grad=True),
        nn.Linear(2, 2),
        nn.Linear,
        None,
        [],
        7,
    ],
)
def test_an_owner_without_caches_is_an_error(owner: Any) -> None:
    with pytest.raises(KVCompileError, match=r"^pack_: .* holds no floating-point tensor of 3 or 4 dimensions"):
        kvcompile.pack_(owner)


def test_objects_and_their_attributes_are_searched_once_each() -> None:
    class Owner:
        pass

    owner, part = Owner(), Owner()
    owner.part, part.back, part.keys = part, owner, torch.zeros(1, 2, 3, 4)  # type: ignore[attr-defined]
    kvcompile.pack_(owner)
    kvcompile.pack_([PackedTensor.zeros((1, 2, 3, 16), torch.float32, PackedLayout(LOSSY, "key", 16))])  # no effect
    q, values = torch.randn(1, 2, 1, 4), torch.zeros(1, 2, 3, 4)
    compiled(attend, LOSSY)(q, part.keys, values)  # type: ignore[attr-defined]
    assert "its value cache values" in str(kvcompile.last_report().sites[0].reason)


def overwritten(cache: Tensor, new: Tensor) -> None:
    cache.copy_(new)


def assigned(cache: Tensor, new: Tensor) -> None:
    cache[:] = new


def written_at_all_positions(cache: Tensor, new: Tensor) -> None:
    cache.index_copy_(2, torch.arange(SOURCE), new)


class WrittenCrossAttention(nn.Module):
    """The first step of a request writes all keys and values, and the other steps read them."""

    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.write = write
        for name, cache in zip(("keys", "values"), caches(), strict=True):
            self.register_buffer(name, torch.zeros_like(cache))

    def forward(self, q: Tensor, new: list[Tensor] | None = None) -> Tensor:
        if new is not None:
            self.write(self.keys, new[0] * 2)
            self.write(self.values, new[1] * 2)
        return attend(q, self.keys, self.values)


@pytest.mark.parametrize("write", [overwritten, assigned])
def test_the_remedies_of_a_cache_that_is_overwritten_as_a_whole_pack_it(
    write: Callable[[Tensor, Tensor], None],
) -> None:
    refused, by_positions, outside, plain = map(WrittenCrossAttention, (write, written_at_all_positions, write, write))
    kvcompile.pack_(outside)
    runs = [compiled(model, LOSSLESS) for model in (refused, by_positions, outside)]
    runs[0](queries(), caches())
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == "overwritten"
    for _ in range(2):
        q, new = queries(), caches()
        expected = plain(q, new)
        torch.testing.assert_close(runs[0](q, new), expected)
        torch.testing.assert_close(runs[1](q, new), expected, rtol=1e-4, atol=1e-5)
        write(outside.keys, new[0] * 2)
        write(outside.values, new[1] * 2)
        torch.testing.assert_close(runs[2](q), expected, rtol=1e-4, atol=1e-5)
        for run in runs[1:]:
            torch.testing.assert_close(run(q), expected, rtol=1e-4, atol=1e-5)
    for model in (by_positions, outside):
        assert isinstance(model.keys, PackedTensor)
        assert isinstance(model.values, PackedTensor)
    assert type(refused.keys) is Tensor
