"""Calls that look like an earlier one repeat its launches, and give the results of their own arguments."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kvcompile.benching.workloads import Caches, Shape, parse_formats
from kvcompile.kernels import ops
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import Launcher, compiling_only
from kvcompile.kernels.lang.recipes import MOST_RECIPES, Recipe, Repeated
from kvcompile.packed.tensor import PackedTensor


class Sum:
    """A stand-in for a compiled kernel: out[i] = a[i] + b[i] + number, for ``count`` numbers of 8 bytes."""

    def __getitem__(self, grid):
        return lambda *arguments: self.run(*arguments)

    def run(self, out, a, b, count, number):
        addresses = [x if isinstance(x, int) else x.data_ptr() for x in (out, a, b)]
        out, a, b = ((ctypes.c_int64 * count).from_address(address) for address in addresses)
        out[:] = [x + y + number for x, y in zip(a, b, strict=True)]


class SumKernel:
    def __getitem__(self, grid):
        def launch(*arguments, **options):
            compiled = Sum()
            compiled[grid](*arguments)
            return compiled

        return launch

    def warmup(self, *arguments, grid, **options):
        return Sum()


@pytest.fixture
def add(monkeypatch):
    """``add(a, b, number, kind)`` and how often its Python code ran, in a list."""
    monkeypatch.setattr(launcher, "INTERPRETED", True)  # there is no device to switch to
    launch, calls = Launcher(SumKernel()), []

    def add(a, b, number, kind="plain"):
        calls.append(number)
        if kind == "computes":
            a = a * 1
        out = a.new_empty(a.shape)
        if kind == "in place":
            launch((1, 1, 1), (a, a, b), (), (a.numel(), number), (), {})
            return None
        if kind == "reads a global":
            b = ONES[: b.numel()].view(b.shape)
        halves = (out.view(-1)[:2], a.view(-1)[:2], b.view(-1)[:2])
        launch((1, 1, 1), halves, (), (2, number), (), {})
        rest = (out.view(-1)[2:], a.view(-1)[2:], b.view(-1)[2:])
        launch((1, 1, 1), rest, (), (a.numel() - 2, number), (), {})
        if kind == "pair":
            again = out.new_empty(out.shape)
            launch((1, 1, 1), (again, out, b), (), (a.numel(), 0), (), {})
            return again, out
        return a if kind == "argument" else out

    return Repeated(add), calls


ONES = torch.ones(100, dtype=torch.int64)


def ints(*shape):
    return torch.randint(-1000, 1000, shape)


def test_the_third_call_that_looks_the_same_runs_no_python_and_gives_its_own_sum(add):
    repeated, calls = add
    results = []
    for _ in range(5):
        a, b = ints(2, 3), ints(2, 3)
        results.append((repeated(a, b, 7), a + b + 7))
    assert all(torch.equal(result, expected) for result, expected in results)
    assert len({result.data_ptr() for result, _ in results}) == 5
    assert len(calls) == 2


def test_several_results_and_changed_arguments_are_repeated(add):
    repeated, calls = add
    for _ in range(4):
        a, b = ints(6), ints(6)
        again, out = repeated(a, b, 1, "pair")
        assert torch.equal(out, a + b + 1)
        assert torch.equal(again, a + 2 * b + 1)
        expected = a + b + 5
        assert repeated(a, b, 5, "in place") is None
        assert torch.equal(a, expected)
    assert len(calls) == 4


def test_another_number_shape_stride_or_alignment_is_another_recipe(add):
    repeated, calls = add
    a, b = ints(4, 4), ints(4, 4)
    for _ in range(3):
        assert torch.equal(repeated(a, b, 7), a + b + 7)
    for other, number in ((a, 8), (a[:2], 7), (ints(17)[1:].view(4, 4), 7)):
        done, right = len(calls), (b[: len(other)])
        assert torch.equal(repeated(other, right, number), other + right + number)
        assert len(calls) == done + 1


def test_later_arguments_may_share_memory_or_not(add):
    repeated, calls = add
    a, b = ints(8), ints(8)
    for x, y in ((a, a), (a, a), (a, b), (b, a), (b, b), (a, a)):
        assert torch.equal(repeated(x, y, 3), x + y + 3)
    assert len(calls) == 3  # a recording needs to tell its arguments apart


@pytest.mark.parametrize("kind", ["computes", "reads a global", "argument"])
def test_a_call_that_does_more_than_launch_is_never_repeated(kind, add):
    repeated, calls = add
    for count in range(1, 5):
        a, b = ints(5), ints(5)
        other = ONES[:5] if kind == "reads a global" else b
        expected = a if kind == "argument" else a + other + 2
        assert torch.equal(repeated(a, b, 2, kind), expected)
        assert len(calls) == count


def test_an_error_is_raised_again_and_never_recorded(add):
    repeated, calls = add
    for _ in range(3):
        with pytest.raises(AttributeError):
            repeated(None, None, 0)
    assert len(calls) == 3


def test_fake_tensors_and_blocks_that_only_compile_run_the_python(add):
    repeated, calls = add
    a, b = ints(5), ints(5)
    for _ in range(3):
        repeated(a, b, 2)
    with compiling_only():
        repeated(a, b, 2)
    assert len(calls) == 3
    with FakeTensorMode() as mode, compiling_only():
        assert repeated(mode.from_tensor(a), mode.from_tensor(b), 2).shape == (5,)
    assert len(calls) == 4


def test_recipes_are_forgotten_before_they_are_too_many(add):
    repeated, _ = add
    a, b = ints(3), ints(3)
    for number in range(MOST_RECIPES + 10):
        repeated(a, b, number)
    assert len(repeated._recipes) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize(
    "policy", ["bfloat16", "int8_per_token_head", "fp8_e4m3", "int4", "turboquant_k8v4", "turboquant_3bit_r128"]
)
def test_a_decode_step_on_a_gpu_repeats_its_launches(policy, q_len):
    shape = Shape(2, 8, 2, 128, 320)
    _, pair = parse_formats(policy)
    key, value = Caches(shape, pair).layouts
    repeated = {name: Repeated(operator.function) for name, operator in ops.REPEATED.items()}

    def tokens(num_tokens, dtype=torch.bfloat16):
        return torch.randn(2, 2, num_tokens, 128, dtype=dtype, device="cuda")

    for step in range(4):
        k_cache, v_cache = (PackedTensor.from_dense(tokens(320), layout) for layout in (key, value))
        new = tokens(q_len), tokens(q_len)
        positions = torch.arange(200 + step, 200 + step + q_len, device="cuda")
        mask = torch.rand(2, 1, q_len, 320, device="cuda") > 0.3
        query = torch.randn(2, 8, q_len, 128, dtype=torch.bfloat16, device="cuda")
        results = []
        for run in (lambda name: repeated[name], lambda name: ops.REPEATED[name].function):
            data = k_cache.packed.clone(), v_cache.packed.clone()
            run("store_pair")(*data, *new, positions, None, key.spec, value.spec)
            ranges = run("visible_range")(mask, q_len, 320)
            out = run("attention")(query, *data, mask, None, 320, False, 0.1, 0.0, key.spec, value.spec, 128, ranges)
            results.append((*data, ranges, out))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    names = ("store_pair", "visible_range", "attention")
    assert [[type(recipe) for recipe in repeated[name]._recipes.values()] for name in names] == [[Recipe]] * 3
