"""Code that is not attention has no marker; attention that packed caches cannot compute has one with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marked_attention import Q, inputs, marked
from torch import Tensor
from written_out_attention import H_KV, B, D, Form, H, Operands, repeat_kv


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ repeat_kv(k).mT


def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return scores_of(q, k).softmax(-2) @ repeat_kv(v)


def softmax_over_heads(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return scores_of(q, k).softmax(1) @ repeat_kv(v)


def no_values(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return scores_of(q, k).softmax(-1)


def weights_of_queries(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return scores_of(q, k).softmax(-1).mT @ q


def weights_of_queries_by_operators(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return torch.ops.aten.mT(torch.ops.aten.softmax(scores_of(q, k), -1)) @ q


def logsumexp_of_columns(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    return (scores - scores.logsumexp(-2, keepdim=True)).exp() @ repeat_kv(v)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).mT @ v).repeat_interleave(H // H_KV, 1)


def log_softmax(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return scores_of(q, k).log_softmax(-1) @ repeat_kv(v)


def gram_matrix_of_exponentials(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return q.exp() @ k.exp().mT.repeat_interleave(H // H_KV, 1)


def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return scores_of(q, k).sigmoid() @ repeat_kv(v)


def expert_router(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    routing = (q.flatten(0, 2) @ torch.ones(D, 5)).softmax(-1)
    return routing.unsqueeze(-1) * torch.ones(5, D)


def soft_embeddings(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (q @ torch.ones(D, 5)).softmax(-1) @ torch.ones(5, D)


def residual_added_in_the_product(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = scores_of(q, k).softmax(-1).flatten(0, 1)
    return torch.baddbmm(q.flatten(0, 1), weights, repeat_kv(v).flatten(0, 1)).unflatten(0, (B, H))


def integer_products(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return scores_of(q.int(), k.int()).float().softmax(-1) @ repeat_kv(v)


def sequence_by_sequence(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return torch.vmap(F.scaled_dot_product_attention)(q, repeat_kv(k), repeat_kv(v))


def factor_by_factor(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return torch.vmap(lambda factor: F.scaled_dot_product_attention(q * factor, repeat_kv(k), repeat_kv(v)))(o.sinks)


def head_by_head(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return torch.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, in_dims=1)(q, repeat_kv(k), repeat_kv(v))


@pytest.mark.parametrize(
    "fn",
    [
        softmax_over_queries,
        softmax_over_heads,
        no_values,
        weights_of_queries,
        weights_of_queries_by_operators,
        logsumexp_of_columns,
        linear_attention,
        log_softmax,
        gram_matrix_of_exponentials,
        sigmoid_attention,
        expert_router,
        soft_embeddings,
        residual_added_in_the_product,
        integer_products,
    ],
    ids=lambda fn: fn.__name__,
)
def test_code_that_is_not_attention_is_not_marked(fn: Form) -> None:
    assert marked(fn) == []


@pytest.mark.parametrize("fn", [sequence_by_sequence, factor_by_factor, head_by_head], ids=lambda fn: fn.__name__)
def test_attention_under_vmap_is_not_marked_because_a_marker_has_no_rule_for_the_hidden_dimension(fn: Form) -> None:
    assert marked(fn) == []


def weights_returned(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Any:
    weights = scores_of(q, k).softmax(-1)
    return weights @ repeat_kv(v), weights


def sum_of_exponentials_used(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    return scores.softmax(-1) @ repeat_kv(v) * torch.sigmoid(scores.logsumexp(-1, keepdim=True))


def heads_weighted(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (scores_of(q, k).softmax(-1) * o.sinks[:, None, None]) @ repeat_kv(v)


def dropout_of_scores(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return F.dropout(scores_of(q, k), 0.5).softmax(-1) @ repeat_kv(v)


def largest_scores_only(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    return scores.masked_fill(scores < 0, -torch.inf).softmax(-1) @ repeat_kv(v)


def masked_by_a_small_constant(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return scores_of(q, k).masked_fill(~o.allowed, -10.0).softmax(-1) @ repeat_kv(v)


def constants_that_are_equal_before_a_scale(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -1e9) / 8.0
    return scores.masked_fill(o.alibi.unflatten(0, (B, H)) > 9, -1e9).softmax(-1) @ repeat_kv(v)


def one_number_in_two_dtypes(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).bfloat16().masked_fill(~o.allowed, -1e9).float()
    return scores.masked_fill(o.alibi.unflatten(0, (B, H)) > 9, -1e9).softmax(-1) @ repeat_kv(v)


def bias_after_a_small_constant(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (scores_of(q, k).masked_fill(~o.allowed, -1e9) + o.bias).softmax(-1) @ repeat_kv(v)


def sinks_beside_a_small_constant(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -1e9)
    scores = torch.cat([scores, o.sinks.view(1, -1, 1, 1).expand(B, H, Q, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ repeat_kv(v)


def constant_beside_shifted_scores(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (scores_of(q, k) - 20000.0).masked_fill(~o.allowed, -10000.0).softmax(-1) @ repeat_kv(v)


def masked_by_a_computed_number(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return torch.where(o.allowed, scores_of(q, k), o.bias).softmax(-1) @ repeat_kv(v)


def masked_by_a_changed_constant(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    constant = torch.full((), -torch.inf)
    constant.add_(1e38).clamp_(min=-1.0)
    return torch.where(o.allowed, scores_of(q, k), constant).softmax(-1) @ repeat_kv(v)


def scaled_along_keys(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (scores_of(q, k) * o.bias).softmax(-1) @ repeat_kv(v)


def scaled_by_a_negative_number(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (scores_of(q, k) * -1.0).softmax(-1) @ repeat_kv(v)


def softcap_after_a_mask(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (2 * torch.tanh(scores_of(q, k) + o.additive)).softmax(-1) @ repeat_kv(v)


def sinks_kept(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.cat([scores_of(q, k), o.sinks.view(1, -1, 1, 1).expand(B, H, Q, 1)], -1)
    return scores.softmax(-1) @ F.pad(repeat_kv(v), (0, 0, 0, 1))


def another_key_dropped(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.cat([scores_of(q, k), o.sinks.view(1, -1, 1, 1).expand(B, H, Q, 1)], -1)
    return scores.softmax(-1)[..., 1:] @ repeat_kv(v)


def sinks_beside_shifted_scores(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    scores = scores - scores.amax(-1, keepdim=True)
    scores = torch.cat([scores, o.sinks.view(1, -1, 1, 1).expand(B, H, Q, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ repeat_kv(v)


def maximum_of_columns_subtracted(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ repeat_kv(v)


def bits_reinterpreted(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).view(torch.int32).view(torch.float32)
    return scores.softmax(-1) @ repeat_kv(v)


def one_score_assigned(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    scores[..., 0] = -torch.inf
    return scores.softmax(-1) @ repeat_kv(v)


def changed_through_a_view(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    scores.view(-1).mul_(2.0)
    return scores.softmax(-1) @ repeat_kv(v)


def mask_changed_in_between(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    mask = o.additive.clone()
    weights = (scores_of(q, k) + mask).softmax(-1)
    mask.zero_()
    return weights @ repeat_kv(v)


def scores_added_to_the_mask(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = o.bias.expand(B, -1, -1, -1).clone()
    scores += scores_of(q, k)
    return scores.softmax(-1) @ repeat_kv(v)


def keys_changed_in_between(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = (q[:, :H_KV] @ k.mT).softmax(-1)
    k.index_fill_(2, torch.tensor([0]), 0.0)
    return weights @ v


def changed_by_an_activation(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    F.hardswish(scores, True)
    return scores.softmax(-1) @ repeat_kv(v)


def float64_inside(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return scores_of(q, k).softmax(-1, dtype=torch.float64).to(v.dtype) @ repeat_kv(v)


def one_query_for_all_heads(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (q[:, :1] @ k.mT).softmax(-1) @ v


def tiled_heads(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q.unflatten(1, (-1, H_KV)) @ k.unsqueeze(1).mT
    return (scores.softmax(-1) @ v.unsqueeze(1)).flatten(1, 2)


def normalised_after_the_values(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials @ repeat_kv(v) / exponentials.sum(-1, keepdim=True)


def logsumexp_of_other_scores(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    total = scores.logsumexp(-1, keepdim=True)
    return (scores + o.additive - total).exp() @ repeat_kv(v)


def logsumexp_along_the_wrong_rows(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k)[:, :, :Q].mT
    return (scores - scores.logsumexp(-1)[..., None, :]).exp() @ repeat_kv(v)[:, :, :Q]


def logsumexp_returned(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Any:
    scores = scores_of(q, k)
    total = scores.logsumexp(-1, keepdim=True)
    return (scores - total).exp() @ repeat_kv(v), total


def logsumexp_subtracted_twice(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    return torch.sub(scores, scores.logsumexp(-1, keepdim=True), alpha=2).exp() @ repeat_kv(v)


def logarithms_scaled(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (scores_of(q, k).log_softmax(-1) * 0.5).exp() @ repeat_kv(v)


def one_more_than_the_sum_of_shifted_exponentials(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / (1 + exponentials.sum(-1, keepdim=True)) @ repeat_kv(v)


def masked_by_a_product_with_floats(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (scores_of(q, k) * o.bias - 1e10 * (1 - o.bias)).softmax(-1) @ repeat_kv(v)


def masked_by_a_product_with_scaled_bools(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    b = o.allowed.to(q.dtype) * 0.5
    return (scores_of(q, k) * b - 1e10 * (1 - b)).softmax(-1) @ repeat_kv(v)


def masked_by_a_product_with_changed_bools(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    b = o.allowed.to(q.dtype)
    b[..., 0] = 0.5
    return (scores_of(q, k) * b - 1e10 * (1 - b)).softmax(-1) @ repeat_kv(v)


def masked_by_products_with_different_bools(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    b, other = o.allowed.to(q.dtype), (o.bias > 0).to(q.dtype)
    return (scores_of(q, k) * b - 1e10 * (1 - other)).softmax(-1) @ repeat_kv(v)


def masked_by_a_product_and_its_complement(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    b = o.allowed.to(q.dtype)
    return (scores_of(q, k) * b - 1e10 * b).softmax(-1) @ repeat_kv(v)


def masked_by_a_product_in_another_order(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    b = (o.bias > 0).to(q.dtype)[:, :, :, :Q]
    scores = (q @ repeat_kv(k)[:, :, :Q].mT) * b
    return (scores.mT - 1e10 * (1 - b)).mT.softmax(-1) @ repeat_kv(v)[:, :, :Q]


def masked_by_a_small_product(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    b = o.allowed.to(q.dtype)
    return (scores_of(q, k) * b - 10 * (1 - b)).softmax(-1) @ repeat_kv(v)


def masked_by_a_product_after_a_shift(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    b, scores = o.allowed.to(q.dtype), scores_of(q, k)
    return ((scores - scores.amax(-1, keepdim=True)) * b - 1e10 * (1 - b)).softmax(-1) @ repeat_kv(v)


def sinks_beside_a_sum_with_another_maximum(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = scores_of(q, k), o.sinks.reshape(-1, 1, 1)
    top = scores.amax(-1, keepdim=True)
    exponentials = (scores - top).exp()
    total = exponentials.sum(-1, keepdim=True) + (sinks - torch.maximum(top, sinks)).exp()
    return exponentials / total @ repeat_kv(v)


def sinks_beside_a_sum_of_scaled_scores(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = scores_of(q, k), o.sinks.reshape(-1, 1, 1)
    top = scores.amax(-1, keepdim=True)
    exponentials = ((scores - top) * 0.5).exp()
    return exponentials / (exponentials.sum(-1, keepdim=True) + (sinks - top).exp()) @ repeat_kv(v)


def sinks_beside_a_sum_of_scores_shifted_twice(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = scores_of(q, k) - 1.0, o.sinks.reshape(-1, 1, 1)
    top = scores.amax(-1, keepdim=True)
    exponentials = (scores - top).exp()
    return exponentials / (exponentials.sum(-1, keepdim=True) + (sinks - top).exp()) @ repeat_kv(v)


def sinks_beside_a_sum_without_their_exponential(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = scores_of(q, k), o.sinks.reshape(-1, 1, 1)
    top = scores.amax(-1, keepdim=True)
    exponentials = (scores - top).exp()
    return exponentials / (exponentials.sum(-1, keepdim=True) + (sinks - top)) @ repeat_kv(v)


def logarithm_of_a_sum_with_sinks(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = scores_of(q, k), o.sinks.reshape(-1, 1, 1)
    top = scores.amax(-1, keepdim=True)
    shifted = scores - top
    total = shifted.exp().sum(-1, keepdim=True) + (sinks - top).exp()
    return (shifted - total.log()).exp() @ repeat_kv(v)


def sinks_added_twice(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = scores_of(q, k), o.sinks.reshape(-1, 1, 1)
    top = scores.amax(-1, keepdim=True)
    exponentials, of_sinks = (scores - top).exp(), (sinks - top).exp()
    return exponentials / (exponentials.sum(-1, keepdim=True) + of_sinks + of_sinks) @ repeat_kv(v)


def sinks_beside_a_maximum_that_changes(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = scores_of(q, k), o.sinks.reshape(-1, 1, 1)
    top = scores.amax(-1, keepdim=True)
    exponentials = (scores - top).exp()
    top.mul_(2)
    return exponentials / (exponentials.sum(-1, keepdim=True) + (sinks - top).exp()) @ repeat_kv(v)


def sinks_that_change_in_place(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = scores_of(q, k), o.sinks.reshape(-1, 1, 1).expand(*q.shape[:3], 1).clone()
    top = scores.amax(-1, keepdim=True)
    exponentials = (scores - top).exp()
    return exponentials / (exponentials.sum(-1, keepdim=True) + sinks.sub_(top).exp()) @ repeat_kv(v)


def sinks_subtracted_from_the_maximum(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = scores_of(q, k), o.sinks.reshape(-1, 1, 1)
    top = scores.amax(-1, keepdim=True)
    exponentials = (scores - top).exp()
    return exponentials / (exponentials.sum(-1, keepdim=True) + (top - sinks).exp()) @ repeat_kv(v)


UNSUPPORTED: dict[Form, str] = {
    sinks_beside_a_sum_with_another_maximum: "div is applied to the exponentials of its scores",
    sinks_beside_a_sum_of_scaled_scores: "div is applied to the exponentials of its scores",
    sinks_beside_a_sum_of_scores_shifted_twice: "div is applied to the exponentials of its scores",
    sinks_beside_a_sum_without_their_exponential: "div is applied to the exponentials of its scores",
    logarithm_of_a_sum_with_sinks: "exponentials are multiplied with the values before",
    sinks_added_twice: "div is applied to the exponentials of its scores",
    sinks_beside_a_maximum_that_changes: "div is applied to the exponentials of its scores",
    sinks_that_change_in_place: "in place before the attention ends",
    sinks_subtracted_from_the_maximum: "div is applied to the exponentials of its scores",
    masked_by_a_product_with_floats: "scores * b - 1e10 * (1 - b) with b = mask.to(scores.dtype)",
    masked_by_a_product_with_scaled_bools: "varies along the keys",
    masked_by_a_product_with_changed_bools: "varies along the keys",
    masked_by_products_with_different_bools: "varies along the keys",
    masked_by_a_product_and_its_complement: "varies along the keys",
    masked_by_a_product_in_another_order: "varies along the keys",
    masked_by_a_small_product: "masked by -10, which is not far below",
    masked_by_a_product_after_a_shift: "from which a number was subtracted",
    weights_returned: "also used by the caller",
    sum_of_exponentials_used: "also used by logsumexp",
    heads_weighted: "mul is applied to its weights",
    dropout_of_scores: "dropout is applied to its scores",
    largest_scores_only: "also used by lt",
    masked_by_a_small_constant: "masked by -10, which is not far below",
    constants_that_are_equal_before_a_scale: "different constants, -1e+09 and -1.25e+08",
    one_number_in_two_dtypes: "different constants, -1e+09 and -9.98244e+08",
    bias_after_a_small_constant: "masked by -1e+09 beside a bias",
    sinks_beside_a_small_constant: "masked by -1e+09 beside a bias, a factor or sinks",
    constant_beside_shifted_scores: "from which a number was subtracted",
    masked_by_a_computed_number: "something other than a constant",
    masked_by_a_changed_constant: "something other than a constant",
    scaled_along_keys: "varies along the keys",
    scaled_by_a_negative_number: "scaled by -1.0",
    softcap_after_a_mask: "tanh is applied to its scores after a mask",
    sinks_kept: "not dropped",
    another_key_dropped: "some of its scores or weights are taken out",
    sinks_beside_shifted_scores: "concatenated to something other than one column of sinks",
    maximum_of_columns_subtracted: "maximum along another dimension",
    bits_reinterpreted: "view regroups",
    one_score_assigned: "some of its scores are assigned to",
    changed_through_a_view: "in place",
    mask_changed_in_between: "mask.zero_()) changes clone (",
    scores_added_to_the_mask: "in place before the attention ends",
    keys_changed_in_between: "in place before the attention ends",
    changed_by_an_activation: "hardswish is applied to its scores",
    float64_inside: "computed in float64",
    one_query_for_all_heads: "query is broadcast",
    tiled_heads: "are not neighbours",
    normalised_after_the_values: "multiplied with the values before they are divided by their sum",
    logsumexp_of_other_scores: "exponentials are multiplied with the values before",
    logsumexp_along_the_wrong_rows: "number for each row is broadcast along another dimension",
    logsumexp_returned: "also used by the caller",
    logsumexp_subtracted_twice: "exponentials are multiplied with the values before",
    logarithms_scaled: "mul is applied to the logarithm of its weights",
    one_more_than_the_sum_of_shifted_exponentials: "div is applied to the exponentials",
}


@pytest.mark.parametrize("fn", UNSUPPORTED, ids=lambda fn: fn.__name__)
def test_attention_that_packed_caches_cannot_compute_is_marked_with_the_reason(fn: Form) -> None:
    (marker,) = marked(fn)
    assert marker.unsupported is not None
    assert UNSUPPORTED[fn] in marker.unsupported


# Attention of another kind: it has a marker if its keys and values are caches


def softmax_of_columns(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (repeat_kv(k) @ q.mT).softmax(-1).mT @ repeat_kv(v)


def exponentials_over_heads(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    exponentials = scores_of(q, k).exp()
    return exponentials / exponentials.sum(1, keepdim=True) @ repeat_kv(v)


def mix(scores: Tensor) -> Tensor:
    return torch.einsum("bhqk,hg->bgqk", scores, torch.eye(H))


def heads_mixed_before_the_softmax(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return mix(scores_of(q, k) / 8).add(o.additive).softmax(-1) @ repeat_kv(v)


def heads_mixed_after_the_softmax(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return mix(scores_of(q, k).softmax(-1)) @ repeat_kv(v)


def heads_mixed_before_and_after_the_softmax(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return mix(mix(scores_of(q, k)).softmax(-1)) @ repeat_kv(v)


def heads_mixed_by_linear_layers(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = F.linear(scores_of(q, k).permute(0, 2, 3, 1), torch.eye(H)).softmax(2)
    return F.linear(weights, torch.eye(H)).permute(0, 3, 1, 2) @ repeat_kv(v)


def heads_mixed_by_a_convolution(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return F.conv2d(scores_of(q, k), torch.eye(H)[:, :, None, None]).softmax(-1) @ repeat_kv(v)


def heads_mixed_by_a_matrix_on_the_left(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (torch.eye(H) @ scores_of(q, k).transpose(1, 2)).transpose(1, 2).softmax(-1) @ repeat_kv(v)


def heads_of_batched_products_mixed(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.bmm(q.flatten(0, 1), repeat_kv(k).flatten(0, 1).mT).view(B, H, Q, -1)
    return torch.bmm(mix(scores).softmax(-1).flatten(0, 1), repeat_kv(v).flatten(0, 1)).view(B, H, Q, D)


def one_softmax_for_several_batches(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (q[:1] @ repeat_kv(k[:1]).mT).softmax(-1) @ repeat_kv(v)


OTHER_SOFTMAX = "its softmax runs over another dimension than the tokens of its keys"

ON_CACHES: dict[Form, str] = {
    softmax_over_queries: OTHER_SOFTMAX,
    softmax_over_heads: OTHER_SOFTMAX,
    softmax_of_columns: OTHER_SOFTMAX,
    logsumexp_of_columns: OTHER_SOFTMAX,
    exponentials_over_heads: OTHER_SOFTMAX,
    one_softmax_for_several_batches: "its weights are broadcast in the product with its values",
    heads_mixed_before_the_softmax: "einsum (",
    heads_mixed_after_the_softmax: "einsum (",
    heads_mixed_before_and_after_the_softmax: "einsum (",
    heads_mixed_by_linear_layers: "linear (",
    heads_mixed_by_a_convolution: "conv2d (",
    heads_mixed_by_a_matrix_on_the_left: "matmul (",
    heads_of_batched_products_mixed: "einsum (",
}
"""Each function with the beginning of the reason."""


def written_before(fn: Form) -> Form:
    def step(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Any:
        k[:, :, :1] = 2.0
        v[:, :, :1] = 3.0
        return fn(q, k, v, o)

    return step


def extended_before(fn: Form) -> Form:
    def step(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Any:
        k, v = torch.cat([k[:, :, :-1], k[:, :, :1]], 2), torch.cat([v[:, :, :-1], v[:, :, :1]], 2)
        return fn(q, k, v, o), k, v

    return step


@pytest.mark.parametrize("fn", ON_CACHES, ids=lambda fn: fn.__name__)
def test_attention_of_another_kind_is_marked_with_the_reason_if_it_reads_caches(fn: Form) -> None:
    assert marked(fn) == []
    for kept in (written_before, extended_before):
        (marker,) = marked(kept(fn))
        assert marker.unsupported is not None
        assert marker.unsupported.startswith(ON_CACHES[fn])
        if not ON_CACHES[fn].startswith("its "):
            assert marker.unsupported.endswith(") mixes its scores or weights over heads")


@pytest.mark.parametrize("q_len", [1, Q])
@pytest.mark.parametrize("fn", [softmax_over_queries, softmax_of_columns, heads_mixed_after_the_softmax])
def test_a_single_query_changes_no_reason(fn: Form, q_len: int) -> None:
    q, k, v, o = inputs()
    (marker,) = marked(written_before(fn), q[:, :, :q_len], k, v, o)
    assert marker.unsupported is not None
    assert marker.unsupported.startswith(ON_CACHES[fn])


def test_neither_a_router_nor_the_attention_of_the_next_layer_is_taken_for_attention_of_another_kind() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
        hidden = heads_mixed_before_and_after_the_softmax(q, k, v, o).transpose(1, 2).flatten(2)
        hidden = F.layer_norm(F.linear(hidden, torch.eye(H * D)), (H * D,))
        routed = F.linear(hidden, torch.ones(5, H * D)).softmax(-1)
        hidden = hidden * (routed @ torch.ones(5, 1))
        q = F.linear(hidden, torch.eye(H * D)).unflatten(-1, (H, D)).transpose(1, 2)
        return scores_of(q, k).softmax(-1) @ repeat_kv(v)

    first, second = marked(written_before(layers))
    assert first.unsupported is not None
    assert second.unsupported is None
