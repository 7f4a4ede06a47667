"""Caches that a graph only reads, and packed tensors that are not caches: read packed, or as dequantized values."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_refusals import D, S, inputs, run, sdpa, step, write
from torch import Tensor

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.calling import PackedInput
from kvcompile.passes.prove.formats import _layout
from kvcompile.passes.refusal import Reason, Refusal


def packed_copy(cache: Tensor, role: str, growing: bool = False) -> PackedTensor:
    return PackedTensor.from_dense(cache, PackedLayout("fp8_e4m3", role, D), growing=growing)


def packed_caches(growing: bool = False) -> list[Any]:
    q, k, v, kc, vc, pos = inputs()
    keys, values = packed_copy(kc, "key", growing), packed_copy(vc, "value", growing)
    return [q, k, v, keys, values, pos]


def expected_step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
    """The result of :func:`step` on packed caches in eager mode."""
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc.dequantize(), vc.dequantize())


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.usefixtures("without_code_generation")
def test_a_packed_tensor_that_is_used_otherwise_is_passed_as_its_values_beside_packed_caches(growing: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, other: Tensor, view: Tensor) -> Any:
        return step(q, k, v, kc, vc, pos), other.sum(), other, view.amax(-1)

    other = packed_caches(growing)[3]
    view = packed_caches()[4][:1, :, 3:].transpose(1, 2)
    out, total, same, largest = run(fn, [*packed_caches(), other, view], on_unsupported="error")
    torch.testing.assert_close(out, expected_step(*packed_caches()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total, other.dequantize().sum())
    assert same is other
    assert torch.equal(largest, view.dequantize().amax(-1))


@pytest.mark.usefixtures("without_code_generation")
def test_a_packed_tensor_that_the_graph_changes_otherwise_is_quantized_anew() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, other: Tensor) -> Any:
        other.copy_(other.flip(2) * 2)
        return step(q, k, v, kc, vc, pos)

    other = packed_caches()[3]
    expected = packed_copy(other.dequantize().flip(2) * 2, "key")
    out = run(fn, [*packed_caches(), other], on_unsupported="error")
    torch.testing.assert_close(out, expected_step(*packed_caches()), rtol=1e-4, atol=1e-5)
    assert torch.equal(other.packed, expected.packed)


@pytest.mark.usefixtures("without_code_generation")
def test_a_growing_cache_that_is_written_in_place_is_written_between_graphs() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
        write(kc, k, pos), write(vc, v, pos)
        return sdpa(q, kc, vc)

    args, expected_args = packed_caches(growing=True), packed_caches(growing=True)
    with torch.no_grad():
        expected = fn(*expected_args)
    torch.testing.assert_close(run(fn, args, on_unsupported="ignore"), expected, rtol=1e-4, atol=1e-5)
    for cache, other in zip(args[3:5], expected_args[3:5], strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.packed, other.packed)


def test_a_write_to_a_growing_cache_that_came_into_a_graph_would_be_refused() -> None:
    cache: Any = SimpleNamespace(role="key", input_axes="bhtd", kind="static", head_dim=D)
    with pytest.raises(Refusal, match="its key cache is growing") as raised:
        _layout(cache, None, PackedInput(PackedLayout("fp8_e4m3", "key", D), "bhtd", True))
    assert raised.value.reason is Reason.growing_written


@pytest.mark.usefixtures("without_code_generation")
def test_caches_that_change_places_are_read_by_their_values() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
        return sdpa(q, kc, vc)

    q, k, v, kc, vc, pos = packed_caches()
    expected = sdpa(q, vc.dequantize(), kc.dequantize())
    torch.testing.assert_close(run(fn, [q, k, v, vc, kc, pos], on_unsupported="ignore"), expected, rtol=1e-4, atol=1e-5)
    (site,) = last_report().sites
    assert site.reason_code == "packed_otherwise"
    assert "its key cache is packed already, as a value" in site.reason


@pytest.mark.parametrize(
    ("growing", "generates_code"),
    [
        (True, False),
        (False, False),
        *(pytest.param(growing, True, marks=pytest.mark.slow) for growing in (True, False)),
    ],
)
def test_a_packed_cache_that_is_only_read_is_read_packed(
    growing: bool, generates_code: bool, request: pytest.FixtureRequest
) -> None:
    """Generated code reads such caches of fixed size in test_hidden_rows.py, too."""
    if not generates_code:
        request.getfixturevalue("without_code_generation")

    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
        return sdpa(q, kc, vc)

    args = packed_caches(growing)
    expected = sdpa(args[0], args[3].dequantize(), args[4].dequantize())
    torch.testing.assert_close(run(fn, args, on_unsupported="error"), expected, rtol=1e-4, atol=1e-5)
    (site,) = last_report().sites
    assert [cache.kind for cache in site.caches] == ["read-only", "read-only"]


@pytest.mark.usefixtures("without_code_generation")
def test_a_plain_cache_that_is_only_read_is_packed_if_an_object_holds_it() -> None:
    @dataclass
    class EncoderCache:
        keys: Tensor
        values: Tensor

    def fn(q: Tensor, cache: EncoderCache) -> Tensor:
        return sdpa(q, cache.keys, cache.values)

    q, _, _, keys, values, _ = inputs()
    expected = sdpa(q, *(packed_copy(x, role).dequantize() for x, role in ((keys, "key"), (values, "value"))))
    cache = EncoderCache(keys, values)
    for _ in range(2):
        out = run(fn, [q, cache], policy="fp8_e4m3", on_unsupported="error")
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert isinstance(cache.keys, PackedTensor)
        assert isinstance(cache.values, PackedTensor)


@pytest.mark.usefixtures("without_code_generation")
def test_tensors_of_a_module_that_are_only_read_stay_plain() -> None:
    class Prefix(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys, self.values = (torch.nn.Parameter(x) for x in inputs()[3:5])
            self.register_buffer("more_keys", inputs()[3])

        def forward(self, q: Tensor) -> Tensor:
            return sdpa(q, self.keys, self.values) + sdpa(q, self.more_keys, self.values)

    module = Prefix().requires_grad_(False)
    q = inputs()[0]
    torch.testing.assert_close(run(module, [q], on_unsupported="ignore"), module(q), rtol=1e-6, atol=1e-6)
    assert [site.reason_code for site in last_report().sites] == ["plain_read_only"] * 2
    assert type(module.more_keys) is Tensor


@pytest.mark.usefixtures("without_code_generation")
def test_two_attentions_with_different_masks_may_share_a_cache_and_return_it() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
        write(kc, k, pos), write(vc, v, pos)
        masks = torch.arange(S) <= pos[:, None], torch.arange(S)[None] < 3
        first, second = (sdpa(q, kc, vc, mask) for mask in masks)
        return first, second, kc

    args = packed_caches()
    expected = fn(*packed_caches())
    out = run(fn, args, on_unsupported="error")
    for one, other in zip(out[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert out[2] is args[3]
    assert torch.equal(args[3].packed, expected[2].packed)
