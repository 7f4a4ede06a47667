"""Compiled code on a packed cache gives the same results as eager code, with any backend, through the same dispatch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from packed_caches import HEAD_DIM, INT8, assert_same, pair, values
from shared_fixtures import WITHOUT_VECTORS
from torch._dynamo.testing import CompileCounterWithBackend

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

X = values(2, 3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(1))


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compare(function, make_cache, *args, backend, **options):
    """Compares ``function`` in compiled and eager code on equal caches; returns the compiled cache and results."""
    cache = make_cache()
    expected_cache = make_cache()
    expected_cache.copy_(cache)
    result = torch.compile(function, backend=backend, fullgraph=True, **options)(cache, *args)
    expected = function(expected_cache, *args)
    assert torch.equal(cache, expected_cache)
    for one, other in zip(as_tuple(result), as_tuple(expected), strict=True):
        assert type(one) is type(other)
        if isinstance(one, PackedTensor):
            assert_same(one, other.dequantize())
        else:
            torch.testing.assert_close(one, other)
    return cache, result


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def fixed():
    return pair(INT8)[0]


def growing():
    return pair(INT8, growing=True)[0]


def decode_step(cache, position):
    cache.index_copy_(2, position, X)
    return F.scaled_dot_product_attention(X.repeat(1, 2, 1, 1), cache, cache, enable_gqa=True)


def repeat_kv_step(cache, position):
    cache[:, :, position] = X
    cache[1, :, position] = X[0]
    repeated = cache[:, :, None].expand(2, 3, 2, 70, HEAD_DIM).reshape(2, 6, 70, HEAD_DIM)
    return F.scaled_dot_product_attention(X.repeat(1, 2, 1, 1), repeated, repeated)


PROGRAMS = {
    "index_copy_": (lambda c: c.index_copy_(2, torch.tensor([3, 64]), X), fixed),
    "a slice": (lambda c: (c.__setitem__((slice(None), slice(None), slice(63, 65)), X), c.sum())[1], fixed),
    "a view of the cache": (lambda c: (c[:, :, 5:7].copy_(X), c.sum())[1], fixed),
    "zero_": (lambda c: (c.zero_(), c.sum())[1], fixed),
    "zero_ of a slice": (lambda c: (c[:, :, 3:67].zero_(), c.sum())[1], fixed),
    "a masked update": (lambda c: c.copy_(torch.where((torch.arange(70) == 5)[:, None], X[:, :, :1], c)), fixed),
    "scatter_": (lambda c: c.scatter_(2, torch.tensor([3, 69])[:, None].expand(2, 3, 2, HEAD_DIM), X), fixed),
    "a rolled window": (lambda c: c.roll(-1, -2), fixed),
    "beams reordered": (lambda c: c.index_select(0, torch.tensor([1, 1, 0])), growing),
    "beams gathered": (lambda c: c.gather(0, torch.tensor([1, 0]).view(-1, 1, 1, 1).expand(c.shape)), growing),
    "sequences repeated": (lambda c: c.repeat_interleave(2, dim=0), growing),
    "cat": (lambda c: torch.cat([c, X], -2), fixed),
    "cat of a crop": (lambda c: torch.cat([c[..., :-3, :], X], -2), growing),
    "cat and a window": (lambda c: (torch.cat([c, X], -2), torch.cat([c, X], -2)[:, :, -19:]), fixed),
    "a written view as input": (lambda c: c.index_copy_(2, torch.tensor([3, 4]), X), lambda: fixed()[:, :, 5:40]),
    "a crop as input": (lambda c: torch.cat([c, X], -2), lambda: growing()[:, :, :-3]),
    "a narrowed cache as input": (lambda c: torch.cat([c, X], -2), lambda: growing().narrow(2, 0, 60)),
    "narrow": (lambda c: (c.narrow(2, 5, 2).copy_(X), c.narrow(2, 4, 2).sum())[1], fixed),
    "matmul": (lambda c: X @ c.transpose(2, 3), fixed),
    "another dtype": (lambda c: c.to(torch.float16), fixed),
    "arithmetic in place": (lambda c: (c.mul_(0.5), c.sum())[1], fixed),
    "arithmetic on a copy": (lambda c: c.repeat_interleave(2, 1).mul_(0.25) + 0, fixed),
    "arithmetic on a clone": (lambda c: c.clone().add_(1) + 0, growing),
    "arithmetic on reordered beams": (lambda c: c.index_select(0, torch.tensor([1, 1, 0])).add_(1) + 0, growing),
    "arithmetic behind cat": (lambda c: torch.cat([c, X], 2).mul_(0.25) + 0, growing),
    "a write to a view without packed form": (lambda c: (c.view(-1, HEAD_DIM)[3:5].zero_(), c.sum())[1], fixed),
    "channels": (lambda c: (c[..., :4].add_(1), c.sum())[1], fixed),
    "a view that is read after a write": (lambda c: (c.flatten(0, 1), c.zero_())[0] + 1, fixed),
    "repeated heads": (lambda c: c[:, :, None].expand(2, 3, 2, 70, HEAD_DIM).reshape(2, 6, 70, HEAD_DIM) + 1, fixed),
    "a live view as input": (lambda c: (c.add_(1), c.sum())[1], lambda: fixed().flatten(0, 1)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("program", "make_cache"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_program_gives_the_same_results_compiled_without_graph_breaks(program, make_cache):
    compare(program, make_cache, backend="aot_eager")


@pytest.mark.parametrize(
    ("step", "dynamic", "options"),
    [
        (repeat_kv_step, True, WITHOUT_VECTORS),
        pytest.param(repeat_kv_step, True, {}, marks=pytest.mark.slow),
        pytest.param(decode_step, False, {}, marks=pytest.mark.slow),
    ],
)
def test_a_decode_step_means_the_same_under_inductor(step, dynamic, options):
    compare(step, fixed, torch.tensor([63, 64]), backend="inductor", dynamic=dynamic, options=options)


# One format with a rotation, a scale, a zero point and two codes a byte; one without a scale; one with two planes of
# codes. kernels/test_formats.py traces the code of every format.
@pytest.mark.parametrize(
    "name",
    [
        "fp8_e5m2_scale0.37",
        pytest.param("int4_per_token_head", marks=pytest.mark.slow),
        pytest.param("turboquant_2.5bit", marks=pytest.mark.slow),
    ],
)
def test_formats_of_every_structure_are_traceable_with_symbolic_sizes(name):
    layout = PackedLayout(name, "value", HEAD_DIM)
    compare(decode_step, lambda: pair(layout)[0], torch.tensor([63, 64]), backend="aot_eager", dynamic=True)


def test_it_works_in_inference_mode():
    with torch.inference_mode():
        compare(decode_step, fixed, torch.tensor([63, 64]), backend="aot_eager")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_view_that_a_graph_returns_is_a_view_of_its_input(backend):
    cache, views = compare(lambda c: (c[:, :, :5], c[1], c[:, :, 7:66].transpose(1, 2)), fixed, backend=backend)
    for view in views:
        view.zero_()
    assert cache[:, :, 7:66].abs().max() == 0
    assert cache[0, :, 66:].abs().max() > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_growing_cache_is_compiled_once_for_all_lengths(backend):
    counter = CompileCounterWithBackend(backend)

    def append(cache, x):
        cache = torch.cat([cache, x], 2)
        return F.scaled_dot_product_attention(x, cache, cache), cache

    compiled = torch.compile(append, backend=counter, fullgraph=True)
    cache = expected_cache = pair(INT8, tokens=60, growing=True)[0]
    for _ in range(70):  # crosses the block boundaries at 64 and 128
        x = values(2, 3, 1, HEAD_DIM)
        result, cache = compiled(cache, x)
        expected, expected_cache = append(expected_cache, x)
        torch.testing.assert_close(result, expected)
    assert torch.equal(cache, expected_cache)
    assert cache.shape[2] == 130
    assert counter.frame_count <= 2


REFUSED = {
    "another shape": (lambda c: c.unsqueeze_(0), fixed, "would change the shape or the storage"),
    "a write to a growing cache": (lambda c: c.zero_(), growing, "writes in place to a growing packed cache"),
}


@pytest.mark.parametrize(("program", "make_cache", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_an_operation_without_a_right_result_raises_while_compiling(program, make_cache, reason):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch.compile(program, backend="eager", fullgraph=True)(make_cache())


def test_two_inputs_that_view_one_cache_are_refused_when_one_is_written():
    def write_and_read(cache, view):
        cache.index_copy_(2, torch.tensor([3, 4]), X)
        return view.sum()

    cache = fixed()
    with pytest.raises(Exception, match="one of its inputs is a view of a packed cache"):
        torch.compile(write_and_read, backend="aot_eager", fullgraph=True)(cache, cache[:, :, :66])


def test_a_window_whose_start_is_symbolic_cannot_leave_a_functional_graph():
    with pytest.raises(Exception, match="starts at a token which is only known at run time"):
        torch.compile(lambda c: torch.cat([c, X], 2)[:, :, -19:], backend="aot_eager", fullgraph=True)(growing())


def test_a_refused_graph_may_crop_its_packed_cache():
    """The prompt packs the cache. Later graphs cannot move tokens in this format, and return plain tensors."""
    weights = torch.randn(3, 32, 32) / 32**0.5

    def step(x, cache):
        q, k, v = x @ weights[0], x @ weights[1], x @ weights[2]
        keys, values = (torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)) if cache is not None else (k, v)
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=cache is None)
        first = max(0, keys.shape[2] - 48)
        return out, (keys[:, :, first:], values[:, :, first:])

    policy = {"default": {"dtype": "int8_per_token_head"}, "residual_length": 64}
    options = {"policy": policy, "on_unsupported": "ignore"}
    compiled = torch.compile(step, backend="kvquant", options=options)
    expected, cache, kinds = None, None, []
    with torch.no_grad():
        for n in (40, *[1] * 10):
            x = torch.randn(1, 2, n, 32)
            (reference, expected), (out, cache) = step(x, expected), compiled(x, cache)
            torch.testing.assert_close(out, reference)  # these tokens are in full precision
            kinds.append(type(cache[0]))
    assert kinds == [PackedTensor] + [torch.Tensor] * 10


@pytest.mark.parametrize("make_cache", [fixed, growing, lambda: fixed()[..., :8]], ids=["fixed", "growing", "channels"])
def test_a_deep_copy_breaks_the_graph_and_is_a_tensor_of_its_own(make_cache):
    def step(cache):
        twin = copy.deepcopy(cache)
        twin.zero_()
        return twin, cache + 1

    cache = make_cache()
    before = cache.clone() * 1
    twin, result = torch.compile(step, backend="aot_eager")(cache)
    assert not (twin * 1).any()
    assert torch.equal(cache * 1, before)
    assert torch.equal(result, before + 1)
