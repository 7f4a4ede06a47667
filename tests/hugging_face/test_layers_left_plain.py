"""``generate()`` leaves a layer plain whose format cannot hold it, packs all other layers, and says so once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile import KVCompileError, PackedTensor, PolicyError, collect_reports
from kvcompile.kernels.layout.packed_layout import PackedLayout

transformers = pytest.importorskip("transformers")
from sweep_library import architecture_of  # noqa: E402
from tiny_llama import attention_llama  # noqa: E402
from windowed_models import windowed  # noqa: E402

CANNOT_HOLD = "int4_per_group_128"
"""A format that cannot hold heads of 64 channels."""


def policy(*layers: int) -> dict[str, Any]:
    """Lossless formats, except in ``layers``, which their format cannot hold: tokens equal those of plain caches."""
    rules = [{"match": {"layers": str(layer)}, "dtype": CANNOT_HOLD} for layer in layers]
    return {"rules": rules, "default": {"dtype": "float32"}}


def generated(model: Any, **arguments: Any) -> Any:
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **common, **arguments, return_dict_in_generate=True)


def kinds(result: Any) -> list[type]:
    """The types of the keys of each layer."""
    cache = result["cache" if "cache" in result else "past_key_values"]
    return [type(layer.keys) for layer in cache.layers]


@pytest.fixture(autouse=True)
def _node_by_node(without_code_generation: None) -> None:
    """Graphs run node by node."""


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_a_layer_that_its_format_cannot_hold_stays_plain_beside_packed_ones(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled steps refuse the layer for the same reason. The second request uses the memory again."""
    expected = generated(attention_llama(num_layers=3), **arguments).sequences
    model = kvcompile.compile(attention_llama(num_layers=3), policy=policy(0, 2))
    for is_first in (True, False):
        caplog.clear()
        with collect_reports() as report:
            result = generated(model, **arguments)
        assert torch.equal(result.sequences, expected)
        assert kinds(result) == [Tensor, PackedTensor, Tensor]
        (note,) = report.notes
        assert note.startswith(
            "generate() of this LlamaForCausalLM leaves layers plain: layers 0, 2: int4_per_group_128 cannot hold its "
        )
        assert (note in caplog.text) is is_first
        if is_first:
            assert [site.rewritten for site in report.graphs[0].sites] == [False, True, False]
            assert {site.reason_code for site in report.graphs[0].sites} == {None, "unsupported_format"}


@pytest.mark.parametrize("layer", [0, 1], ids=["a window", "a layer without a window"])
def test_windows_and_other_layers_stay_plain_alike(layer: int) -> None:
    expected = generated(windowed()).sequences
    result = generated(kvcompile.compile(windowed(), policy=policy(layer)))
    assert torch.equal(result.sequences, expected)
    assert kinds(result) == [PackedTensor if index != layer else Tensor for index in range(2)]


def test_layers_of_another_head_dim_stay_plain_as_in_gemma_4() -> None:
    """Its layers without a window have wider heads. No format can hold 520 channels."""
    if "gemma4_text" not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} lacks it")
    small = architecture_of("gemma4_text").build("gemma4_text", "sdpa")
    sizes = small.config.to_dict()
    sizes["per_layer_config"] = {index: {"head_dim": 520} for index in sizes["per_layer_config"]}
    model = type(small)(type(small.config)(**sizes)).eval()
    expected = generated(model).sequences
    with pytest.raises(PolicyError, match=r"^static_cache: layer 1: float32 cannot hold its keys: head_dim 520"):
        kvcompile.static_cache(model, 2, 64, "float32")
    result = generated(kvcompile.compile(model, policy="float32"))
    assert torch.equal(result.sequences, expected)
    assert kinds(result)[:2] == [PackedTensor, Tensor]  # the other layers share these caches


def test_a_request_none_of_whose_layers_can_be_packed_says_why(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = (attention_llama(num_layers=2, head_dim=24) for _ in range(2))
    kvcompile.compile(model, policy="int4")
    for _ in range(2):
        with collect_reports() as report:
            result = generated(model)
        assert torch.equal(result.sequences, generated(plain).sequences)
        assert kinds(result) == [Tensor, Tensor]
        (note,) = report.notes
        assert "runs without a packed cache: layers 0, 1: int4_per_channel cannot hold its keys: head_dim 24" in note
    assert caplog.text.count(note) == 1


def test_on_unsupported_decides_between_an_error_and_silence(caplog: pytest.LogCaptureFixture) -> None:
    strict = kvcompile.compile(attention_llama(), policy=policy(1), on_unsupported="error")
    with pytest.raises(PolicyError, match="layer 1: int4_per_group_128 cannot hold its keys: "):
        generated(strict)
    silent = kvcompile.compile(attention_llama(), policy={**policy(1), "on_unsupported": "ignore"})
    with collect_reports() as report:
        assert kinds(generated(silent)) == [PackedTensor, Tensor]
    assert report.notes == []
    assert caplog.records == []


def test_a_layout_that_kernels_of_the_device_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, kernels take fewer channels than on a CPU."""
    expected = generated(attention_llama(num_layers=2)).sequences
    model, cache = attention_llama(num_layers=2), torch.zeros(1, 2, 64, 64)
    monkeypatch.setattr(PackedLayout, "unsupported_on", lambda layout, device: f"head_dim {layout.head_dim} is wide")
    with pytest.raises(PolicyError, match="layer 0: float32 cannot hold its keys: head_dim 64 is wide; give this lay"):
        kvcompile.static_cache(model, 1, 64, "float32")
    with pytest.raises(KVCompileError, match="was not packed: format float32: head_dim 64 is wide"):
        kvcompile.call.adoption.adopt(cache, PackedLayout("float32", "key", 64))
    kvcompile.compile(model, policy="float32")
    with collect_reports() as report:
        assert torch.equal(generated(model).sequences, expected)
    (note,) = report.notes
    assert "without a packed cache: layers 0, 1: float32 cannot hold its keys: head_dim 64 is wide" in note
