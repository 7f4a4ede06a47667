"""A window that is packed while it fills becomes plain when its tokens move, if its format cannot move tokens."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from filling_window import HEAD_DIM, HEADS, SHAPE, WINDOW, Layers, classes, compiled, filled, plain_twin, run, step
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.call.adoption import AdoptionError, adopt, unpack
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

INT8 = PackedLayout("int8_per_token_head", "key", HEAD_DIM)
FORMATS = ["int4", "turboquant_3bit_r128"]

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_full_layer", [False, True])
@pytest.mark.parametrize("policy", FORMATS)
def test_tokens_of_a_window_are_quantized_once_however_often_they_move(policy: str, has_full_layer: bool) -> None:
    function = compiled(policy)
    layers = filled(function, has_full_layer)
    expected = plain_twin(layers)
    for _ in range(4):
        exact = run(step, expected, 1)
        result = run(function, layers, 1)
        if not has_full_layer:  # otherwise the other layer quantizes each token
            torch.testing.assert_close(result, exact)
        assert all(map(torch.equal, layers.window, expected.window))
    assert classes(layers) == {Tensor}
    assert layers.full is None or {type(cache) for cache in layers.full} == {PackedTensor}


@pytest.mark.parametrize("has_full_layer", [False, True])
def test_nothing_is_compiled_after_the_first_step_that_moves_tokens(has_full_layer: bool) -> None:
    function = compiled("int4")
    layers = filled(function, has_full_layer)
    run(function, layers, 1)
    graphs = counters["stats"]["unique_graphs"]
    with torch.compiler.set_stance("fail_on_recompile"):
        run(function, layers, 3)
    assert counters["stats"]["unique_graphs"] == graphs
    assert classes(layers) == {Tensor}


@pytest.mark.parametrize("has_full_layer", [False, True])
def test_symbolic_sizes_may_cost_a_graph_and_nothing_else(has_full_layer: bool) -> None:
    function = compiled("int4", dynamic=True)
    layers = filled(function, has_full_layer)
    expected = plain_twin(layers)
    for _ in range(2):
        run(function, layers, 1), run(step, expected, 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        run(function, layers, 1), run(step, expected, 1)
    for cache, other in zip(layers.window, expected.window, strict=True):
        assert type(cache) is Tensor
        assert torch.equal(cache, other)


@pytest.mark.parametrize("has_full_layer", [False, True])
def test_a_cache_that_is_reset_is_packed_and_unpacked_again(has_full_layer: bool) -> None:
    function = compiled("int4")
    layers, outputs = Layers(has_full_layer), []
    for request in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if request == 2 else "default"):
            run(function, layers, WINDOW - 1), run(function, layers, 1)
            assert classes(layers) == {PackedTensor}
            outputs.append(run(function, layers, 3))
            assert classes(layers) == {Tensor}
        layers.reset()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_every_holder_of_a_window_has_the_plain_one_and_attributes_are_kept() -> None:
    function = compiled("int4")
    layers = filled(function)
    keys = layers.keys
    keys.note = "mine"  # type: ignore[attr-defined]
    torch._dynamo.mark_static_address(keys)
    own = set(keys.__dict__)
    holder = {"keys": keys}
    run(function, layers, 1)
    assert holder["keys"] is layers.keys is keys
    assert type(keys) is Tensor
    assert keys.note == "mine"  # type: ignore[attr-defined]
    assert "_dynamo_static_input_type" in keys.__dict__
    assert set(keys.__dict__) < own


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_full_layer", [False, True])
@pytest.mark.parametrize("policy", ["int4_per_token_head", "int8_per_token_head"])
def test_a_format_per_token_stays_packed(policy: str, has_full_layer: bool) -> None:
    function = compiled(policy)
    layers = filled(function, has_full_layer)
    run(function, layers, 3)
    assert classes(layers) == {PackedTensor}


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a slice": lambda cache: cache[:, :, :64],
    "a transposed view": lambda cache: cache.transpose(1, 2),
    "an alias": lambda cache: cache.detach(),
    "a view that PyTorch records": lambda cache: cache.unsqueeze(0),
    "the bytes": lambda cache: cache.packed,  # type: ignore[attr-defined]
    "a weak reference": weakref.ref,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("has_full_layer", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_cache_whose_bytes_are_in_use_stays_packed(holder: str, has_full_layer: bool) -> None:
    function = compiled("int4")
    layers = filled(function, has_full_layer)
    held = HOLDERS[holder](layers.keys)
    expected = plain_twin(layers)
    run(function, layers, 1), run(step, expected, 1)
    assert (type(layers.keys), type(layers.values)) == (PackedTensor, Tensor)
    torch.testing.assert_close(layers.keys.dequantize(), expected.keys, atol=0.5, rtol=0.1)
    assert torch.equal(layers.values, expected.values)
    (remark,) = (text for text in kvcompile.last_report().remarks if "quantizes all of them again" in text)
    assert "layers.keys" in remark
    if isinstance(held, PackedTensor):
        assert held.packed.untyped_storage().data_ptr() == layers.keys.packed.untyped_storage().data_ptr()
    del held
    run(function, layers, 1)
    assert classes(layers) == {Tensor}


def test_a_live_view_shows_the_plain_window() -> None:
    function = compiled("int4")
    layers = filled(function)
    view = layers.keys.unsqueeze(0)[..., :16]
    assert torch.equal(view, layers.keys.dequantize()[None, ..., :16])
    run(function, layers, 2)
    assert type(layers.keys) is Tensor
    assert torch.equal(view + 0, layers.keys[None, ..., :16])
    assert torch.equal(view[0, :, :, 3], layers.keys[:, :, 3, :16])
    view.add_(1)
    view[0, 0, 0, 0] = 7
    assert torch.equal(view + 0, layers.keys[None, ..., :16])
    assert (layers.keys[0, 0, 0, :16] == 7).all()
    assert "LiveView" in repr(view)


@pytest.mark.parametrize(
    ("filling", "moving"), [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.inference_mode)]
)
def test_a_window_is_unpacked_in_inference_mode(filling: Any, moving: Any) -> None:
    function = compiled("int4")
    with filling():
        layers = filled(function)
        expected = plain_twin(layers)
    with moving():
        for _ in range(2):
            run(function, layers, 1), run(step, expected, 1)
    assert all(map(torch.equal, layers.window, expected.window))
    assert layers.keys.is_inference() == (filling is torch.inference_mode)


def test_other_caches_are_compiled_for() -> None:
    """The code of a step that unpacks serves the same cache packed or plain, and no other."""
    function = compiled("int4")
    layers = filled(function)
    run(function, layers, 1)
    shape = (1, WINDOW, HEADS, HEAD_DIM)
    others = {
        "other strides": torch.randn(shape).transpose(1, 2),
        "another dtype": torch.randn(SHAPE).bfloat16(),
        "another size": torch.randn(1, HEADS, WINDOW + 1, HEAD_DIM),
        "another format": PackedTensor.from_dense(torch.randn(SHAPE), INT8),
    }
    with torch.compiler.set_stance("fail_on_recompile"):
        layers.keys = torch.randn(SHAPE)
        run(function, layers, 1)
        for other in others.values():
            layers.keys = other
            with pytest.raises(RuntimeError, match="recompile"):
                run(function, layers, 1)


def test_the_report_says_that_a_window_became_plain(caplog: pytest.LogCaptureFixture) -> None:
    function = compiled("int4")
    with caplog.at_level(logging.WARNING):
        layers = filled(function)
        run(function, layers, 3)
    said = [record.getMessage() for record in caplog.records if "became plain caches" in record.getMessage()]
    assert said == kvcompile.last_report().remarks
    assert len(said) == 1
    assert said[0].startswith("layers.keys, layers.values became plain caches: ")
    (site,) = kvcompile.last_report().sites
    assert (site.rewritten, site.caches) == (False, ())


@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_unpacking_is_the_reverse_of_adoption(dims: tuple[int, ...]) -> None:
    order = [dims.index(dim) for dim in range(4)]
    cache = torch.randn([SHAPE[dim] for dim in dims]).permute(order)
    stride = cache.stride()
    values = adopt(cache, INT8).dequantize()
    assert unpack(cache) is cache
    assert (type(cache), cache.shape, cache.stride()) == (Tensor, SHAPE, stride)
    assert torch.equal(cache, values)
    torch.testing.assert_close(adopt(cache, INT8).dequantize(), values)


def test_the_packed_bytes_are_freed() -> None:
    cache = adopt(torch.randn(SHAPE), INT8)
    assert isinstance(cache, PackedTensor)
    storage = cache.packed.untyped_storage()._weak_ref()
    unpack(cache)
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


def test_growing_caches_views_and_other_packed_tensors_are_not_unpacked() -> None:
    growing = PackedTensor.from_dense(torch.randn(SHAPE), INT8, growing=True)
    whole = PackedTensor.from_dense(torch.randn(SHAPE), INT8)
    for other in (growing, whole[:, :, :64], whole.unsqueeze(0), torch.randn(SHAPE)):
        with pytest.raises(AdoptionError, match="not a whole packed cache"):
            unpack(other)
