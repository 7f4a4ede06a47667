"""A model with weights quantized by torchao compiles with a packed cache, and the report shows both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sweep_case import MAX_ERROR
from tiny_llama import tiny_llama
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import kvcompile
from kvcompile.report.report import GraphReport, Report
from kvcompile.report.weight_bytes import weight_bytes

STEPS = (5, 1, 1)

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")


@pytest.fixture(params=["int8", "int4"])
def model(request: pytest.FixtureRequest) -> Any:
    """A Llama whose linear layers hold 8 or 4 bits per weight. int4 uses torchao's CPU format, a prototype."""
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    if request.param == "int8":
        config = quantization.Int8WeightOnlyConfig()
    else:
        int4 = pytest.importorskip("torchao.prototype.quantization.int4", exc_type=ImportError)
        config = int4.PrototypeInt4WeightOnlyConfig(group_size=32)
    model = tiny_llama(num_layers=1, hidden_size=128, intermediate_size=128, num_attention_heads=2)
    quantization.quantize_(model.model, config)
    return model


def packed_cache(model: Any) -> Any:
    return kvcompile.static_cache(model, 1, 64, "int8_per_token_head")


def logits_of(call: Any, cache: Any) -> Tensor:
    prompt = torch.randint(0, 97, (1, sum(STEPS)), generator=torch.Generator().manual_seed(1))
    return torch.cat([call(input_ids=ids, past_key_values=cache).logits for ids in prompt.split(STEPS, dim=1)], 1)


@pytest.mark.sampled(2)
def test_weights_and_caches_are_quantized_together(model: Any) -> None:
    cache = packed_cache(model)
    compiled = torch.compile(model, backend="kvquant", options={"on_unsupported": "error"})
    with kvcompile.collect_reports() as report:
        logits = logits_of(compiled, cache)
    expected = logits_of(model, packed_cache(model))  # uncompiled, on a packed cache with the same contents
    assert (logits - expected).norm() / expected.norm() < MAX_ERROR
    assert isinstance(cache.layers[0].keys, kvcompile.PackedTensor)
    totals = report.totals
    assert totals.rewritten == totals.sites == len(report.graphs)
    linear = [module.weight for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    saved = totals.weight_bytes_before - totals.weight_bytes_after
    assert saved > 0.6 * sum(weight.numel() * weight.dtype.itemsize for weight in linear)
    assert totals.weight_ratio is not None
    assert "bytes of weights, quantized by another library" in str(report)
    assert "over all layers: 3." in str(report)
    assert report.to_dict()["totals"]["weight_bytes_after"] == totals.weight_bytes_after


def test_a_report_counts_a_weight_once_and_does_not_mention_unquantized_weights() -> None:
    weights = weight_bytes([*tiny_llama(num_layers=1).parameters(), torch.zeros(3)])
    report = Report([GraphReport((), weights=weights), GraphReport((), weights=weights)])
    assert report.totals.weight_bytes_before == report.totals.weight_bytes_after == sum(w.stored for w in weights)
    assert report.totals.weight_ratio is None
    assert "weights" not in str(report)


def test_a_weight_counts_with_the_parts_that_hold_it() -> None:
    weight = torch.nn.Parameter(TwoTensor(torch.zeros(3, 4), torch.zeros(3, 4)), requires_grad=False)
    assert [(found.plain, found.stored) for found in weight_bytes([weight])] == [(48, 96)]
