"""Every way in which a model writes and reads its cache is packed, and equals eager code on packed caches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared_fixtures import WITHOUT_VECTORS
from torch import Tensor
from torch._dynamo.utils import counters

from kvcompile import last_report
from kvcompile.errors import AliasedCacheError
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 2, 4, 2, 64, 140
POLICY = "int8_per_token_head"

Write = Callable[[Tensor, Tensor, Tensor], None]


def index_copy(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    cache.index_copy_(2, pos, k)


def setitem_positions(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    cache[:, :, pos] = k


def setitem_negative_positions(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    cache[:, :, pos - cache.shape[2]] = k


def index_put_per_sequence(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    batch = torch.arange(cache.shape[0])
    cache[batch[:, None], :, pos.expand(cache.shape[0], -1)] = k.transpose(1, 2)


def index_put_of_the_only_sequence(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    cache[torch.arange(cache.shape[0]), :, pos] = k[0].transpose(0, 1)


def scatter(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    cache.scatter_(2, pos.view(1, 1, -1, 1).expand(k.shape), k)


def slice_assignment(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    cache[:, :, 3 : 3 + k.shape[2]] = k


def slice_copy(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    cache.narrow(2, 3, k.shape[2]).copy_(k)


def two_writes(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    cache.index_copy_(2, pos[:1], k[:, :, :1])
    cache.index_copy_(2, pos[1:], k[:, :, 1:])


def select_assignment(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    cache[:, :, 3] = k[:, :, 0]


def masked_update(cache: Tensor, k: Tensor, pos: Tensor) -> None:
    here = torch.arange(cache.shape[2]) == pos[0]
    cache.copy_(torch.where(here[:, None], k[:, :, :1], cache))


FORMS = {
    index_copy: "index_put",
    setitem_positions: "index_put",
    setitem_negative_positions: "index_put",
    index_put_per_sequence: "index_put per sequence",
    scatter: "scatter",
    slice_assignment: "slice_scatter",
    slice_copy: "slice_scatter",
    two_writes: "index_put",
    select_assignment: "select_scatter",
    masked_update: "where",
}


OTHER_ORDERS = [write for write in FORMS if write is not setitem_negative_positions]
"""Forms that need no token dimension of the cache itself."""


def heads_first(x: Tensor, axes: str) -> Tensor:
    """A [B, H, S, D] view of a tensor whose dimensions have the order ``axes``."""
    return x.permute([axes.index(axis) for axis in "bhtd"])


def attention_step(write: Write, axes: str, write_values: Write | None = None) -> Callable[..., Tensor]:
    """A decode step of a hand-written attention layer, whose caches have the order ``axes``."""

    def step(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        keys, values = heads_first(k_cache, axes), heads_first(v_cache, axes)
        write(keys, k, pos)
        (write_values or write)(values, v, pos)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    return step


def caches(axes: str = "bhtd", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    sizes = {"b": BATCH, "h": NUM_KV_HEADS, "t": MAX_LEN, "d": HEAD_DIM}
    shape = [sizes[axis] for axis in axes]
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def packed_copy(cache: Tensor, role: str, axes: str = "bhtd") -> PackedTensor:
    return PackedTensor.from_dense(cache.clone(), PackedLayout(POLICY, role, HEAD_DIM), axes)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("write", "axes"),
    [
        *itertools.product(FORMS, ("bhtd",)),
        *zip(OTHER_ORDERS, itertools.cycle(("bthd", "tbhd")), strict=False),
        *itertools.product((index_copy, scatter), ("thbd", "htbd", "hbtd")),
    ],
    ids=lambda param: getattr(param, "__name__", param),
)
@pytest.mark.usefixtures("without_code_generation")
def test_a_recognised_write_is_packed_and_equals_eager_code_on_packed_caches(write: Write, axes: str) -> None:
    check_steps(write, write, axes)


@pytest.mark.slow
@pytest.mark.parametrize("options", [WITHOUT_VECTORS, pytest.param({}, id="vectors", marks=pytest.mark.slow)])
def test_generated_code_writes_keys_per_sequence_and_values_in_a_mask(options: dict[str, Any]) -> None:
    """Inductor compiles these writes; test_attention_forms.py has index_copy."""
    check_steps(index_put_per_sequence, masked_update, "bthd", options)


def check_steps(write: Write, write_values: Write, axes: str, options: dict[str, Any] | None = None) -> None:
    """Run compiled steps beside eager code on packed caches."""
    n = 1 if {write, write_values} & {select_assignment, masked_update} else 2
    step = attention_step(write, axes, write_values)
    options = {"policy": POLICY, "on_unsupported": "error", **(options or {})}
    compiled = torch.compile(step, backend="kvquant", options=options)
    k_cache, v_cache = caches(axes)
    k_expected, v_expected = packed_copy(k_cache, "key", axes), packed_copy(v_cache, "value", axes)
    plain_k, plain_v = k_cache.clone(), v_cache.clone()
    if axes != "bhtd":  # caches that arrive plain take another graph
        k_cache, v_cache = k_expected.clone(), v_expected.clone()
    with torch.no_grad():
        for start in (3, 64, 130):
            q = torch.randn(BATCH, NUM_HEADS, n, HEAD_DIM)
            k, v = torch.randn(2, BATCH, NUM_KV_HEADS, n, HEAD_DIM).unbind()
            pos = torch.arange(start, start + n)
            mask = torch.arange(MAX_LEN)[None, :] <= pos[:, None]
            out = compiled(q, k, v, k_cache, v_cache, pos, mask)
            # The meaning: eager code on packed caches, with writes in their simplest form.
            step(q, k, v, plain_k, plain_v, pos, mask)
            written = [3] if write is select_assignment else [3, 4] if write in (slice_assignment, slice_copy) else pos
            for packed, plain in ((k_expected, plain_k), (v_expected, plain_v)):
                index = torch.as_tensor(written)
                packed.index_copy_(axes.index("t"), index, plain.index_select(axes.index("t"), index))
            keys, values = (heads_first(x.dequantize(), axes) for x in (k_expected, v_expected))
            expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert isinstance(k_cache, PackedTensor)
    assert isinstance(v_cache, PackedTensor)
    torch.testing.assert_close(k_cache.dequantize(), k_expected.dequantize(), rtol=0, atol=0)
    torch.testing.assert_close(v_cache.dequantize(), v_expected.dequantize(), rtol=0, atol=0)
    (site,) = last_report().sites
    assert [cache.write_form for cache in site.caches] == [FORMS[write], FORMS[write_values]]
    assert [cache.kind for cache in site.caches] == ["static", "static"]


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("axes", ["bhtd", "bthd", "tbhd"])
def test_the_index_of_the_only_sequence_is_broadcast_to_all_positions(axes: str) -> None:
    step = attention_step(index_put_of_the_only_sequence, axes)
    compiled = torch.compile(step, backend="kvquant", options={"policy": POLICY, "on_unsupported": "error"})
    batch_dim = axes.index("b")
    plain = [cache.narrow(batch_dim, 0, 1).clone() for cache in caches(axes)]
    packed = [packed_copy(cache, role, axes) for cache, role in zip(plain, ("key", "value"), strict=True)]
    if axes != "bhtd":  # caches that arrive plain take another graph
        plain = [cache.clone() for cache in packed]
    for n in (3, 1, 5) if axes == "bhtd" else (3, 1):
        q, k, v = (torch.randn(1, heads, n, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
        pos = torch.arange(62, 62 + n)
        mask = torch.arange(MAX_LEN)[None, :] <= pos[:, None]
        with torch.no_grad():
            out, expected = (step(q, k, v, *both, pos, mask) for step, both in ((compiled, plain), (step, packed)))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for cache, expected in zip(plain, packed, strict=True):
        assert torch.equal(cache.dequantize(), expected.dequantize())


@pytest.mark.usefixtures("without_code_generation")
def test_dimensions_may_be_counted_from_the_last() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys.narrow(-2, 3, 2).copy_(k), values.narrow(-2, 3, 2).copy_(v)
        keys, values = keys.narrow(-2, 0, 5), values.narrow(-2, 0, 5).narrow(-1, 0, 16)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    compiled = torch.compile(step, backend="kvquant", options={"policy": POLICY, "on_unsupported": "error"})
    keys, values = caches()
    expected = packed_copy(keys, "key"), packed_copy(values, "value")
    new = [torch.randn(BATCH, heads, 2, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    with torch.no_grad():
        torch.testing.assert_close(compiled(*new, keys, values), step(*new, *expected), rtol=1e-4, atol=1e-5)
    assert torch.equal(keys.dequantize(), expected[0].dequantize())
    assert torch.equal(values.dequantize(), expected[1].dequantize())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="generated C++ of torch 2.11 ends the process on such a write")
@pytest.mark.usefixtures("attention_as_operator")
@pytest.mark.parametrize("options", [WITHOUT_VECTORS, pytest.param({}, id="vectors", marks=pytest.mark.slow)])
def test_a_write_outside_the_cache_is_an_error_even_where_the_last_block_has_room(options: dict[str, Any]) -> None:
    step = attention_step(index_copy, "bhtd")
    compiled = torch.compile(step, backend="kvquant", options={"on_unsupported": "error", **options})
    q, k, v = (torch.randn(BATCH, heads, 1, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    mask = torch.ones(1, MAX_LEN, dtype=torch.bool)
    with torch.no_grad():
        compiled(q, k, v, *caches(), torch.tensor([3]), mask)
        for position in (MAX_LEN, MAX_LEN + 5, -MAX_LEN - 1):
            with pytest.raises((RuntimeError, IndexError), match=r"out of (bounds|range)"):
                compiled(q, k, v, *caches(), torch.tensor([position]), mask)


@pytest.mark.usefixtures("without_code_generation")
def test_two_packed_caches_of_one_storage_are_told_apart_at_run_time() -> None:
    step = attention_step(index_copy, "bhtd")
    compiled = torch.compile(step, backend="kvquant", options={"on_unsupported": "error"})
    q, k, v = (torch.randn(BATCH, heads, 1, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    k_cache = packed_copy(caches()[0], "key")
    v_cache = PackedTensor.over(
        k_cache.packed, PackedLayout(POLICY, "value", HEAD_DIM), k_cache.dtype, "bhtd", k_cache.shape
    )
    mask = torch.ones(1, MAX_LEN, dtype=torch.bool)
    with torch.no_grad(), pytest.raises(AliasedCacheError, match="share their storage"):
        compiled(q, k, v, k_cache, v_cache, torch.tensor([3]), mask)


def roll_then_write(cache: Tensor, k: Tensor) -> None:
    rolled = cache.roll(-k.shape[2], 2)
    rolled[:, :, -k.shape[2] :] = k
    cache.copy_(rolled)


def reorder_then_write(cache: Tensor, k: Tensor) -> None:
    order = torch.arange(cache.shape[2]).roll(-k.shape[2])
    cache.copy_(cache[:, :, order])
    cache[:, :, -k.shape[2] :] = k


def shift_then_write(cache: Tensor, k: Tensor) -> None:
    n = k.shape[2]
    cache[:, :, :-n] = cache[:, :, n:].clone()
    cache[:, :, -n:] = k


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    ("move", "policy", "lengths"),
    [
        (roll_then_write, "int8_per_token_head", (1, 3)),  # the second time, the size is a symbol
        (reorder_then_write, "turboquant_4bit_nc", (3, 3)),
        (shift_then_write, "fp8_e4m3", (3, 3)),
        pytest.param(reorder_then_write, "turboquant_4bit_nc", (1, 3), marks=pytest.mark.slow),
        pytest.param(shift_then_write, "fp8_e4m3", (1, 3), marks=pytest.mark.slow),
    ],
)
def test_a_full_window_moves_its_tokens_without_quantizing_them_again(
    move: Write, policy: str, lengths: tuple[int, ...]
) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        move(keys, k)
        move(values, v)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    compiled = torch.compile(step, backend="kvquant", options={"policy": policy, "on_unsupported": "error"})
    keys, values = caches()
    history = [keys.clone(), values.clone()]
    with torch.no_grad():
        for tokens in lengths:
            q = torch.randn(BATCH, NUM_HEADS, tokens, HEAD_DIM)
            k, v = torch.randn(2, BATCH, NUM_KV_HEADS, tokens, HEAD_DIM).unbind()
            out = compiled(q, k, v, keys, values)
            history = [torch.cat([past, new], 2) for past, new in zip(history, (k, v), strict=True)]
            assert isinstance(keys, PackedTensor)
            expected = [
                PackedTensor.from_dense(past[:, :, -MAX_LEN:], cache.packed_layout)
                for past, cache in zip(history, (keys, values), strict=True)
            ]
            assert torch.equal(keys.dequantize(), expected[0].dequantize())
            plain = F.scaled_dot_product_attention(q, *(x.dequantize() for x in expected), enable_gqa=True)
            torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("without_code_generation")
def test_tokens_whose_bytes_are_shared_are_not_moved() -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        roll_then_write(keys, k)
        roll_then_write(values, k)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    compiled = torch.compile(step, backend="kvquant", options={"policy": "int4", "on_unsupported": "ignore"})
    q, k = torch.randn(BATCH, NUM_HEADS, 1, HEAD_DIM), torch.randn(BATCH, NUM_KV_HEADS, 1, HEAD_DIM)
    keys, values = caches()
    plain = keys.clone(), values.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, keys, values), step(q, k, *plain))
    assert torch.equal(keys, plain[0])
    (site,) = last_report().sites
    assert site.reason_code == "unsupported_format"
    assert "moves tokens" in str(site.reason)
