"""Weights may be set to zero where the scores are masked: rows without a visible key are then zero, not NaN or a mean.

ESPnet and WeNet do this with one mask; other models compute the mask anew, invert it, or multiply by it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from written_out_attention import H_KV, B, D, Form, H, Operands, S, operands, repeat_kv

import kvcompile
from kvcompile.packed.tensor import PackedTensor

Q_LEN = 3
LOWEST = torch.finfo(torch.float32).min

pytestmark = pytest.mark.usefixtures("without_code_generation", "seed_without_grad")


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ repeat_kv(k).mT


def zeros_after_infinity(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    hidden = ~o.allowed
    return scores_of(q, k).masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0) @ repeat_kv(v)


def zeros_after_a_constant(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    hidden = ~o.allowed
    weights = scores_of(q, k).masked_fill(hidden, -1e4).softmax(-1)
    return weights.masked_fill_(hidden, 0.0) @ repeat_kv(v)


def zeros_in_place_of_the_lowest_number(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = torch.where(o.allowed, scores_of(q, k), LOWEST).softmax(-1)
    return torch.where(o.allowed, weights, 0.0) @ repeat_kv(v)


def zeros_by_an_equal_mask(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(~o.allowed, -torch.inf).softmax(-1)
    return weights.masked_fill(~o.allowed, 0.0) @ repeat_kv(v)


def zeros_by_an_equal_comparison(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(o.allowed[:, :, :, :] == 0, -1e9).softmax(-1)
    return weights.masked_fill(o.allowed[:, :, :, :] == 0, 0.0) @ repeat_kv(v)


def zeros_by_the_inverse_mask(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(~o.allowed, -torch.inf).softmax(-1)
    return torch.where(o.allowed, weights, 0.0) @ repeat_kv(v)


def zeros_by_a_mask_of_new_bools(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(o.allowed.logical_not(), -torch.inf).softmax(-1)
    return weights.masked_fill((~o.allowed).contiguous(), 0.0) @ repeat_kv(v)


def zeros_by_a_factor_of_bools(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(~o.allowed, -1e9).softmax(-1)
    return (weights * o.allowed) @ repeat_kv(v)


def zeros_by_a_factor_of_floats(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = torch.where(o.allowed, scores_of(q, k), LOWEST).softmax(-1)
    return (o.allowed.to(weights.dtype) * weights) @ repeat_kv(v)


def zeros_by_a_safe_softmax(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
    return torch.ops.aten._safe_softmax(scores, -1) @ repeat_kv(v)


def zeros_in_rows_without_any_visible_key(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    """``F.scaled_dot_product_attention``, as ``run_decompositions`` of ``torch.export`` writes it out."""
    scores = scores_of(q, k) + torch.where(o.allowed, 0.0, -torch.inf)
    weights = torch.ops.aten._softmax(scores, -1, False)
    has_visible_key = torch.logical_not(torch.eq(scores, -torch.inf)).any(-1, keepdim=True)
    return torch.where(torch.logical_not(has_visible_key), torch.full_like(weights, 0), weights) @ repeat_kv(v)


def zeros_in_rows_whose_keys_are_all_hidden(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
    is_hidden = torch.isneginf(scores).all(-1)
    return scores.softmax(-1).masked_fill(is_hidden[..., None], 0.0) @ repeat_kv(v)


def zeros_elsewhere_than_in_rows_with_a_visible_key(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
    return torch.where((scores != -torch.inf).any(-1, keepdim=True), scores.softmax(-1), 0.0) @ repeat_kv(v)


WITH_ZEROS = (
    zeros_after_infinity,
    zeros_after_a_constant,
    zeros_in_place_of_the_lowest_number,
    zeros_by_an_equal_mask,
    zeros_by_an_equal_comparison,
    zeros_by_the_inverse_mask,
    zeros_by_a_mask_of_new_bools,
    zeros_by_a_factor_of_bools,
    zeros_by_a_factor_of_floats,
    zeros_by_a_safe_softmax,
    zeros_in_rows_without_any_visible_key,
    zeros_in_rows_whose_keys_are_all_hidden,
    zeros_elsewhere_than_in_rows_with_a_visible_key,
)


def factor_after_infinity(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(~o.allowed, -torch.inf).softmax(-1)
    return (weights * o.allowed) @ repeat_kv(v)


def zeros_by_another_mask(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(~o.allowed, -torch.inf).softmax(-1)
    return weights.masked_fill(o.bias > 1, 0.0) @ repeat_kv(v)


def zeros_by_one_of_two_masks(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    hidden = ~o.allowed
    weights = scores_of(q, k).masked_fill(hidden, -1e9).masked_fill(o.bias > 1, -1e9).softmax(-1)
    return weights.masked_fill(hidden, 0.0) @ repeat_kv(v)


def zeros_where_keys_are_visible(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = torch.where(o.allowed, scores_of(q, k), -1e9).softmax(-1)
    return torch.where(o.allowed, 0.0, weights) @ repeat_kv(v)


def zeros_by_a_mask_that_changes(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    hidden = ~o.allowed
    weights = scores_of(q, k).masked_fill(hidden, -1e9).softmax(-1)
    hidden[..., :2] = True
    return weights.masked_fill(hidden, 0.0) @ repeat_kv(v)


def a_small_weight_for_masked_keys(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    hidden = ~o.allowed
    return scores_of(q, k).masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden, 0.1) @ repeat_kv(v)


def zeros_by_a_new_mask_of_changed_bools(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    allowed = o.allowed.clone()
    weights = scores_of(q, k).masked_fill(~allowed, -1e9).softmax(-1)
    allowed[..., :2] = False
    return weights.masked_fill(~allowed, 0.0) @ repeat_kv(v)


def zeros_by_a_comparison_with_another_number(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(o.bias > 0.5, -1e9).softmax(-1)
    return weights.masked_fill(o.bias > 1.5, 0.0) @ repeat_kv(v)


def a_factor_where_keys_are_hidden(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(~o.allowed, -1e9).softmax(-1)
    return (weights * ~o.allowed) @ repeat_kv(v)


def a_factor_of_other_numbers(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(~o.allowed, -1e9).softmax(-1)
    return (weights * (o.allowed * 2.0)) @ repeat_kv(v)


def zeros_by_random_masks(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).masked_fill(torch.rand(S) > 0.5, -1e9).softmax(-1)
    return weights.masked_fill(torch.rand(S) > 0.5, 0.0) @ repeat_kv(v)


def zeros_in_rows_of_other_scores(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    others = scores_of(q, k).masked_fill(o.bias > 1, -torch.inf)
    weights = scores_of(q, k).masked_fill(~o.allowed, -torch.inf).softmax(-1)
    return weights.masked_fill((others == -torch.inf).all(-1, keepdim=True), 0.0) @ repeat_kv(v)


def zeros_in_rows_before_the_mask(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    is_hidden = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill_(~o.allowed, -torch.inf).softmax(-1).masked_fill(is_hidden, 0.0) @ repeat_kv(v)


def zeros_in_rows_with_a_visible_key(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
    return scores.softmax(-1).masked_fill((scores != -torch.inf).any(-1, keepdim=True), 0.0) @ repeat_kv(v)


def zeros_for_keys_that_all_heads_hide(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
    return scores.softmax(-1).masked_fill((scores == -torch.inf).all(1, keepdim=True), 0.0) @ repeat_kv(v)


def zeros_in_rows_after_a_shift(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
    scores = scores - scores.amax(-1, keepdim=True)  # NaN where every key is hidden
    return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0) @ repeat_kv(v)


def one_in_rows_without_a_visible_key(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
    return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 1.0) @ repeat_kv(v)


REFUSED = {
    zeros_by_another_mask: "masked_fill",
    zeros_by_one_of_two_masks: "masked_fill",
    zeros_where_keys_are_visible: "where",
    zeros_by_a_mask_that_changes: "masked_fill",
    a_small_weight_for_masked_keys: "masked_fill",
    zeros_by_a_new_mask_of_changed_bools: "masked_fill",
    zeros_by_a_comparison_with_another_number: "masked_fill",
    a_factor_where_keys_are_hidden: "mul",
    a_factor_of_other_numbers: "mul",
    zeros_by_random_masks: "masked_fill",
    zeros_in_rows_of_other_scores: "masked_fill",
    zeros_in_rows_before_the_mask: "masked_fill",
    zeros_in_rows_with_a_visible_key: "masked_fill",
    zeros_for_keys_that_all_heads_hide: "masked_fill",
    zeros_in_rows_after_a_shift: "masked_fill",
    one_in_rows_without_a_visible_key: "masked_fill",
}


def results(form: Form, on_unsupported: str) -> tuple[Tensor, Tensor, Tensor]:
    """The result of a compiled step and of eager code, and the compiled step's cache of keys.

    The second of three queries sees no key.
    """

    def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, o: Operands) -> Tensor:
        return form(q, kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v), o)

    q, k, v = (torch.randn(B, heads, Q_LEN, D) for heads in (H, H_KV, H_KV))
    caches = [torch.randn(B, H_KV, S, D) for _ in range(2)]
    o = operands(Q_LEN)
    o.allowed[:, :, 1] = False
    position = torch.arange(Q_LEN) + S - 20
    torch.manual_seed(7)
    expected = step(q, k, v, *(cache.clone() for cache in caches), position, o)
    torch.manual_seed(7)
    options = {"policy": "float32", "on_unsupported": on_unsupported}
    out = torch.compile(step, backend="kvquant", fullgraph=True, options=options)(q, k, v, *caches, position, o)
    return out, expected, caches[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", WITH_ZEROS, ids=lambda form: form.__name__)
def test_a_row_without_a_visible_key_is_zero(form: Form) -> None:
    out, expected, cache = results(form, "error")
    assert isinstance(cache, PackedTensor)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert not out[:, :, 1].any()


def test_a_factor_keeps_the_nan_of_a_row_without_a_visible_key() -> None:
    out, expected, cache = results(factor_after_infinity, "error")
    assert isinstance(cache, PackedTensor)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert out[:, :, 1].isnan().all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", REFUSED, ids=lambda form: form.__name__)
def test_zeros_elsewhere_are_refused(form: Form) -> None:
    out, expected, cache = results(form, "ignore")
    assert not isinstance(cache, PackedTensor)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == "unrecognised"
    assert f"{REFUSED[form]} is applied to its weights" in str(site.reason)


def test_a_safe_softmax_of_shifted_scores_is_refused() -> None:
    """The shift makes a row without a visible key NaN, and a safe softmax keeps NaN."""

    def shifted(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
        scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
        return torch.ops.aten._safe_softmax(scores - scores.amax(-1, keepdim=True), -1) @ repeat_kv(v)

    out, expected, _ = results(shifted, "ignore")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    (site,) = kvcompile.last_report().sites
    assert "a safe softmax is applied to its scores after a shift" in str(site.reason)
