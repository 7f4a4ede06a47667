"""A marker describes the computation of attention, and expanding it restores the computation of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marked_attention import Q, compiled_by, inputs, marked, value
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from written_out_attention import FORMS, H_KV, D, Form, Operands, S, operands, repeat_kv

from kvcompile.passes.mark.mark_attention import mark_attention
from kvcompile.passes.marker import Marker, expand_markers, markers_of

_VIEWS = ("view", "permute", "unsqueeze", "squeeze", "transpose", "clone", "expand", "_unsafe_view")


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("q_len", "kv_len"), [(3, S), (1, 1)], ids=["rows", "single"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_operands_of_a_marker_give_the_result_of_the_model(form: Form, q_len: int, kv_len: int) -> None:
    """The result is the same even if dimensions have size 1, which could be any axis."""
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
        "masked_by_a_product_with_bools",
        "not_below_the_lowest_number",
    ],
)
def test_rows_without_a_visible_key_keep_their_meaning_where_the_mask_is_finite(name: str) -> None:
    q, k, v, o = inputs()
    o.allowed[:, :, 1] = False
    o.additive[:, :, 1] = torch.finfo(torch.float32).min
    form = next(form for form in FORMS if form.__name__ == name)
    torch.testing.assert_close(by_its_marker(form, (q, k, v, o)), form(q, k, v, o), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_marker_that_stays_gives_back_exactly_the_operations_of_the_model(form: Form) -> None:
    plain = aten_ops(form, mark=False)
    assert plain["bmm"] + plain["baddbmm"] == 2
    assert aten_ops(form, mark=True) == plain


def test_the_output_of_a_marker_has_the_shape_strides_and_dtype_of_the_model() -> None:
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


def test_flex_attention_is_marked_with_the_effect_of_its_functions_or_the_reason() -> None:
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
