"""Which code is attention, what its marker says, and that an expanded marker is the model's computation again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from written_out_attention import FORMS, H_KV, B, D, Form, H, Operands, S, operands, repeat_kv

from kvcompile.passes.mark.mark_attention import mark_attention
from kvcompile.passes.marker import Marker, expand_markers, markers_of

Q = 3
_VIEWS = ("view", "permute", "unsqueeze", "squeeze", "transpose", "clone", "expand", "_unsafe_view")


def inputs() -> tuple[Tensor, Tensor, Tensor, Operands]:
    return torch.randn(B, H, Q, D), torch.randn(B, H_KV, S, D), torch.randn(B, H_KV, S, D), operands(Q)


def compiled_by(backend: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True)(*args)


def marked(fn: Callable[..., Any], *args: Any) -> list[Marker]:
    """The markers of Dynamo's graph of ``fn``."""
    found: list[Marker] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        assert mark_attention(gm) == len(markers_of(gm.graph))
        found.extend(Marker.of(node) for node in markers_of(gm.graph))
        return lambda *given: [torch.zeros(1) for _ in gm.graph.output_node().args[0]]

    compiled_by(backend, fn, args or inputs())
    return found


def value(node: Any) -> Tensor:
    return node.meta["example_value"]


def aten_ops(fn: Callable[..., Any], mark: bool) -> Counter[str]:
    """AOTAutograd's operations of ``fn``, except views. ``mark``: attention is marked and expanded again."""
    found: Counter[str] = Counter()

    def compiler(gm: GraphModule, example_inputs: list[Any]) -> Any:
        assert len(markers_of(gm.graph)) == mark
        expand_markers(gm.graph)
        gm.graph.eliminate_dead_code()
        names = [str(node.target).split(".")[1] for node in gm.graph.nodes if "aten" in str(node.target)]
        found.update(name for name in names if name not in _VIEWS)
        gm.recompile()
        return gm.forward

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        if mark:
            mark_attention(gm)
        return aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())(gm, example_inputs)

    compiled_by(backend, fn, inputs())
    return found


def dense_attention(marker: Marker) -> Tensor:
    """The attention that a marker describes, computed from its operands."""
    assert marker.unsupported is None
    query, key, v = (x.float() for x in (marker.query, marker.key, marker.value))
    heads = query.shape[1]
    key, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, v))
    scores = query @ key.mT * marker.scale
    if marker.softcap:
        scores = marker.softcap * torch.tanh(scores / marker.softcap)
    if marker.mask is not None:
        is_bool = marker.mask.dtype == torch.bool
        scores = torch.where(marker.mask, scores, -torch.inf) if is_bool else scores + marker.mask.float()
    if marker.sinks is not None:
        assert marker.sinks.shape == (heads,)
        scores = torch.cat([scores, marker.sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    assert (weights @ v).shape == marker.original.shape
    return weights @ v


def by_its_marker(form: Form, given: tuple[Any, ...]) -> Tensor:
    """The result of a form computed from the operands of its marker."""

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        mark_attention(gm)
        (node,) = markers_of(gm.graph)
        node.target = lambda *arguments: dense_attention(Marker(*arguments))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(form, backend=backend, fullgraph=True)(*given)


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, S), (1, 1)], ids=["rows", "single"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_operands_of_a_marker_give_the_result_of_the_model(form: Form, q_len: int, kv_len: int) -> None:
    """They do so even if dimensions have size 1, which could be any axis."""
    if kv_len != S and form.__name__ in ("heads_folded_into_the_batch", "baddbmm_on_an_empty_tensor"):
        pytest.skip("the number of keys is written into it")
    q, k, v = (x[:, :, :n] for x, n in zip(inputs()[:3], (q_len, kv_len, kv_len), strict=True))
    given = (q, k, v, operands(q_len, kv_len=kv_len))
    torch.testing.assert_close(by_its_marker(form, given), form(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "hugging_face_eager",
        "heads_folded_into_the_batch",
        "masked_fill_with_the_lowest_number",
        "where_with_the_constant_first",
        "scores_changed_in_place",
        "not_below_the_lowest_number",
    ],
)
def test_rows_without_a_visible_key_keep_their_meaning_where_the_mask_is_finite(name: str) -> None:
    q, k, v, o = inputs()
    o.allowed[:, :, 1] = False
    o.additive[:, :, 1] = torch.finfo(torch.float32).min
    form = next(form for form in FORMS if form.__name__ == name)
    torch.testing.assert_close(by_its_marker(form, (q, k, v, o)), form(q, k, v, o), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_marker_that_stays_gives_back_exactly_the_operations_of_the_model(form: Form) -> None:
    plain = aten_ops(form, mark=False)
    assert plain["bmm"] + plain["baddbmm"] == 2
    assert aten_ops(form, mark=True) == plain


def test_the_output_of_a_marker_is_like_that_of_the_model_in_shape_strides_and_dtype() -> None:
    with FakeTensorMode():
        original = torch.empty(2, 5, 3, 8, dtype=torch.bfloat16).transpose(1, 2)
        q, k = torch.empty(2, 3, 5, 16), torch.empty(2, 3, 9, 16)
        out = torch.ops.kvcompile.sdpa(original, q, k, k, None, None, 0.0, False, None, 0.0, False, "", "", None)
    assert (out.shape, out.stride(), out.dtype) == (original.shape, original.stride(), torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("hugging_face_eager", {"scale": D**-0.5, "softcap": 0.0, "mask": torch.float32}),
        ("softcap", {"scale": 0.3, "softcap": 2.0, "mask": torch.float32}),
        ("softcap_of_another_argument", {"scale": 3.0, "softcap": 3.0, "mask": None}),
        ("query_and_key_scaled", {"scale": D**-0.25, "mask": None}),
        ("alibi_by_baddbmm", {"scale": D**-0.5, "mask": torch.float32}),
        ("einsum_over_tokens_first", {"scale": 1.0, "mask": torch.bool}),
        ("masked_by_assignment", {"scale": 1.0, "mask": torch.bool}),
        ("where_with_the_constant_first", {"scale": 1.0, "mask": torch.float32}),
        ("mask_scaled_with_the_scores", {"scale": D**-0.5, "mask": torch.float32}),
    ],
)
def test_scale_softcap_and_mask_are_read_off(form: str, expected: dict[str, Any]) -> None:
    (marker,) = marked(next(function for function in FORMS if function.__name__ == form))
    mask = None if marker.mask is None else value(marker.mask).dtype
    found = {"scale": marker.scale, "softcap": marker.softcap, "mask": mask}
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_a_marker_names_the_module_that_computes_attention() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.dropout((q @ repeat_kv(k).mT).softmax(-1)) @ repeat_kv(v)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attention(), Attention()])

        def forward(self, q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
            return self.layers[1](q, k, v)

    (marker,) = marked(Model().eval())
    assert marker.module == "layers.1"
    (marker,) = marked(Model().train())
    assert marker.dropout_p == 0.5


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
def test_what_is_not_attention_is_not_marked(fn: Form) -> None:
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


def constants_that_are_one_before_a_scale(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
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


def one_more_than_the_sum(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    exponentials = scores_of(q, k).exp()
    return exponentials / (1 + exponentials.sum(-1, keepdim=True)) @ repeat_kv(v)


UNSUPPORTED: dict[Form, str] = {
    weights_returned: "also used by the caller",
    sum_of_exponentials_used: "also used by logsumexp",
    heads_weighted: "mul is applied to its weights",
    dropout_of_scores: "dropout is applied to its scores",
    largest_scores_only: "also used by lt",
    masked_by_a_small_constant: "masked by -10, which is not far below",
    constants_that_are_one_before_a_scale: "different constants, -1e+09 and -1.25e+08",
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
    one_more_than_the_sum: "div is applied to the exponentials",
}


@pytest.mark.parametrize("fn", UNSUPPORTED, ids=lambda fn: fn.__name__)
def test_attention_that_packed_caches_cannot_compute_is_marked_with_the_reason(fn: Form) -> None:
    (marker,) = marked(fn)
    assert marker.unsupported is not None
    assert UNSUPPORTED[fn] in marker.unsupported


def test_flex_attention_is_marked_with_what_its_functions_do_or_the_reason() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    (marker,) = marked(lambda q, k, v, o: flex_attention(q, k, v, lambda s, *at: 3 * torch.tanh(s), enable_gqa=True))
    assert (marker.form, marker.softcap, marker.unsupported) == ("flex_attention", 3.0, None)
    (marker,) = marked(lambda q, k, v, o: flex_attention(q, k, v, lambda s, *at: torch.sin(s), enable_gqa=True))
    assert marker.unsupported == "flex_attention: sin is applied to its scores"


def test_a_factor_of_the_keys_is_kept_where_they_change_after_it() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
        key = k * 0.5
        key.add_(1.0)
        return (q[:, :H_KV] @ key.mT).softmax(-1) @ v

    (marker,) = marked(fn)
    assert marker.scale == 1.0
    assert marker.unsupported is None


def test_a_cast_that_only_makes_products_more_precise_is_skipped() -> None:
    q, k, v = (x.bfloat16() for x in inputs()[:3])
    form = next(function for function in FORMS if function.__name__ == "computed_in_float32")
    (marker,) = marked(form, q, k, v, operands(Q, torch.bfloat16))
    assert value(marker.query).dtype is torch.bfloat16
