"""Attention written out in many ways, as functions of query, keys, values and the operands that each form takes.

Every function computes attention of [B, H, q_len, D] queries over [B, H_kv, S, D] keys and values, and gives
[B, H, q_len, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, H_KV, S, D = 2, 4, 2, 70, 32


@dataclass
class Operands:
    """The operands that a form may take besides query, keys and values."""

    additive: Tensor  # [B, 1, q_len, S], the lowest number where masked
    allowed: Tensor  # [B, 1, q_len, S], bool
    bias: Tensor  # [1, H, q_len, S]
    alibi: Tensor  # [B * H, 1, S]
    sinks: Tensor  # [H]
    temperature: Tensor  # [1, H, 1, 1], positive


def operands(q_len: int, dtype: torch.dtype = torch.float32, kv_len: int = S) -> Operands:
    """Random operands; the mask is causal, and the first 7 keys of the second sequence are padding."""
    visible = torch.arange(S) <= torch.arange(S - 20, S - 20 + q_len)[:, None]
    allowed = (visible & (torch.arange(S) >= torch.tensor([0, 7])[:, None, None]))[:, None]
    if kv_len < S:
        allowed = torch.ones_like(allowed)
    bias, alibi = torch.randn(1, H, q_len, S), torch.rand(B * H, 1, 1) * torch.arange(S)
    additive = torch.zeros(B, 1, q_len, S, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return Operands(
        additive=additive[..., :kv_len],
        allowed=allowed[..., :kv_len],
        bias=bias.to(dtype)[..., :kv_len],
        alibi=alibi.to(dtype)[..., :kv_len],
        sinks=torch.randn(H).to(dtype),
        temperature=(torch.rand(1, H, 1, 1) + 0.5).to(dtype),
    )


Form = Callable[[Tensor, Tensor, Tensor, Operands], Tensor]
FORMS: list[Form] = []


def form(function: Form) -> Form:
    FORMS.append(function)
    return function


def repeat_kv(x: Tensor, repeats: int = H // H_KV) -> Tensor:
    batch, heads, length, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, repeats, length, head_dim).reshape(batch, -1, length, head_dim)


@form
def plain(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (q @ repeat_kv(k).mT).softmax(-1) @ repeat_kv(v)


@form
def hugging_face_eager(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * D**-0.5 + o.additive
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), repeat_kv(v))


@form
def softcap(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.3
    scores = torch.tanh(scores / 2.0) * 2.0 + o.additive
    return F.softmax(scores, dim=-1) @ repeat_kv(v)


@form
def softcap_of_another_argument(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (3.0 * (0.1 * q @ repeat_kv(k).mT).tanh()).softmax(-1) @ repeat_kv(v)


@form
def sinks_behind_the_keys(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * D**-0.5 + o.additive
    sinks = o.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    logits = torch.cat([scores, sinks], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    return F.dropout(weights, p=0.0, training=False).to(v.dtype) @ repeat_kv(v)


@form
def sinks_of_every_row(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * D**-0.5 + o.additive
    sinks = 3 * q.mean(-1, keepdim=True)
    logits = torch.cat([scores, sinks], dim=-1).float()
    return F.softmax(logits, dim=-1)[..., :-1].to(v.dtype) @ repeat_kv(v)


@form
def sinks_that_scale_the_output(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * D**-0.5 + o.additive
    share = (torch.logsumexp(scores, dim=-1) - o.sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    out = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ repeat_kv(v)
    return out * share.unsqueeze(-1).to(out.dtype)


@form
def sinks_before_the_keys(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.where(o.allowed, q @ repeat_kv(k).mT, -torch.inf)
    sinks = o.sinks[None, :, None, None].expand(B, H, q.shape[2], 1)
    return torch.cat((sinks, scores), -1).softmax(-1)[:, :, :, 1:] @ repeat_kv(v)


@form
def alibi_by_baddbmm(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    query, key, value = (x.reshape(B * H, -1, D) for x in (q, repeat_kv(k), repeat_kv(v)))
    scores = o.alibi.baddbmm(batch1=query, batch2=key.transpose(-1, -2), beta=1.0, alpha=D**-0.5)
    scores = scores.view(B, H, q.shape[2], -1) + o.additive
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype).view(B * H, q.shape[2], -1)
    return torch.bmm(weights, value).view(B, H, -1, D)


@form
def baddbmm_on_an_empty_tensor(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    empty = torch.empty(B * H, q.shape[2], S, dtype=torch.float32)
    query, key = q.reshape(-1, q.shape[2], D), repeat_kv(k).transpose(-1, -2).reshape(-1, D, S)
    scores = torch.baddbmm(empty, query.float(), key.float(), beta=0, alpha=0.2).reshape(B, H, -1, S)
    return F.softmax(scores + o.additive, dim=-1).type(v.dtype) @ repeat_kv(v)


@form
def heads_folded_into_the_batch(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    query, key, value = (x.reshape(B * H, -1, D) for x in (q, repeat_kv(k), repeat_kv(v)))
    scores = torch.bmm(query, key.transpose(1, 2)) * D**-0.5
    scores = (scores.view(B, H, -1, S) + o.additive).view(B * H, -1, S)
    return torch.bmm(F.softmax(scores, dim=2), value).view(B, H, -1, D)


@form
def einsum(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, repeat_kv(k)) / math.sqrt(D) + o.bias
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(dim=-1), repeat_kv(v))


@form
def einsum_over_tokens_first(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (q, repeat_kv(k), repeat_kv(v)))
    scores = torch.einsum("...qhd,...khd->...hqk", query, key).masked_fill(~o.allowed, -torch.inf)
    return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), value).transpose(1, 2)


@form
def einsum_of_grouped_heads(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = torch.einsum("bgrqd,bgkd->bgrqk", q.unflatten(1, (H_KV, -1)), k)
    scores = scores + o.bias.unflatten(1, (H_KV, -1)) + o.additive[:, :, None]
    return torch.einsum("bgrqk,bgkd->bgrqd", scores.softmax(-1), v).flatten(1, 2)


@form
def keys_before_queries(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = repeat_kv(k) @ q.mT + o.additive.mT
    return (repeat_kv(v).mT @ scores.softmax(-2)).mT


@form
def broadcast_groups(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q.unflatten(1, (H_KV, -1)) @ k.unsqueeze(2).mT
    return (scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


@form
def computed_in_float32(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    query, key = q.to(torch.float32), repeat_kv(k).to(torch.float32)
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(D) + o.additive
    return torch.matmul(nn.Softmax(dim=-1)(scores).to(v.dtype), repeat_kv(v))


@form
def mask_scaled_with_the_scores(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT + o.bias
    scores *= D**-0.5
    return F.softmax(scores + o.additive, dim=-1) @ repeat_kv(v)


@form
def part_of_a_bias_subtracted(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return torch.sub(q @ repeat_kv(k).mT, o.bias, alpha=0.5).softmax(-1) @ repeat_kv(v)


@form
def scale_in_a_tensor(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = (q @ repeat_kv(k).mT + o.bias) / torch.sqrt(torch.tensor(D, dtype=torch.float32))
    return scores.softmax(-1) @ repeat_kv(v)


@form
def temperature_of_every_head(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (q @ repeat_kv(k).mT * o.temperature).softmax(-1) @ repeat_kv(v)


@form
def query_and_key_scaled(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return ((q * D**-0.25) @ (repeat_kv(k) * D**-0.25).transpose(2, 3)).softmax(-1) @ repeat_kv(v)


@form
def masked_fill_with_the_lowest_number(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT + o.bias
    scores = scores.masked_fill(~o.allowed, torch.finfo(q.dtype).min)
    return F.softmax(scores.float(), dim=-1).to(v.dtype) @ repeat_kv(v)


@form
def where_with_a_constant_tensor(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT
    scores = torch.where(o.allowed, scores, torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype))
    return (scores + o.additive).softmax(-1) @ repeat_kv(v)


@form
def where_with_the_constant_first(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return torch.where(~o.allowed, -1e9, q @ repeat_kv(k).mT).softmax(-1) @ repeat_kv(v)


@form
def scores_changed_in_place(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT
    scores.div_(math.sqrt(D)).add_(o.bias)
    scores.masked_fill_((~o.allowed).expand_as(scores), torch.finfo(scores.dtype).min)
    return scores.softmax(-1).type_as(v) @ repeat_kv(v)


@form
def masked_by_assignment(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT
    scores[~o.allowed.expand(-1, H, -1, -1)] = -torch.inf
    return scores.softmax(-1) @ repeat_kv(v)


@form
def masked_by_a_product_with_bools(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    """GPT-2 of OpenAI."""
    b = o.allowed.to(q.dtype)
    scores = (q @ repeat_kv(k).mT) * D**-0.5
    return (scores * b - 1e10 * (1 - b)).softmax(-1) @ repeat_kv(v)


@form
def masked_by_a_product_with_a_triangle(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    b = torch.tril(torch.ones(q.shape[2], k.shape[2], dtype=q.dtype), diagonal=S - 20)[None, None]
    return (q @ repeat_kv(k).mT * b + -1e9 * (1 - b)).softmax(-1) @ repeat_kv(v)


@form
def masked_by_a_product_after_a_bias(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    b = o.allowed.float().to(q.dtype).expand(-1, H, -1, -1)
    return ((b - 1) * 1e38 + b * (q @ repeat_kv(k).mT + o.bias)).softmax(-1) @ repeat_kv(v)


@form
def not_below_the_lowest_number(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT + o.additive
    return torch.max(scores, torch.tensor(torch.finfo(torch.float32).min)).softmax(-1) @ repeat_kv(v)


@form
def softmax_of_exponentials(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT + o.additive
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (exponentials / exponentials.sum(dim=-1, keepdim=True)) @ repeat_kv(v)


@form
def maximum_without_its_dimension(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT + o.additive
    exponentials = (scores - scores.amax(-1)[..., None]).exp()
    return exponentials / exponentials.sum(-1).unsqueeze(-1) @ repeat_kv(v)


@form
def exponential_of_logarithms(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT + o.additive
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ repeat_kv(v)


@form
def logsumexp_without_its_dimension(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = (q @ repeat_kv(k).mT).masked_fill(~o.allowed, -torch.inf)
    return (scores - scores.logsumexp(dim=-1).unsqueeze(-1)).exp() @ repeat_kv(v)


@form
def logarithm_of_a_sum_written_out(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT + o.bias
    scores = scores - scores.amax(-1, keepdim=True)
    return (scores - scores.exp().sum(-1, keepdim=True).log()).exp() @ repeat_kv(v)


@form
def exponential_of_log_softmax(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = q @ repeat_kv(k).mT + o.additive
    return F.log_softmax(scores, dim=-1, dtype=torch.float32).exp().to(q.dtype) @ repeat_kv(v)


@form
def sinks_beside_the_sum(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    """As in the attention of gpt-oss of OpenAI."""
    scores = q @ repeat_kv(k).mT + o.additive
    sinks = o.sinks.reshape(-1, 1, 1)
    top = torch.maximum(sinks, torch.max(scores, dim=-1, keepdim=True).values)
    exponentials = torch.exp(scores - top)
    return exponentials / (exponentials.sum(-1, keepdim=True) + torch.exp(sinks - top)) @ repeat_kv(v)


@form
def sinks_beside_the_sum_of_masked_exponentials(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores, sinks = (q @ repeat_kv(k).mT).masked_fill(~o.allowed, -torch.inf), o.sinks[None, :, None]
    top = scores.amax(-1).maximum(sinks)
    exponentials = (scores - top[..., None]).exp()
    return exponentials / ((sinks - top).exp() + exponentials.sum(-1))[..., None] @ repeat_kv(v)


@form
def softmax_off_by_one(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = (q @ repeat_kv(k).mT).masked_fill(~o.allowed, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    exponentials = (scores - top).exp()
    return exponentials / (exponentials.sum(-1, keepdim=True) + (-top).exp()) @ repeat_kv(v)


@form
def softmax_off_by_a_number(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    exponentials = ((q @ repeat_kv(k).mT) * D**-0.5).masked_fill(~o.allowed, -torch.inf).exp()
    return exponentials / (0.3 + exponentials.sum(-1, keepdim=True)) @ repeat_kv(v)


@form
def scores_that_the_caller_drops(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    """As in Whisper of OpenAI, whose attention also returns its scores."""
    scores = (q @ repeat_kv(k).mT + o.additive).float()
    weights = scores.softmax(-1)
    scores.detach().to(q.dtype), weights.mean(1)
    return weights @ repeat_kv(v)


@form
def operators(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    aten = torch.ops.aten
    scores = aten.mul.Scalar(aten.matmul(q, aten.mT(repeat_kv(k))), D**-0.5)
    scores = aten.masked_fill.Scalar(
        aten.add_.Tensor(scores, o.bias), aten.logical_not(o.allowed), torch.finfo(q.dtype).min
    )
    weights = aten.dropout(aten.softmax.int(self=scores, dim=-1), 0.1, train=False)
    return aten.matmul(weights, repeat_kv(v))
