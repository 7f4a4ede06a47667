"""With ``merge_projections`` a model keeps its parameters, whose memory a compiled graph reads as one matrix."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from hand_written_decoder import Decoder, index_copy
from node_by_node import running_node_by_node
from torch import Tensor

import kvcompile
from kvcompile.call.adjacent_parameters import AdjacentParameters, adjacent_of, move_together, why_not_adjacent
from kvcompile.errors import OptionsError

pytestmark = pytest.mark.usefixtures("fresh_compiler", "seed_without_grad")

PROJECTIONS = ("query", "key", "value")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def projections(model: Any) -> list[Tensor]:
    """The weights of queries, keys and values in their order in memory."""
    return [getattr(model, name).weight for name in sorted(PROJECTIONS)]


def are_merged(model: Any) -> bool:
    return adjacent_of(projections(model)) is not None


def decoder() -> Decoder:
    return Decoder(index_copy, batch=2)


def compiled(model: Any, **options: Any) -> Any:
    backend = kvcompile.kvquant(policy="float32", merge_projections=True, on_unsupported="error", **options)
    return torch.compile(model, backend=backend, dynamic=False)


def check_step(step: Any, model: Decoder, position: int = 0) -> None:
    """A compiled step equals a step of a copy of ``model`` in eager code. Another position is another graph."""
    ids = torch.randint(0, 97, (2, 1))
    plain = copy.deepcopy(model)
    for name in ("keys", "values"):
        cache = getattr(model, name)
        setattr(plain, name, cache.dequantize() if isinstance(cache, kvcompile.PackedTensor) else cache.clone())
    expected = plain(ids, position)
    torch.testing.assert_close(step(ids, position), expected, **TOLERANCE)


@pytest.fixture
def model() -> Decoder:
    return decoder()


@pytest.fixture
def step(model: Decoder) -> Any:
    """The compiled step of ``model`` after its first call."""
    result = compiled(model)
    with running_node_by_node():
        check_step(result, model)
    return result


def test_parameters_become_views_of_one_tensor_and_keep_everything_else(model: Decoder) -> None:
    objects, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    with running_node_by_node():
        check_step(compiled(model), model)
    assert are_merged(model)
    assert all(objects[name] is parameter for name, parameter in model.named_parameters())
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items() if "_proj" in name)


def test_the_old_memory_is_freed(model: Decoder) -> None:
    old = [weakref.ref(weight.untyped_storage()) for weight in projections(model)]
    with running_node_by_node():
        check_step(compiled(model), model)
    assert not any(storage() for storage in old)


def test_new_values_in_place_are_used(model: Decoder, step: Any) -> None:
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()}, strict=True)
    places = [weight.data_ptr() for weight in projections(model)]
    check_step(step, model)
    assert [weight.data_ptr() for weight in projections(model)] == places


def test_a_weight_that_is_replaced_is_moved_to_the_others(model: Decoder, step: Any) -> None:
    model.key.weight.data = torch.randn_like(model.key.weight)
    check_step(step, model)
    assert are_merged(model)


def test_threads_that_call_for_the_first_time_together_get_the_merged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread asks between the moment when the first moves the weights and the moment when it notes that."""
    parameters = AdjacentParameters({0: (0, 1)})
    weights = [torch.nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    expected = torch.cat([weight.detach() for weight in weights])
    inputs = [list(weights), list(weights)]
    asked = threading.Event()

    def addresses(args: list[Tensor]) -> list[int]:
        if args is inputs[1]:
            asked.set()
        elif adjacent_of(weights) is not None:
            second.start()
            asked.wait(5)
        return [weight.data_ptr() for weight in args]

    monkeypatch.setattr(parameters, "_addresses", addresses)
    second = threading.Thread(target=parameters.put, args=(inputs[1],))
    parameters.put(inputs[0])
    second.join()
    for whole, _ in inputs:
        assert torch.equal(whole, expected)


def test_weights_that_another_tensor_uses_stay_apart_and_a_note_says_so(model: Decoder) -> None:
    kept = model.key.weight.detach()
    with running_node_by_node(), kvcompile.collect_reports() as report:
        check_step(compiled(model), model)
    assert kept.data_ptr() == model.key.weight.data_ptr()
    assert not are_merged(model)
    (note,) = report.remarks
    assert note.startswith("merge_projections: L['self']._modules['key']._parameters['weight'], ")
    assert "stay apart: another tensor uses their memory" in note


def test_weights_that_cannot_be_moved_later_are_copied_at_each_call(model: Decoder, step: Any) -> None:
    kept = torch.randn_like(model.key.weight)
    model.key.weight.data = kept
    with kvcompile.collect_reports() as report:
        for _ in range(3):
            check_step(step, model)
            kept.normal_()
    assert kept.data_ptr() == model.key.weight.data_ptr()
    assert any(note.startswith("each call copies the merged projections") for note in report.remarks)
    del kept
    check_step(step, model)
    assert are_merged(model)


def test_a_copy_of_the_model_has_its_own_weights(model: Decoder, step: Any) -> None:
    other = copy.deepcopy(model)
    other.key.weight.zero_()
    check_step(step, model)
    assert model.key.weight.count_nonzero()


def test_state_dicts_can_be_saved_and_loaded(model: Decoder, step: Any, tmp_path: Any) -> None:
    weights = {name: value for name, value in model.state_dict().items() if name not in ("keys", "values")}
    torch.save(weights, tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_graphs_for_other_numbers_of_tokens_share_the_order_in_memory(model: Decoder, step: Any) -> None:
    places = [weight.data_ptr() for weight in projections(model)]
    with running_node_by_node():
        step(torch.randint(0, 97, (2, 70)), 0)
    assert [weight.data_ptr() for weight in projections(model)] == places


def test_verify_checks_the_graph_without_merged_projections(model: Decoder) -> None:
    with running_node_by_node(), kvcompile.collect_reports() as report:
        check_step(compiled(model, verify=True), model)
    assert report.graphs[0].verified_steps
    assert are_merged(model)


def test_generated_code_computes_one_product(model: Decoder) -> None:
    step = compiled(model)
    check_step(step, model)
    check_step(step, model, 1)
    assert are_merged(model)


def test_garbage_does_not_keep_parameters_from_being_merged(model: Decoder) -> None:
    cycle: list[Any] = [model.key.weight.detach()]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        with running_node_by_node():
            check_step(compiled(model), model)
    finally:
        gc.enable()
    assert are_merged(model)


@pytest.mark.gpu
def test_a_cuda_graph_is_recorded_again_after_a_weight_is_replaced(recordings: list[Any]) -> None:
    model = decoder().cuda().bfloat16()
    step = compiled(model, mode="reduce-overhead")
    ids = torch.randint(0, 97, (2, 1), device="cuda")

    def check(position: int) -> None:
        plain = copy.deepcopy(model)
        for name in ("keys", "values"):
            setattr(plain, name, getattr(model, name).dequantize())
        expected = plain(ids, position)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(step(ids, position), expected, rtol=3e-2, atol=3e-2)

    with kvcompile.collect_reports() as report:
        step(ids, 0)
        merged_at_first = are_merged(model)
        for position in (1, 2, 3):
            check(position)
    assert are_merged(model), (merged_at_first, report.notes, [weight.data_ptr() for weight in projections(model)])
    model.key.weight.data = torch.randn_like(model.key.weight)
    for position in (4, 5, 6):
        check(position)
    assert are_merged(model)


def test_the_option_is_on_or_off() -> None:
    with pytest.raises(OptionsError, match="option merge_projections: expected True or False, got 'yes'"):
        kvcompile.kvquant(merge_projections="yes")


def test_tensors_are_moved_together_with_their_values() -> None:
    tensors = [torch.randn(4, 8), torch.randn(2, 8)]
    values = [tensor.clone() for tensor in tensors]
    assert why_not_adjacent(tensors) is None
    whole = move_together(tensors)
    assert torch.equal(whole, torch.cat(values))
    assert adjacent_of(tensors) is whole
    assert why_not_adjacent(tensors) is None
    tensors[1].zero_()
    assert not whole[4:].any()


def test_tensors_that_were_moved_have_storages_of_their_own() -> None:
    tensors = [torch.randn(4, 8), torch.randn(2, 8)]
    move_together(tensors)
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [128, 64]
    assert [tensor.storage_offset() for tensor in tensors] == [0, 0]


def test_a_tensor_is_moved_together_with_the_same_others_only() -> None:
    a, b, c = torch.randn(3, 4, 8)
    a, b, c = a.clone(), b.clone(), c.clone()
    move_together([a, b])
    assert why_not_adjacent([a, c]) == "another compiled graph merges them with other projections"
    del b
    assert why_not_adjacent([a, c]) is None


def test_the_memory_is_freed_with_the_parameters() -> None:
    tensors = [torch.randn(4, 8), torch.randn(2, 8)]
    whole = weakref.ref(move_together(tensors))
    del tensors[0]
    assert whole() is not None
    del tensors
    assert whole() is None


def test_tensors_of_inference_mode_are_not_moved() -> None:
    with torch.inference_mode():
        tensors = [torch.randn(4, 8), torch.randn(2, 8)]
    reason = why_not_adjacent(tensors)
    assert reason is not None
    assert "inference_mode" in reason


def test_tensors_in_shared_memory_are_not_moved() -> None:
    """Another process may write them; a tensor on a GPU always reports that it is shared."""
    tensors = [torch.randn(4, 8).share_memory_(), torch.randn(2, 8)]
    assert why_not_adjacent(tensors) == "some lie in memory that other processes may share"
