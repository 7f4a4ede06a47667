"""Early-initialised caches of Transformers are packed; offloaded and quantized caches are skipped with a reason."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile import collect_reports
from kvcompile.compat.transformers import cache_of, renamed_cache
from kvcompile.compilation import plain
from kvcompile.packed.tensor import PackedTensor
from kvcompile.report.report import Report

transformers = pytest.importorskip("transformers")
from tiny_llama import DEVICES, MAX_LEN, fresh_cache, tiny_llama  # noqa: E402

cache_utils = transformers.cache_utils
pytestmark = pytest.mark.usefixtures("without_code_generation")

LOSSLESS = {"default": {"dtype": "float32"}}
CHUNKS = (9, 1)


def run(model: Any, cache: Any, expected_cache: Any) -> Report:
    """The report of compiled steps on ``cache``, whose results must equal eager steps on ``expected_cache``."""
    options = {"policy": LOSSLESS, "on_unsupported": "ignore"}
    compiled = torch.compile(model, backend="kvquant", options=options)
    ids = torch.randint(0, 97, (2, sum(CHUNKS)), generator=torch.Generator().manual_seed(1)).to(model.device)
    with collect_reports() as report, torch.no_grad():
        for chunk in ids.split(CHUNKS, 1):
            logits = compiled(input_ids=chunk, past_key_values=cache).logits
            expected = model(input_ids=chunk, past_key_values=expected_cache).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    return report


def test_a_static_cache_that_was_initialised_early_is_packed() -> None:
    model = tiny_llama(num_layers=1)
    cache, expected = fresh_cache(model, "static"), fresh_cache(model, "static")
    cache.early_initialization(batch_size=2, num_heads=2, head_dim=64, dtype=model.dtype, device=model.device)
    report = run(model, cache, expected)
    assert report.totals.rewritten == report.totals.sites > 0
    assert isinstance(cache.layers[0].keys, PackedTensor)
    assert torch.equal(cache.layers[0].values.dequantize(), expected.layers[0].values)


def test_a_step_that_records_gradients_runs_eagerly_on_a_packed_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor fails on such a graph (PyTorch 2.13 and 2.14)."""
    monkeypatch.setattr(plain, "compile_plain", lambda *args: pytest.fail("a graph on a packed cache was compiled"))
    model = tiny_llama(num_layers=1)
    cache, expected = kvcompile.static_cache(model, 2, MAX_LEN, LOSSLESS), fresh_cache(model, "static")
    compiled = torch.compile(model, backend="kvquant", options={"policy": LOSSLESS, "on_unsupported": "ignore"})
    for chunk in torch.arange(20).reshape(2, 10).split(CHUNKS, 1):
        logits = compiled(input_ids=chunk, past_key_values=cache).logits
        assert logits.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(logits, model(input_ids=chunk, past_key_values=expected).logits)


class Stream:
    """The methods of a GPU stream that offloading calls."""

    def wait_stream(self, other: Stream) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_an_offloaded_cache_is_skipped(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offloaded() -> Any:
        with monkeypatch.context() as patch:
            if device == "cpu":
                patch.setattr(torch, "Stream", Stream)
            if kind == "dynamic":
                return transformers.DynamicCache(config=model.config, offloading=True)
            return transformers.StaticCache(config=model.config, max_cache_len=MAX_LEN, offloading=True)

    # Each layer is fetched while the previous layer runs. A single layer would be read before it has arrived.
    model = tiny_llama(device=device, num_layers=2)
    if device == "cpu":  # Transformers offloads from GPUs only
        if kind == "static":
            pytest.skip("one kind is enough on a CPU")
        if torch.__version__ >= "2.15":
            pytest.skip("Dynamo traces the stand-in of a stream, so no graph break separates the cache's operations")
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    cache = offloaded()
    report = run(model, cache, offloaded())
    assert {site.reason_code for site in report.sites} <= {"plain_read_only", "moved", "computed_from_cache"}
    assert type(cache.layers[0].keys) is Tensor
    if device == "cpu":
        assert {site.reason_code for site in report.sites} == {"plain_read_only"}
        assert "without a graph break in between (offloaded caches" in str(report.sites[0].remedy)


class QuantizedLayer(cache_utils.QuantizedLayer):
    """A backend of ``QuantizedCache``, with 8-bit codes and a scale for each token and head."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().amax(axis, keepdim=True).clamp(min=1e-6) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, q_tensor: tuple[Tensor, Tensor]) -> Tensor:
        codes, scale = q_tensor
        return codes * scale


def test_a_quantized_cache_of_transformers_is_skipped() -> None:
    def quantized() -> Any:
        return cache_utils.Cache(layers=[QuantizedLayer(axis_key=-1, axis_value=-1, residual_length=8)])

    report = run(tiny_llama(num_layers=1), quantized(), quantized())
    prefill, *steps = report.sites
    assert prefill.reason_code == "no_cache"  # it attends to its own keys; the cache quantizes them for later steps
    assert {site.reason_code for site in steps} == {"already_quantized"}
    assert "holds torch.int8: the model quantizes it" in str(steps[0].reason)


def test_the_cache_of_a_call_has_either_name() -> None:
    assert renamed_cache({"cache": 1, "do_sample": False}, "past_key_values") == {
        "past_key_values": 1,
        "do_sample": False,
    }
    assert renamed_cache({"past_key_values": 1}, "cache") == {"cache": 1}
    assert renamed_cache({"cache": 1, "past_key_values": 2}, "cache") == {"cache": 1, "past_key_values": 2}, (
        "an error there"
    )


def test_the_cache_of_an_output_is_found_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Warned(Exception):
        pass

    def warn(message: str, *arguments: object) -> None:
        raise Warned(message)

    monkeypatch.setattr(transformers.utils.generic.logger, "warning_once", warn, raising=False)
    output = transformers.modeling_outputs.CausalLMOutputWithPast
    name = next(field for field in ("cache", "past_key_values") if field in output.__dataclass_fields__)
    assert cache_of(output(**{name: (1,)})) == (1,)
    assert cache_of(output(logits=torch.zeros(1))) is None


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_of_a_compiled_model_takes_a_cache_under_both_names_without_a_warning(name: str) -> None:
    model = tiny_llama(num_layers=1)
    kvcompile.compile(model, policy="int8_per_token_head")
    cache = kvcompile.static_cache(model, batch_size=1, max_len=64, policy="int8_per_token_head")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model.generate(torch.arange(5)[None], max_new_tokens=2, do_sample=False, **{name: cache})
    assert cache.get_seq_length() == 6
