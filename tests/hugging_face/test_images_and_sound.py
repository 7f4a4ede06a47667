"""``generate()`` of models that read images or sound: their prompts fill packed caches, and tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile import collect_reports

transformers = pytest.importorskip("transformers")
import multimodal_models  # noqa: E402
from multimodal_models import Inputs, made, with_other_media  # noqa: E402
from sweep_case import LOSSLESS  # noqa: E402


def generated(model: Any, inputs: Inputs, **arguments: Any) -> Tensor:
    copies = {name: x.clone() for name, x in inputs.items()}
    return model.generate(**copies, max_new_tokens=8, min_new_tokens=8, do_sample=False, **arguments)


@pytest.fixture(autouse=True)
def _node_by_node(without_code_generation: None) -> None:
    """Graphs run node by node."""


@pytest.mark.parametrize(
    "make",
    [
        multimodal_models.mllama,
        multimodal_models.qwen3_vl_moe,
        multimodal_models.gemma3,
        pytest.param(multimodal_models.llava, marks=pytest.mark.slow),
        pytest.param(multimodal_models.qwen2_5_vl, marks=pytest.mark.slow),
        pytest.param(multimodal_models.qwen2_audio, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_every_image_or_sound_gives_the_tokens_of_the_plain_model(
    make: Callable[[], tuple[Any, Inputs]], beams: int
) -> None:
    """The second request, with another image or sound, uses the cache of the first one again."""
    model, inputs = made(make)
    requests = [inputs, with_other_media(inputs), inputs]
    expected = [generated(model, request, num_beams=beams) for request in requests]
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        for request, tokens in zip(requests, expected, strict=True):
            assert torch.equal(generated(model, request, num_beams=beams), tokens)
    assert report.totals.packed_layers >= 2
    assert not report.notes


def test_an_image_after_a_prompt_without_one_fills_the_layers_that_were_skipped() -> None:
    model, inputs = made(multimodal_models.mllama)
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    requests = [text, inputs, text]
    expected = [generated(model, request) for request in requests]
    kvcompile.compile(model, policy=LOSSLESS)
    for request, tokens in zip(requests, expected, strict=True):
        assert torch.equal(generated(model, request), tokens)


def failing_with_images() -> tuple[Any, Inputs]:
    """A model whose prompts cannot have an image if its cache is static, as GIT of Transformers 5.24."""

    def check(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        encoded = kwargs.get("mm_encoder_outputs") or {}  # since Transformers 5.24
        has_image = any(x is not None for x in (kwargs.get("pixel_values"), *encoded.values()))
        if has_image and isinstance(cache, transformers.StaticCache):
            raise RuntimeError("Tensors must have same number of dimensions: got 2 and 4")

    model, inputs = made(multimodal_models.llava)
    model.register_forward_pre_hook(check, with_kwargs=True)
    return model, inputs


class TestAFirstCallThatFailsWithAnyStaticCache:
    def test_the_request_runs_without_a_packed_cache_and_the_report_says_why(self) -> None:
        model, inputs = failing_with_images()
        text = {name: inputs[name].clamp(max=250) for name in ("input_ids", "attention_mask")}
        expected = generated(model, inputs), generated(model, text)
        kvcompile.compile(model, policy=LOSSLESS)
        with collect_reports() as report:
            assert torch.equal(generated(model, inputs), expected[0])
        (note,) = report.notes
        assert note == (
            "generate() of this LlavaForConditionalGeneration runs without a packed cache: its first call fails with a "
            "packed static cache (RuntimeError: Tensors must have same number of dimensions: got 2 and 4)"
        )
        with collect_reports() as report:
            assert torch.equal(generated(model, text), expected[1])
        assert report.totals.packed_layers == 2

    def test_it_is_an_error_if_the_caller_wants_errors(self) -> None:
        model, inputs = failing_with_images()
        kvcompile.compile(model, policy=LOSSLESS, on_unsupported="error")
        with pytest.raises(RuntimeError, match="same number of dimensions"):
            generated(model, inputs)

    def test_an_error_of_the_caller_is_raised_as_without_kvcompile(self) -> None:
        model, inputs = made(multimodal_models.llava)
        kvcompile.compile(model, policy=LOSSLESS)
        del inputs["pixel_values"]
        inputs["input_ids"][0, 0] = 10**6
        with pytest.raises(IndexError, match="index out of range"):
            generated(model, inputs)
