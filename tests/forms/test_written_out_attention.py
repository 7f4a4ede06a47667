"""Attention written out in matrix products and a softmax is packed like a call of scaled_dot_product_attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from shared_fixtures import WITHOUT_VECTORS
from torch import Tensor
from written_out_attention import FORMS, H_KV, B, D, Form, H, Operands, S, operands, repeat_kv

from kvcompile import collect_reports, last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

# Forms whose operands reach packing through different views. tests/passes/test_match_attention.py has all forms.
DISTINCT = (
    "plain",
    "softcap",
    "sinks_behind_the_keys",
    "sinks_of_every_row",
    "sinks_that_scale_the_output",
    "alibi_by_baddbmm",
    "einsum_over_tokens_first",
    "einsum_of_grouped_heads",
    "broadcast_groups",
    "keys_before_queries",
    "computed_in_float32",
    "query_and_key_scaled",
)


def form_of(name: str) -> Form:
    return next(form for form in FORMS if form.__name__ == name)


def step(form: Form, q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, o: Operands) -> Any:
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return form(q, kc, vc, o)


def arguments(q_len: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """(q, k, v, plain caches, positions, operands), the same in every call."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, q_len, D).to(dtype) for heads in (H, H_KV, H_KV))
    caches = (torch.randn(B, H_KV, S, D).to(dtype) for _ in range(2))
    return [q, k, v, *caches, torch.arange(q_len) + 48, operands(q_len, dtype)]


def packed(given: list[Any]) -> list[Any]:
    """The same arguments with packed caches."""
    roles = ((3, "key"), (4, "value"))
    caches = [
        PackedTensor.from_dense(given[index], PackedLayout("int8_per_token_head", role, D)) for index, role in roles
    ]
    return [*given[:3], *caches, *given[5:]]


def compiled(fn: Callable[..., Any], given: list[Any], **options: Any) -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(fn, backend="kvquant", fullgraph=True, options=options)(*given)


def on_packed_caches(form: Form, given: list[Any], **options: Any) -> tuple[Any, Any]:
    """The result of the compiled step, and the result of the same code in eager mode on the dequantized caches."""
    given = packed(given)
    kc, vc = given[3].clone(), given[4].clone()
    out = compiled(step, [form, *given], policy="int8_per_token_head", on_unsupported="error", **options)
    assert [site.reason for site in last_report().sites] == [None]
    kc.index_copy_(2, given[5], given[1])
    vc.index_copy_(2, given[5], given[2])
    return out, form(given[0], kc.dequantize(), vc.dequantize(), given[6])


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("name", DISTINCT)
def test_a_form_equals_itself_on_the_dequantized_caches(name: str) -> None:
    out, expected = on_packed_caches(form_of(name), arguments(1))
    assert out.dtype is expected.dtype
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("name", ["hugging_face_eager", "computed_in_float32", "scale_in_a_tensor"])
def test_the_output_has_the_dtype_of_the_model(name: str) -> None:
    out, expected = on_packed_caches(form_of(name), arguments(3, torch.bfloat16))
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=2e-2)


LOWEST = torch.finfo(torch.float32).min


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ repeat_kv(k).mT


def a_constant_after_infinity(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(o.bias > 0, -torch.inf)
    return scores.masked_fill(~o.allowed & (o.bias < 1), -1e9).softmax(-1) @ repeat_kv(v)


def infinity_after_a_constant(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -1e4).masked_fill(o.bias > 0, -torch.inf)
    return scores.softmax(-1) @ repeat_kv(v)


def one_constant_twice(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -1e9).masked_fill(o.bias > 0, -1e9)
    return scores.softmax(-1) @ repeat_kv(v)


def a_constant_scaled_with_the_scores(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (scores_of(q, k).masked_fill(~o.allowed, -1e9) / 8.0).softmax(-1) @ repeat_kv(v)


def a_scaled_constant_out_of_range(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = (scores_of(q, k).masked_fill(~o.allowed, LOWEST) * 2.0).softmax(-1)
    return torch.nan_to_num(weights) @ repeat_kv(v)


def the_lowest_number_of_a_narrow_dtype(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, torch.finfo(torch.bfloat16).min)
    return (scores + o.bias).softmax(-1) @ repeat_kv(v)


def a_larger_addend_beside_the_lowest_number(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k) + torch.where(o.allowed, 0.0, -1e9)
    return scores.masked_fill(o.bias > 0, LOWEST).softmax(-1) @ repeat_kv(v)


ROWS_WITHOUT_A_VISIBLE_KEY = (
    form_of("heads_folded_into_the_batch"),
    form_of("masked_fill_with_the_lowest_number"),
    a_constant_after_infinity,
    infinity_after_a_constant,
    one_constant_twice,
    a_constant_scaled_with_the_scores,
    a_scaled_constant_out_of_range,
    the_lowest_number_of_a_narrow_dtype,
    a_larger_addend_beside_the_lowest_number,
)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("form", ROWS_WITHOUT_A_VISIBLE_KEY, ids=lambda form: form.__name__)
def test_rows_without_a_visible_key_keep_their_meaning(form: Form) -> None:
    """With finite masks, such a row is the mean of the values that the largest constant masks."""
    given = arguments(3)
    given[6].allowed[:, :, 1] = False
    given[6].additive[:, :, 1] = LOWEST
    out, expected = on_packed_caches(form, given)
    assert not expected.isnan().any()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


def hidden_rows_with_a_scale_of_sinks(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
    share = (scores.logsumexp(-1) - o.sinks.view(1, -1, 1)).sigmoid()
    return scores.softmax(-1) @ repeat_kv(v) * share[..., None]


@pytest.mark.usefixtures("without_code_generation")
def test_a_row_without_a_visible_key_stays_nan_if_sinks_only_scale_the_output() -> None:
    given = arguments(3)
    given[6].allowed[:, :, 1] = False
    out, expected = on_packed_caches(hidden_rows_with_a_scale_of_sinks, given)
    assert expected[:, :, 1].isnan().all()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_row_without_a_visible_key_is_nan_if_its_maximum_is_infinite(with_sinks: bool, bounded: bool) -> None:
    """The model subtracts the maximum of a row from its scores, or the larger one of the maximum and a number."""

    def form(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
        scores = scores_of(q, k).masked_fill(~o.allowed, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        top = top.maximum(torch.zeros(1)) if bounded else top
        exponentials = (scores - top).exp()
        beside = (o.sinks.view(1, -1, 1, 1) - top).exp() if with_sinks else (-top).exp()
        return exponentials / (exponentials.sum(-1, keepdim=True) + beside) @ repeat_kv(v)

    given = arguments(3)
    given[6].allowed[:, :, 1] = False
    out, expected = on_packed_caches(form, given)
    assert bool(expected[:, :, 1].isnan().all()) != bounded
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("added", [1.0, -0.5, 0.0])
def test_a_number_beside_the_sum_of_shifted_exponentials_and_one_that_is_not_positive_stay_plain(added: float) -> None:
    """Beside shifted exponentials a number is a sink that differs between rows, and no sink makes a sum smaller."""

    def form(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
        scores = scores_of(q, k)
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp() if added > 0 else scores.exp()
        return exponentials / (exponentials.sum(-1, keepdim=True) + added) @ repeat_kv(v)

    given = arguments(3)
    expected = step(form, *copy.deepcopy(given))
    options = {"policy": "int8_per_token_head", "on_unsupported": "ignore"}
    out = torch.compile(step, backend="kvquant", options=options)(form, *given)
    torch.testing.assert_close(out, expected)
    assert last_report().totals.packed_layers == 0


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("factor", [-torch.inf, -1e6, 30.0])
def test_sinks_of_rows_may_be_far_from_the_scores(factor: float) -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
        sinks = factor * (1 + q.mean(-1, keepdim=True).abs())
        return torch.cat([scores_of(q, k), sinks], dim=-1).softmax(-1)[..., :-1] @ repeat_kv(v)

    out, expected = on_packed_caches(form, arguments(3))
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)


def channels_first(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    """Its last view has strides that attention on packed caches does not give."""
    weights = (repeat_kv(k) @ q.mT).softmax(-2)
    return (repeat_kv(v).mT @ weights).view(B, H * D, -1)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        pytest.param(channels_first, WITHOUT_VECTORS, id="channels_first"),
        pytest.param(channels_first, {}, marks=pytest.mark.slow, id="channels_first in vectors"),
        pytest.param(form_of("alibi_by_baddbmm"), {}, marks=pytest.mark.slow, id="alibi_by_baddbmm"),
    ],
)
def test_generated_code_computes_it_too(form: Form, options: dict[str, Any]) -> None:
    out, expected = on_packed_caches(form, arguments(3), **options)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("without_code_generation")
def test_a_value_cache_may_be_written_between_the_products() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, o: Operands) -> Tensor:
        weights = (q[:, :H_KV] @ kc.index_copy_(2, pos, k).mT).softmax(-1)
        return weights @ vc.index_copy_(2, pos, v)

    given = packed(arguments(3))
    expected = fn(*copy.deepcopy(given))
    torch.testing.assert_close(compiled(fn, given, on_unsupported="error"), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("without_code_generation")
def test_chunks_of_any_length_share_one_symbolic_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"policy": "int8_per_token_head", "on_unsupported": "error"}
    fn = torch.compile(step, backend="kvquant", dynamic=True, options=options)
    form = form_of("hugging_face_eager")
    for q_len in (11, 5, 7):
        given = packed(arguments(q_len))
        expected = step(form, *copy.deepcopy(given))
        with torch.no_grad():
            torch.testing.assert_close(fn(form, *given), expected, rtol=1e-3, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def sdpa(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=o.bias, enable_gqa=True)


def in_autocast(form: Form) -> Form:
    def fn(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return form(q, k, v, o)

    return fn


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("ambient", [False, True], ids=["region", "ambient"])
@pytest.mark.parametrize("form", [sdpa, form_of("heads_folded_into_the_batch")])
def test_autocast_gives_the_dtype_that_it_gives_in_eager_mode(form: Form, ambient: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient):
        out, expected = on_packed_caches(form if ambient else in_autocast(form), arguments(3))
    assert out.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)


def logsumexp_returned(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Any:
    scores = scores_of(q, k)
    lse = scores.logsumexp(-1)
    return scores.softmax(-1) @ repeat_kv(v) * (lse - o.sinks.view(1, -1, 1)).sigmoid()[..., None], lse


def sinks_of_other_scores_scale_the_output(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    share = ((scores_of(q, k) + o.bias).logsumexp(-1) - o.sinks.view(1, -1, 1)).sigmoid()
    return scores_of(q, k).softmax(-1) @ repeat_kv(v) * share[..., None]


def sinks_that_scale_another_output_too(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k)
    out = scores.softmax(-1) @ repeat_kv(v)
    return out * (scores.logsumexp(-1) - o.sinks.view(1, -1, 1)).sigmoid()[..., None] + out


def weights_returned(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Any:
    weights = (q @ repeat_kv(k).mT).softmax(-1)
    return weights @ repeat_kv(v), weights


def heads_weighted(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = (q @ repeat_kv(k).mT).div_(4.0)
    scores += o.additive
    return (F.softmax(scores, -1, dtype=torch.float32) * o.sinks[:, None, None]) @ repeat_kv(v)


def everything_dropped_out(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return F.dropout((q @ repeat_kv(k).mT).softmax(-1), p=1.0) @ repeat_kv(v)


def keys_changed_in_between(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    weights = (q[:, :H_KV] @ k.mT).softmax(-1)
    k[:, :, 3:4] = q[:, :H_KV, :1]
    return weights @ v


def keys_summed_up(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Any:
    return form_of("sinks_behind_the_keys")(q, k, v, o), k.sum()


def query_from_the_cache(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (k[:, :, 5:8] @ k.mT).softmax(-1) @ v


def mask_from_the_cache(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return F.scaled_dot_product_attention(q[:, :H_KV], k, v, attn_mask=k[:, :, :3, :1])


def padding_after_the_lowest_number(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, LOWEST)
    return scores.masked_fill(torch.arange(S) < 3, -1e9).softmax(-1) @ repeat_kv(v)


def padding_after_an_additive_mask(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k) + torch.where(o.allowed, 0.0, LOWEST)
    return scores.masked_fill(torch.arange(S) < 3, -1e9).softmax(-1) @ repeat_kv(v)


def every_key_masked_by_one_of_two_constants(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    scores = scores_of(q, k).masked_fill(~o.allowed, -1e9).masked_fill(o.allowed, -1e4)
    return scores.softmax(-1) @ repeat_kv(v)


def masked_before_a_small_scale(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    return (scores_of(q, k).masked_fill(~o.allowed, -1e4) * 1e-3).softmax(-1) @ repeat_kv(v)


def normalised_after_the_values(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
    exponentials = (scores_of(q, k) + o.additive).exp()
    return exponentials @ repeat_kv(v) / exponentials.sum(-1, keepdim=True)


REFUSED: dict[Form, tuple[str, str]] = {
    logsumexp_returned: ("unrecognised", "also used by the caller"),
    sinks_of_other_scores_scale_the_output: ("used_elsewhere", "its key cache kc is also used by"),
    sinks_that_scale_another_output_too: ("unrecognised", "also used by logsumexp"),
    weights_returned: ("unrecognised", "also used by the caller"),
    heads_weighted: ("unrecognised", "mul is applied to its weights"),
    everything_dropped_out: ("dropout", "p=1.0"),
    keys_changed_in_between: ("unrecognised", "k[:, :, 3:4] = q[:, :H_KV, :1]) changes mT"),
    padding_after_the_lowest_number: ("unrecognised", "masked by different constants, -3.40282e+38 and -1e+09"),
    padding_after_an_additive_mask: ("unrecognised", "masked by -1e+09 beside a bias"),
    every_key_masked_by_one_of_two_constants: ("unrecognised", "masked by different constants, -1e+09 and -10000"),
    masked_before_a_small_scale: ("unrecognised", "masked by -10, which is not far below"),
    normalised_after_the_values: ("unrecognised", "multiplied with the values before they are divided by their sum"),
    keys_summed_up: ("used_elsewhere", "sum"),
    query_from_the_cache: ("used_elsewhere", "also used by attention"),
    mask_from_the_cache: ("used_elsewhere", "also used by attention"),
}


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("form", REFUSED, ids=lambda form: form.__name__)
def test_a_refused_site_says_why_and_is_computed_as_the_model_wrote_it(form: Form) -> None:
    given, expected_given = arguments(3), arguments(3)
    out = compiled(step, [form, *given], policy="int8_per_token_head", on_unsupported="ignore")
    torch.testing.assert_close(out, step(form, *expected_given))
    torch.testing.assert_close(given[3:5], expected_given[3:5], rtol=0, atol=0)
    assert not any(isinstance(cache, PackedTensor) for cache in given[3:5])
    (site,) = last_report().sites
    code, reason = REFUSED[form]
    assert site.reason_code == code
    assert reason in str(site.reason)


@pytest.mark.usefixtures("without_code_generation")
def test_a_refused_site_beside_a_packed_one_is_computed_as_the_model_wrote_it() -> None:
    def both(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, *_ = args
        return step(form_of("softcap"), *args), form_of("plain")(q, k + 1, v + 1, args[6])

    _, expected = both(*arguments(3))
    _, out = compiled(both, arguments(3), on_unsupported="ignore")
    assert [site.reason_code for site in last_report().sites] == [None, "no_cache"]
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("without_code_generation")
def test_two_sites_of_one_cache_are_packed_together_or_not_at_all() -> None:
    def both(form: Form) -> Form:
        def fn(q: Tensor, k: Tensor, v: Tensor, o: Operands) -> Tensor:
            return form_of("softcap")(q, k, v, o) + form(q, k, v, o)

        return fn

    out, expected = on_two_sites(both(form_of("sinks_behind_the_keys")))
    assert [site.reason_code for site in last_report().sites] == [None, None]
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    on_two_sites(both(heads_weighted))
    assert {site.reason_code for site in last_report().sites} == {"partner_refused", "unrecognised"}


def on_two_sites(form: Form) -> tuple[Tensor, Tensor]:
    given = packed(arguments(3))
    expected = step(form, *copy.deepcopy(given))
    return compiled(step, [form, *given], on_unsupported="ignore"), expected


SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "layer_types": ["full_attention"],
}
MODELS: dict[str, tuple[Any, str]] = {
    "llama": (transformers.LlamaConfig(**{**SMALL, "layer_types": None}), "static"),
    "gemma2": (transformers.Gemma2Config(**SMALL), "static"),
    "gpt_oss": (transformers.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), "static"),
    "bloom": (transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4), "dynamic"),
}


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("name", MODELS)
def test_eager_attention_of_transformers_is_packed(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config, kind = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    static = transformers.StaticCache(config=config, max_cache_len=70)
    cache = static if kind == "static" else transformers.DynamicCache(config=config)
    options = {"policy": "int8_per_token_head", "on_unsupported": "error"}
    compiled_model = torch.compile(model, backend="kvquant", options=options)
    with torch.no_grad(), collect_reports() as report:
        model(torch.randint(0, 97, (2, 9)), past_key_values=cache)
        layer = cache.layers[0]
        if name == "llama":
            compiled_model(torch.randint(0, 97, (2, 1)), past_key_values=cache)  # packs the cache, in its own graph
            assert isinstance(layer.keys, PackedTensor)
        else:
            growing, head_dim = kind == "dynamic", layer.keys.shape[-1]
            for at, role in (("keys", "key"), ("values", "value")):
                layout = PackedLayout("int8_per_token_head", role, head_dim)
                setattr(layer, at, PackedTensor.from_dense(getattr(layer, at), layout, growing=growing))
        token, expected_cache = torch.randint(0, 97, (2, 1)), copy.deepcopy(cache)
        logits = compiled_model(token, past_key_values=cache).logits
        expected = model(token, past_key_values=expected_cache).logits
    assert report.totals.rewritten == report.totals.sites > 0
    assert all("layers.0" in site.module or "h.0" in site.module for site in report.sites)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
