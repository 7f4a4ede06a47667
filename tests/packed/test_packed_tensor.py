"""A packed cache behaves like a plain cache of its quantized values, and raises where it cannot."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from packed_bytes import empty_packed
from packed_caches import (
    HEAD_DIM,
    INT8,
    LAYOUTS,
    assert_same,
    every_layout,
    every_order,
    pair,
    quantized,
    shape_of,
    values,
    varied_layouts,
)
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.packing import pack_tokens, write_tokens
from kvcompile.packed.memory import cache_nbytes
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("seed_without_grad")


@pytest.mark.sampled(2)  # the tokens change first, so that each layout has every number of tokens and every order
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
@every_order
@every_layout
def test_a_cache_reads_as_its_quantized_values(layout, axes, tokens):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same(*pair(layout, axes, tokens, dtype=dtype))


@every_layout
def test_a_cache_in_fp16_reads_finite_values_as_finite_ones(layout):
    x = torch.full((1, 1, 130, HEAD_DIM), torch.finfo(torch.float16).max, dtype=torch.float16)
    x[..., ::3] *= -1
    cache = PackedTensor.from_dense(x, layout)
    assert cache.dequantize().isfinite().all()
    assert cache[:, :, 7].isfinite().all()


@every_layout
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_packing_a_whole_cache_gives_the_bytes_of_writing_its_tokens(layout, tokens):
    x = values(2, 3, tokens, HEAD_DIM)
    empty = empty_packed(layout, tokens, 2, 3, x.device)
    assert torch.equal(pack_tokens(layout, x), write_tokens(empty, layout, x, torch.arange(tokens)))


def test_a_large_cache_is_quantized_in_chunks(monkeypatch):
    monkeypatch.setattr("kvcompile.packed.tokens._CHUNK_BYTES", 1)
    assert_same(*pair(INT8, tokens=200))


@every_layout
def test_a_new_cache_is_zero_and_as_large_as_its_format_says(layout):
    cache = PackedTensor.zeros((2, 3, 100, HEAD_DIM), torch.bfloat16, layout)
    assert_same(cache, torch.zeros(2, 3, 100, HEAD_DIM, dtype=torch.bfloat16))
    assert cache_nbytes(cache) == math.prod(layout.shape(100, 2, 3)) == 2 * 3 * 128 * layout.bytes_per_token


def test_a_cache_of_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="axes are 'bdht'"):
        PackedTensor.zeros((2, HEAD_DIM, 3, 100), torch.float32, INT8, "bdht")
    with pytest.raises(ValueError, match="head_dim 16"):
        PackedTensor.zeros((2, 100, 3 * HEAD_DIM + 1), torch.float32, INT8, "btm")
    with pytest.raises(ValueError, match="head_dim 16"):
        PackedTensor.zeros((2, 3, 100, 64), torch.float32, INT8)
    with pytest.raises(ValueError, match="cannot hold this cache: head_dim 20"):
        PackedTensor.zeros((2, 3, 100, 20), torch.float32, PackedLayout(INT8.format_name, "key", 20))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_numbers_that_are_no_floats_of_at_least_16_bits_are_an_error(dtype: torch.dtype) -> None:
    layout = PackedLayout(INT8, "key", HEAD_DIM)
    message = f"a cache holds floats of 16, 32 or 64 bits, not {str(dtype).removeprefix('torch.')}"
    with pytest.raises(ValueError, match=message):
        PackedTensor.from_dense(torch.zeros(1, 2, 3, HEAD_DIM).to(dtype), layout)
    with pytest.raises(ValueError, match=message):
        PackedTensor.zeros((1, 2, 3, HEAD_DIM), dtype, layout)


# Each write gets the cache with tokens along dimension 2, [2, 3, 70, D], and values that it broadcasts or cuts to fit.
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "index_copy_": lambda c, x: c.index_copy_(2, torch.tensor([69, 0, 64]), x[:, :, :3]),
    "index_copy_ of sequences": lambda c, x: c.index_copy_(0, torch.tensor([1]), x[:1]),
    "index_copy_ of heads": lambda c, x: c.index_copy_(1, torch.tensor([2, 0]), x[:, :2]),
    "a slice of tokens": lambda c, x: c.__setitem__((slice(None), slice(None), slice(60, 67)), x[:, :, :7]),
    "the last tokens": lambda c, x: c[..., -5:, :].copy_(x[:, :, :5]),
    "a slice of a slice": lambda c, x: c[:, :, 3:].__setitem__((slice(None), slice(None), slice(60, 64)), x[:, :, :4]),
    "one token": lambda c, x: c.__setitem__((slice(None), slice(None), 64), x[:, :, 0]),
    "one sequence": lambda c, x: c.__setitem__(1, x[0]),
    "one head": lambda c, x: c.__setitem__((slice(None), -1), x[:, 0]),
    "one vector": lambda c, x: c.__setitem__((1, 2, 65), x[0, 0, 0]),
    "positions": lambda c, x: c.__setitem__((slice(None), slice(None), torch.tensor([5, 66])), x[:, :, :2]),
    "positions from the end": lambda c, x: c.__setitem__((..., torch.tensor([-1, -64]), slice(None)), x[:, :, :2]),
    "a position": lambda c, x: c.__setitem__((slice(None), slice(None), torch.tensor(65)), x[:, :, 0]),
    "a number": lambda c, x: c.__setitem__((slice(None), slice(None), torch.tensor([5, 66])), 0.0),
    "a value for all": lambda c, x: c.__setitem__((slice(None), slice(None), torch.tensor([5, 66])), x[0, 0, 0]),
    "positions of one sequence": lambda c, x: c.__setitem__((1, slice(None), torch.tensor([1, 68])), x[0, :, :2]),
    "a position per sequence": lambda c, x: c.__setitem__(
        (torch.arange(2), slice(None), torch.tensor([69, 3])), x[:, :, 0]
    ),
    "positions per sequence": lambda c, x: c.__setitem__(
        (torch.arange(2)[:, None], slice(None), torch.tensor([[69, 3], [1, 64]])), x[:, :, :2].transpose(1, 2)
    ),
    "positions per sequence and head": lambda c, x: c.__setitem__(
        (torch.arange(2)[:, None, None], torch.arange(3)[:, None], torch.arange(12).reshape(2, 3, 2) * 6), x[:, :, :2]
    ),
    "a mask of tokens": lambda c, x: c.__setitem__((slice(None), slice(None), torch.arange(70) % 9 == 0), x[:, :, :8]),
    "a mask of vectors": lambda c, x: c.__setitem__(torch.arange(420).reshape(2, 3, 70) % 99 == 0, x[0, 0, :5]),
    "copy_": lambda c, x: c.copy_(x),
    "copy_ of one vector": lambda c, x: c.copy_(x[0, 0, 0]),
    "zero_": lambda c, x: c.zero_(),
    "zero_ of a slice": lambda c, x: c[:, :, 3:69].zero_(),
    "zero_ of a short slice": lambda c, x: c[:, :, 61:66].zero_(),
    "zero_ of a head": lambda c, x: c[:, 1].zero_(),
    "fill_ of a slice with zero": lambda c, x: c[:, :, 60:].fill_(0),
    "index_fill_ with zero": lambda c, x: c.index_fill_(2, torch.tensor([1, 65]), 0.0),
    "scatter_": lambda c, x: c.scatter_(2, torch.tensor([4, 69])[:, None].expand(2, 3, 2, HEAD_DIM), x),
    "scatter_ of a repeated index": lambda c, x: c.scatter_(
        2, torch.tensor([4, 69])[:, None].repeat(2, 3, 1, HEAD_DIM), x[:, :, :2]
    ),
    "scatter_ per head": lambda c, x: c.scatter_(
        2, (torch.arange(12) * 6).reshape(2, 3, 2, 1).expand(2, 3, 2, HEAD_DIM), x[:, :, :2]
    ),
    "scatter_ of zero": lambda c, x: c.scatter_(2, torch.tensor([4, 69])[:, None].expand(2, 3, 2, HEAD_DIM), 0.0),
    "a masked update": lambda c, x: c.copy_(torch.where((torch.arange(70) == 65)[:, None], x[:, :, :1], c)),
    "a masked update the other way": lambda c, x: c.copy_(torch.where((torch.arange(70) != 65)[:, None], c, x)),
    "a transposed view": lambda c, x: c.transpose(1, 2).copy_(x.transpose(1, 2)),
    "a view of channels and tokens swapped": lambda c, x: c.mT[..., 7:66].copy_(x.mT[..., 7:66]),
    "parts of a split": lambda c, x: [part.copy_(x[:, :, : part.shape[2]]) for part in c.split(33, dim=2)],
    "parts of an unbind": lambda c, x: [part.copy_(x[0]) for part in c.unbind(0)],
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@varied_layouts
def test_a_write_of_token_vectors_quantizes_them(layout, write):
    cache, plain = pair(layout)
    x = values(2, 3, 70, HEAD_DIM)
    write(cache, x)
    write(plain, quantized(x, layout))
    assert_same(cache, plain)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_writes_mean_the_same_in_every_mode_and_for_both_dimension_orders(write, mode):
    with mode():
        cache, plain = pair(INT8, axes="bthd")
        x = values(2, 3, 70, HEAD_DIM)
        write(cache.transpose(1, 2), x)
        write(plain.transpose(1, 2), quantized(x, INT8))
        assert_same(cache, plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_made_in_one_mode_is_used_in_another(mode):
    other = torch.inference_mode if mode is torch.no_grad else torch.no_grad
    with mode():
        cache, plain = pair(INT8)
    with other():
        assert_same(cache[:, :, 3:66], plain[:, :, 3:66])
        assert_same(cache.narrow(2, 3, 63).split(10, 2)[1], plain[:, :, 13:23])
        assert torch.equal(cache.squeeze(0).unsqueeze(2).clone(), plain.squeeze(0).unsqueeze(2))
        x = values(*shape_of("bhtd", 3))
        assert_same(torch.cat([cache, x], 2), torch.cat([plain, quantized(x, INT8)], 2))


def test_fill_writes_quantized_vectors():
    cache, plain = pair(INT8)
    cache[:, :, 5:66].fill_(0.3)
    plain[:, :, 5:66] = quantized(torch.full((HEAD_DIM,), 0.3), INT8)
    assert_same(cache, plain)


@every_layout
def test_values_are_rounded_to_the_dtype_of_the_cache_before_they_are_quantized(layout):
    cache, plain = pair(layout, dtype=torch.bfloat16)
    x = values(2, 3, 70, HEAD_DIM)
    assert_same(cache.copy_(x), plain.copy_(quantized(x.bfloat16(), layout)))


def test_writes_that_a_plain_cache_rejects_are_rejected():
    cache, plain = pair(INT8)
    x = values(2, 3, 2, HEAD_DIM)
    before = plain.clone()
    for c in (cache, plain):
        for position in (70, -71):
            with pytest.raises((IndexError, RuntimeError)):
                c[:, :, torch.tensor([0, position])] = x
        with pytest.raises((IndexError, RuntimeError)):
            c[:, :, 70]
        with pytest.raises((IndexError, RuntimeError)):
            c.index_copy_(2, torch.tensor([1, 2]), x.double())
        with pytest.raises((IndexError, RuntimeError)):
            c.index_copy_(2, torch.tensor([1, 2]), x[:, :, :1])
        with pytest.raises((IndexError, RuntimeError)):
            c[:, :, torch.tensor([1, 2])] = x.repeat(1, 1, 2, 1)
        with pytest.raises((IndexError, RuntimeError)):
            c.copy_(x)
    assert_same(cache, before)


# Each operator dequantizes, computes and stores. Values that the format represents exactly lose nothing.
IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda c: c.add_(1),
    "mul_": lambda c: c.mul_(0.5),
    "mul_ by itself": lambda c: c.mul_(c),
    "add_ of another head": lambda c: c[:, 0].add_(c[:, 2]),
    "clamp_": lambda c: c.clamp_(-1, 1),
    "masked_fill_": lambda c: c.masked_fill_(torch.arange(HEAD_DIM) < 3, 0),
    "index_add_": lambda c: c.index_add_(2, torch.tensor([1, 69]), torch.ones(2, 3, 2, HEAD_DIM)),
    "index_copy_ of channels": lambda c: c.index_copy_(3, torch.tensor([1]), torch.ones(2, 3, 70, 1)),
    "accumulating index_put_": lambda c: c.index_put_((torch.tensor([1]),), torch.ones(HEAD_DIM), accumulate=True),
    "a mask of channels": lambda c: c.__setitem__(c > 0, 1.0),
    "indexed channels": lambda c: c.__setitem__((slice(None), slice(None), torch.tensor([1]), torch.tensor([2])), 1.0),
    "scatter_ along channels": lambda c: c.scatter_(3, torch.zeros(2, 3, 1, 1, dtype=torch.long), 1.0),
    "an out= argument": lambda c: torch.add(torch.ones(2, 3, 70, HEAD_DIM), 1, out=c),
    "two of one cache": lambda c: torch._foreach_mul_([c, c], 0.5),
    "a slice of channels": lambda c: c[..., :8].zero_(),
    "assigned channels": lambda c: c.__setitem__((..., slice(0, 16, 3)), 2.0),
    "every second token": lambda c: c[:, :, ::2].zero_(),
    "a flat view": lambda c: c.view(-1, HEAD_DIM).index_copy_(0, torch.tensor([1]), torch.ones(1, HEAD_DIM)),
    "a reshape that is a view": lambda c: c.reshape(6, 70, HEAD_DIM).mul_(2),
    "an unsqueezed view": lambda c: c.unsqueeze(2)[:, :, 0].zero_(),
    "a view as integers": lambda c: c.view(torch.int32).zero_(),
    "a strided view": lambda c: c.as_strided((HEAD_DIM,), (1,)).zero_(),
    "nothing": lambda c: c[..., :0].add_(1),
}


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE.keys())
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_any_other_in_place_operator_reads_computes_and_stores(write, mode):
    with mode():
        for dtype in (torch.float32, torch.bfloat16):
            layout = PackedLayout(str(dtype).removeprefix("torch."), "key", HEAD_DIM)
            cache, plain = pair(layout)
            write(cache)
            write(plain)
            assert_same(cache, quantized(plain, layout))


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE.keys())
@varied_layouts
def test_an_in_place_operator_stores_the_vectors_that_changed_and_no_others(layout, write):
    cache, _ = pair(layout)
    plain, before = cache.dequantize(), cache.clone()
    old = plain.clone()
    write(cache)
    write(plain)
    changed = (plain != old).any(-1)
    before[changed] = plain[changed]
    assert torch.equal(cache.packed, before.packed)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "another shape": (lambda c: c.squeeze_(0), "would change the shape or the storage"),
    "another size": (lambda c: c.resize_(3), "would change the shape or the storage"),
    "an out= of another shape": (lambda c: torch.add(torch.ones(3), 1, out=c), "would resize"),
    "two views at once": (lambda c: torch._foreach_mul_([c, c[0]], 2), "several views of one packed KV cache at once"),
    "as_strided with an offset": (lambda c: c[:, :, 1:].as_strided((3,), (1,), 0), "report no storage offset"),
    "scatter_ of single elements": (
        lambda c: c.scatter_(2, torch.arange(HEAD_DIM).expand(2, 3, 1, -1), 1.0), "single elements"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(("write", "reason"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_operation_without_a_right_result_raises_and_changes_nothing(write, reason, mode):
    with mode():
        cache, plain = pair(INT8)
        with pytest.raises(NotImplementedError, match=reason):
            write(cache)
        assert_same(cache, plain)


@pytest.mark.parametrize(
    "write",
    [
        lambda c, x: c.scatter_(2, torch.tensor([4, 69])[:, None].expand(2, 3, 2, HEAD_DIM), x),
        lambda c, x: c.index_copy_(2, torch.tensor([4, 69]), x),
        lambda c, x: c.index_put_((torch.tensor([0])[:, None], torch.arange(3), torch.tensor([4, 69])[:, None]), x[0]),
    ],
    ids=["scatter_", "index_copy_", "index_put_"],
)
def test_vectors_of_another_dtype_are_an_error_as_on_a_plain_cache(write):
    cache, plain = pair(INT8)
    x = torch.ones(2, 3, 2, HEAD_DIM, dtype=torch.bfloat16)
    for tensor in (cache, plain):
        with pytest.raises(RuntimeError):
            write(tensor, x)
    assert_same(cache, plain)


def test_an_in_place_operator_that_fails_changes_nothing():
    cache, plain = pair(INT8)
    with pytest.raises(RuntimeError, match="must match the size"):
        cache.add_(torch.ones(7))
    assert_same(cache, plain)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda c: c.clone(),
    "contiguous": lambda c: c[:, :, 7:66].contiguous(),
    "clone of a view": lambda c: c[1:, :, 5:69].transpose(1, 2).clone(),
    "beams reordered": lambda c: c.index_select(0, torch.tensor([1, 1, 0])),
    "beams gathered": lambda c: c.gather(0, torch.tensor([1, 1, 0]).view(-1, 1, 1, 1).expand(3, *c.shape[1:])),
    "tokens gathered": lambda c: c.gather(-2, torch.tensor([69, 3])[:, None].expand(*c.shape[:2], 2, c.shape[3])),
    "sequences by index": lambda c: c[torch.tensor([1, -1]), ...],
    "sequences by mask": lambda c: c[torch.tensor([False, True])],
    "heads by index": lambda c: c[:, torch.tensor([2, 0])],
    "tokens by index": lambda c: c[:, :, torch.tensor([69, 3, 64])],
    "tokens selected": lambda c: c[:, :, 3:].index_select(2, torch.tensor([66, 0])),
    "sequences repeated": lambda c: c.repeat_interleave(2, dim=0),
    "tokens rolled": lambda c: c.roll(-1, dims=-2),
    "tokens rolled right": lambda c: c.roll(68, dims=2),
    "sequences joined": lambda c: torch.cat([c, c[:1]]),
    "heads joined": lambda c: torch.cat([c[:, 1:], c], 1),
    "tokens joined": lambda c: torch.cat([c, c[:, :, 3:67], c[:, :, :1]], 2),
    "deepcopy": copy.deepcopy,
    "to the same device": lambda c: c.to("cpu", copy=True),
}


@pytest.mark.parametrize("take", COPIES.values(), ids=COPIES.keys())
@varied_layouts
def test_copies_of_token_vectors_stay_packed_and_are_not_quantized_again(layout, take):
    cache, plain = pair(layout)
    assert_same(take(cache), take(plain))


def test_a_gather_of_single_numbers_is_a_read():
    cache, plain = pair(INT8)
    for index in (torch.randint(0, cache.shape[0], cache.shape), torch.zeros(1, 1, 1, 1, dtype=torch.long)):
        gathered = cache.gather(0, index)
        assert type(gathered) is Tensor
        assert torch.equal(gathered, plain.dequantize().gather(0, index))


@pytest.mark.parametrize("take", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_copy_of_a_growing_cache_shares_nothing_with_it(take, mode):
    with mode():
        cache, plain = pair(INT8, growing=True)
        copied = take(cache)
        assert_same(copied, take(plain))
        copied.zero_()
        assert_same(cache, plain)


@every_layout
def test_copying_from_a_packed_cache_copies_its_bytes(layout):
    (cache, plain), (source, expected) = pair(layout), pair(layout)
    cache[:, :, 1:66] = source[:, :, 4:69]
    plain[:, :, 1:66] = expected[:, :, 4:69]
    cache.index_copy_(2, torch.tensor([69, 0]), source[:, :, 64:66])
    plain.index_copy_(2, torch.tensor([69, 0]), expected[:, :, 64:66])
    assert_same(cache, plain)


@every_order
def test_a_saved_cache_loads_with_weights_only(axes):
    cache, plain = pair(INT8, axes, growing=True)
    part, plain_part = cache.narrow(axes.index("t"), 3, 64), plain.narrow(axes.index("t"), 3, 64)
    file = io.BytesIO()
    torch.save({"cache": cache, "part": part}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same(loaded["cache"], plain)
    assert_same(loaded["part"], plain_part)
    x = values(*shape_of(axes, 2))
    dim = axes.index("t")
    assert_same(torch.cat([loaded["cache"], x], dim), torch.cat([plain, quantized(x, INT8)], dim))


def test_deepcopy_keeps_identity_and_attributes():
    cache, _ = pair(INT8)
    cache.note = ["mine"]
    first, second = copy.deepcopy([cache, cache])
    assert first is second
    assert first.note == ["mine"]
    assert first.note is not cache.note


def test_printing_shows_values_and_the_properties_of_the_cache():
    cache, plain = pair(INT8)
    text = repr(cache)
    assert repr(plain)[:60] in text
    assert "format='int8_per_token_head', role='key', shape=(2, 3, 70, 16), dtype=torch.float32" in text
    assert f"packed_bytes={cache.packed.nbytes}" in text
    assert cache.tolist() == plain.tolist()
    assert (cache.numpy() == plain.numpy()).all()


def test_memory_that_the_cache_does_not_have_is_not_handed_out():
    cache, _ = pair(INT8)
    with pytest.raises(ValueError, match="read-only"):
        cache.numpy()[0] = 0
    for share in (torch.from_dlpack, lambda c: c.share_memory_()):
        with pytest.raises(NotImplementedError, match="no plain memory to share"):
            share(cache)


def test_a_shallow_copy_is_the_same_cache():
    cache, plain = pair(INT8)
    copy.copy(cache).zero_()
    assert_same(cache, torch.zeros_like(plain))


def test_a_module_keeps_its_packed_buffer_through_its_state_dict():
    module, other = torch.nn.Module(), torch.nn.Module()
    cache, plain = pair(INT8)
    module.register_buffer("cache", cache)
    other.register_buffer("cache", PackedTensor.zeros(cache.shape, cache.dtype, INT8))
    other.load_state_dict(module.state_dict())
    assert_same(other.cache, plain)
    assert_same(other.to("cpu").cache, plain)


def test_views_see_each_others_writes():
    cache, plain = pair(INT8)
    views = [(c[:, :, 3:69], c[1], c.transpose(1, 2), c[:, 1:, 60:][..., 4:, :], c[:, :, -1]) for c in (cache, plain)]
    x = values(2, 3, 70, HEAD_DIM)
    cache.copy_(x)
    plain.copy_(quantized(x, INT8))
    for view, expected in zip(*views, strict=True):
        assert_same(view, expected)
        view.zero_()
        expected.zero_()
    assert_same(cache, plain)


def test_only_a_cache_from_its_first_token_with_all_axes_and_heads_is_whole():
    cache, _ = pair(INT8)
    for whole in (cache, cache[:, :, :65], cache.clone(), cache[:1].clone(), cache.transpose(1, 2), cache.mT):
        assert whole.is_whole
    for part in (cache[:, :, 1:], cache[0], cache[:, 1:], cache[:1], cache.permute(0, 3, 1, 2)):
        assert not part.is_whole


def random_step(rng: torch.Generator, layout: PackedLayout, caches: list[tuple[Tensor, Tensor]]) -> None:
    """Apply one random operation to the packed and to the plain tensor of one of the ``caches``."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    which = number(0, len(caches))
    cache, plain = caches[which]
    batch, heads, length, _ = cache.shape
    x = values(batch, heads, number(1, 70), HEAD_DIM, generator=rng)
    y = quantized(x, layout)
    positions = torch.randperm(length, generator=rng)[: x.shape[2]]
    n = positions.numel()
    begin = number(0, length)
    beams = torch.randint(0, batch, (2,), generator=rng)
    operations = [
        lambda c, v: torch.cat([c, v], 2),
        lambda c, v: torch.cat([c, v[:, :, :1]], -2),
        lambda c, v: c[..., :-number_of_crop, :],
        lambda c, v: c[:, :, begin:],
        lambda c, v: c.index_select(0, beams),
        lambda c, v: c.clone(),
        lambda c, v: c.index_copy_(2, positions, v[:, :, :n]),
        lambda c, v: c[:, :, begin : begin + v.shape[2]].copy_(v[:, :, : length - begin]) if c.numel() else c,
        lambda c, v: c.__setitem__((slice(None), slice(None), positions), v[:, :, :n]),
        lambda c, v: c[:, :, begin:].zero_(),
        lambda c, v: c.zero_(),
    ]
    number_of_crop = number(1, max(length, 2))
    operation = operations[number(0, len(operations))]
    results = operation(cache, x), operation(plain, y)
    if (
        isinstance(results[0], PackedTensor)
        and 0 < results[0].shape[2] < 400
        and results[0].shape[:2] == (batch, heads)
    ):
        if number(0, 2) or len(caches) > 4:
            caches[which] = results  # the older cache dies
        else:
            caches.append(results)  # the older cache stays, and must not notice what happens to the newer one


@pytest.mark.parametrize("num_steps", [16, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("growing", [False, True])
@every_layout
def test_any_sequence_of_operations_means_the_same_on_packed_and_plain_caches(layout, growing, num_steps):
    rng = torch.Generator().manual_seed(2 * LAYOUTS.index(layout) + growing)  # a separate random sequence for each case
    x = values(2, 2, 60, HEAD_DIM, generator=rng)
    caches = [(PackedTensor.from_dense(x, layout, growing=growing), quantized(x, layout))]
    for _ in range(num_steps):
        random_step(rng, layout, caches)
        for cache, plain in caches:
            assert_same(cache, plain)
