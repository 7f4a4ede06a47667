"""A site that is not proven is refused with a reason in the user's words, and the result is plain Inductor's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refused_steps import (
    REFUSED,
    UNSAFE,
    B,
    D,
    H,
    S,
    cache_summed_up,
    new_tokens_are_joined_with_the_cache_before_the_write,
    sdpa,
    write,
)
from torch import Tensor

import kvcompile
from kvcompile import last_report
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.graph.names import in_words
from kvcompile.passes.prove import formats


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, H, 1, D).unbind()
    kc, vc = torch.randn(2, B, H, S, D).unbind()
    return [q, k, v, kc.clone(), vc.clone(), torch.tensor([5])]


def run(fn: Callable[..., Any], args: list[Tensor], backend: str = "kvquant", **options: Any) -> Any:
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, **({"options": options} if options else {}))
    with torch.no_grad():
        return compiled(*args)


def reasons_after(fn: Callable[..., Any], args: list[Tensor], **options: Any) -> list[str | None]:
    run(fn, args, on_unsupported="ignore", **options)
    return [site.reason_code for site in last_report().sites]


def assert_reasons_have_no_names_that_only_dynamo_and_fx_use() -> None:
    shown = "\n".join(str(site.reason) for site in last_report().sites)
    assert not re.search(r"L\[|___|%\w|call_function|torch\.ops|\.default", shown), shown


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_an_unproven_site_is_refused_with_its_reason_and_compiles_to_plain_inductor(
    fn: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    generated = fn is cache_summed_up  # one case is enough: the others run the graph that Inductor would get
    if not generated:
        request.getfixturevalue("without_code_generation")
    args, expected_args = inputs(), inputs()
    out = run(fn, args, policy="int8_per_token_head", on_unsupported="ignore")
    expected = run(fn, expected_args, backend="inductor" if generated else "eager")
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(args, expected_args, rtol=0, atol=0)
    assert not any(isinstance(arg, PackedTensor) for arg in args)
    reasons = {site.reason_code for site in last_report().sites}
    assert REFUSED[fn] in reasons
    assert None not in reasons
    assert all(site.reason for site in last_report().sites)
    assert_reasons_have_no_names_that_only_dynamo_and_fx_use()


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", UNSAFE, ids=lambda fn: fn.__name__)
def test_graphs_that_only_resemble_a_cache_are_refused_with_a_reason(fn: Callable[..., Any]) -> None:
    args, expected_args = inputs(), inputs()
    out = run(fn, args, policy="int8_per_token_head", on_unsupported="ignore")
    torch.testing.assert_close(out, fn(*expected_args), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(args, expected_args, rtol=0, atol=0)
    reasons = {site.reason_code for site in last_report().sites}
    assert UNSAFE[fn] in reasons
    assert None not in reasons
    assert_reasons_have_no_names_that_only_dynamo_and_fx_use()


@pytest.mark.usefixtures("without_code_generation")
def test_the_reason_names_the_index_that_reorders_heads_and_not_the_write_after_it() -> None:
    def heads_reordered(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
        kc.copy_(kc[:, torch.tensor([1, 0])])
        write(kc, k, pos), write(vc, v, pos)
        return sdpa(q, kc, vc)

    assert reasons_after(heads_reordered, inputs()) == ["unknown_write"]
    (site,) = last_report().sites
    assert "is written by aten.index (" in site.reason


def heads_repeated_by_an_index(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
    write(kc, k, pos), write(vc, v, pos)
    group = torch.arange(2 * H) // 2
    return sdpa(torch.cat([q, q], 1), kc[:, group], vc[:, group])


def sequences_repeated_for_guidance(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(torch.cat([q, -q]), torch.cat([kc, kc]), torch.cat([vc, vc]))


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    ("fn", "operator"), [(heads_repeated_by_an_index, "aten.index"), (sequences_repeated_for_guidance, "aten.cat")]
)
def test_the_reason_names_once_the_operator_through_which_a_cache_is_read(
    fn: Callable[..., Tensor], operator: str
) -> None:
    assert reasons_after(fn, inputs()) == ["unknown_read"]
    (site,) = last_report().sites
    assert f"its key cache is read through {operator} (" in site.reason


def keys_and_values_of_one_projection(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor
) -> tuple[Tensor, ...]:
    k, v = (torch.cat([k, v], -1) * 2).chunk(2, -1)
    return sdpa(q, k, v), k, v


def new_keys_returned_beside_a_copy(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor
) -> tuple[Tensor, ...]:
    k, v = k * 2, v * 2
    return sdpa(q, k, v), k, v, k.flatten(2).clone()


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", [keys_and_values_of_one_projection, new_keys_returned_beside_a_copy])
def test_new_keys_that_share_no_memory_with_another_output_are_packed(fn: Callable[..., tuple[Tensor, ...]]) -> None:
    out, keys, values, *copies = run(fn, inputs(), policy="int8_per_token_head", on_unsupported="error")
    expected, _, _, *expected_copies = fn(*inputs())
    torch.testing.assert_close(out, expected, rtol=0, atol=0.05)
    torch.testing.assert_close(copies, expected_copies)
    assert type(keys) is type(values) is PackedTensor


def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc, vc)


def test_gradients_leave_everything_to_plain_inductor() -> None:
    args = inputs()
    args[0].requires_grad_(True)
    torch._dynamo.reset()
    out = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})(*args)
    out.sum().backward()
    assert args[0].grad is not None
    assert [site.reason_code for site in last_report().sites] == ["training"]


@pytest.mark.usefixtures("without_code_generation")
def test_a_step_that_switches_gradients_off_itself_is_packed() -> None:
    """``@torch.no_grad()`` on the compiled function, whose caller records gradients."""
    args = inputs()
    weight = torch.randn(args[0].shape[-1], args[0].shape[-1], requires_grad=True)

    @torch.no_grad()
    def with_weight(q: Tensor, *others: Tensor) -> Tensor:
        return step(q @ weight.float(), *others)

    expected = with_weight(*(x.clone() for x in args))
    torch._dynamo.reset()
    backend = kvcompile.kvquant(policy="float32", on_unsupported="error")
    out = torch.compile(with_weight, backend=backend)(*args)
    assert torch.is_grad_enabled()
    assert type(args[3]) is PackedTensor
    assert not out.requires_grad
    torch.testing.assert_close(out, expected)


@pytest.mark.usefixtures("without_code_generation")
def test_a_layer_that_the_policy_leaves_alone_says_so() -> None:
    args = inputs()
    run(step, args, policy={"version": 1, "default": {"dtype": "auto"}}, on_unsupported="error")
    assert [site.reason_code for site in last_report().sites] == ["policy_auto"]
    assert type(args[3]) is Tensor


@pytest.mark.usefixtures("without_code_generation")
def test_a_device_without_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "why_unsupported", lambda device: f"{device} has compute capability 7.5")

    def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
        write(kc, k, pos), write(vc, v, pos)
        return sdpa(q, kc, vc)

    q, k, v = torch.randn(3, B, H, 1, D)
    caches = torch.zeros(2, B, H, S, D).unbind()
    expected = step(q, k, v, *(cache.clone() for cache in caches), torch.tensor([5]))
    out = torch.compile(step, backend="kvquant")(q, k, v, *(cache.clone() for cache in caches), torch.tensor([5]))
    (site,) = last_report().graphs[0].sites
    assert site.reason == "no kernel runs on the device of its cache: cpu has compute capability 7.5"
    torch.testing.assert_close(out, expected)


@pytest.mark.usefixtures("without_code_generation")
def test_a_head_dim_that_the_format_cannot_hold_is_named() -> None:
    q, k, v = torch.randn(3, B, H, 1, 72).unbind()
    kc, vc = torch.randn(2, B, H, S, 72).unbind()
    run(step, [q, k, v, kc.clone(), vc.clone(), torch.tensor([5])], on_unsupported="ignore")
    (site,) = last_report().sites
    assert site.reason_code == "unsupported_format"
    assert "72" in site.reason


@pytest.mark.usefixtures("without_code_generation")
def test_a_dtype_that_is_no_cache_dtype_is_named() -> None:
    args = [arg.double() if arg.is_floating_point() else arg for arg in inputs()]
    run(step, args, on_unsupported="ignore")
    assert [site.reason_code for site in last_report().sites] == ["unsupported_dtype"]


@pytest.mark.usefixtures("without_code_generation")
def test_grouped_query_shapes_that_do_not_divide_are_refused() -> None:
    args = inputs()
    args[0], args[3], args[4] = torch.randn(B, 3, 1, D), torch.randn(1, H, S, D), torch.randn(1, H, S, D)
    args[1], args[2] = args[1][:1], args[2][:1]

    def fn(q: Tensor, *rest: Tensor) -> Tensor:
        return step(q[:1, :2].expand(B, 2, 1, D), *rest)

    run(fn, args, on_unsupported="ignore")
    assert [site.reason_code for site in last_report().sites] == ["unsupported_shape"]


def test_error_mode_raises_with_the_reason() -> None:
    with pytest.raises(Exception, match="also used by"):
        run(cache_summed_up, inputs(), on_unsupported="error")


@pytest.mark.usefixtures("without_code_generation")
def test_a_reason_calls_the_cache_and_the_other_use_what_the_model_calls_them() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
        write(kc, k, pos), write(vc, v, pos)
        total = kc.transpose(1, 2).pow(2)
        return sdpa(q, kc, vc), total

    run(fn, inputs(), on_unsupported="ignore")
    (site,) = last_report().sites
    line = f"test_refusals.py:{fn.__code__.co_firstlineno + 2}: total = kc.transpose(1, 2).pow(2)"
    assert site.reason == f"its key cache kc is also used by aten.pow ({line})"


class Layer(torch.nn.Module):
    """Keys and values of one layer, with writes that break the graph or do not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(B, H, S, D))
        self.register_buffer("values", torch.zeros(B, H, S, D))

    def update(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        write(self.keys, k, pos), write(self.values, v, pos)
        return self.keys, self.values

    def update_and_read_the_position(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        length = pos.item() + 1
        write(self.keys, k, pos), write(self.values, v, pos)
        return self.keys[:, :, :length], self.values[:, :, :length]

    def update_at_an_integer(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        start = int(pos)
        for cache, x in ((self.keys, k), (self.values, v)):
            cache.narrow(2, start, x.shape[2]).copy_(x)
        return self.keys, self.values

    def update_and_break(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        torch._dynamo.graph_break()
        return self.update(k, v, pos)


class Model(torch.nn.Module):
    """One layer in a list, as models have it."""

    def __init__(self, update: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer()])
        self.update = update

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        return sdpa(q, *self.update(self.layers[0], k, v, pos))


def reasons_of_model(model: torch.nn.Module, *args: Tensor) -> list[str | None]:
    """The reasons of a compiled model, whose graph may break."""
    run(model, list(args), on_unsupported="ignore")
    return [site.reason for site in last_report().sites]


@pytest.mark.usefixtures("without_code_generation")
def test_a_reason_calls_the_cache_of_a_module_what_the_module_calls_it() -> None:
    class Sums(Model):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Any:
            return super().forward(q, k, v, pos), self.layers[0].keys.sum()

    q, k, v, *_, pos = inputs()
    (reason,) = reasons_of_model(Sums(Layer.update), q, k, v, pos)
    assert str(reason).startswith("its key cache self.layers[0].keys is also used by aten.sum (test_refusals.py:")


@pytest.mark.usefixtures("without_code_generation")
def test_a_cache_from_before_a_graph_break_is_named_by_the_break() -> None:
    q, k, v, *_, pos = inputs()
    (reason,) = reasons_of_model(Model(Layer.update_and_break), q, k, v, pos)
    before, after = str(reason).split("; ")
    place = f"test_refusals.py:{Layer.update_and_break.__code__.co_firstlineno + 1}"
    assert before == (
        f"its key cache (a value that the code before the graph break at {place} computed) is not written in this "
        "graph and is not packed"
    )
    assert after == f"the graph begins after the graph break at {place}: torch._dynamo.graph_break()"


@pytest.mark.usefixtures("without_code_generation")
def test_a_graph_break_by_a_number_of_a_tensor_is_named_with_the_setting_that_avoids_it() -> None:
    q, k, v, *_, pos = inputs()
    (reason,) = reasons_of_model(Model(Layer.update_and_read_the_position), q, k, v, pos)
    place = f"test_refusals.py:{Layer.update_and_read_the_position.__code__.co_firstlineno + 1}"
    assert f"the graph break at {place}: length = pos.item() + 1" in str(reason)
    assert str(reason).endswith("; torch._dynamo.config.capture_scalar_outputs = True may keep one graph")


@pytest.mark.usefixtures("without_code_generation")
def test_the_setting_that_a_graph_break_names_packs_the_cache() -> None:
    q, k, v, *_, pos = inputs()
    model, expected = Model(Layer.update_at_an_integer), Model(Layer.update_at_an_integer)
    (reason,) = reasons_of_model(model, q, k, v, pos)
    assert str(reason).endswith(
        ": start = int(pos); torch._dynamo.config.capture_scalar_outputs = True may keep one graph"
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = run(model, [q, k, v, pos], policy={"default": {"dtype": "float32"}})
    (site,) = last_report().sites
    assert site.reason is None
    torch.testing.assert_close(found, expected(q, k, v, pos), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.layers[0].keys.dequantize(), expected.layers[0].keys, rtol=0, atol=0)


@pytest.mark.usefixtures("without_code_generation")
def test_a_cache_that_has_a_name_behind_a_graph_break_keeps_it() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
        caches = write(kc, k, pos), write(vc, v, pos)
        scale = float(pos.tolist()[0])
        return sdpa(q, *caches, scale=scale)

    run(fn, inputs(), on_unsupported="ignore")
    (site,) = last_report().sites
    line = fn.__code__.co_firstlineno + 2
    assert site.reason == (
        "its key cache caches[0] is not written in this graph and is not packed; "
        f"the graph begins after the graph break at test_refusals.py:{line}: scale = float(pos.tolist()[0]); "
        "torch._dynamo.config.capture_scalar_outputs = True may keep one graph"
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("L['past'].layers[0].keys", "past.layers[0].keys"),
        ("L['self']._modules['layers']._modules['10']._buffers['keys']", "self.layers[10].keys"),
        ("G['CACHE'][1]", "CACHE[1]"),
        ("L['args'][0]['keys']", "args[0]['keys']"),
        ("L['___stack0'][0]", None),
    ],
)
def test_sources_of_inputs_are_named_as_in_the_code_of_the_user(source: str, words: str | None) -> None:
    assert in_words(source) == words


@pytest.mark.usefixtures("without_code_generation")
def test_a_part_of_a_stack_that_is_read_before_it_is_written_is_named() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, pos: Tensor) -> Tensor:
        out = sdpa(q, kv[0], kv[1])
        write(kv[0], k, pos), write(kv[1], v, pos)
        return out

    q, k, v, kc, vc, pos = inputs()
    run(fn, [q, k, v, torch.stack([kc, vc]), pos], on_unsupported="ignore")
    assert [site.reason for site in last_report().sites] == ["its key cache kv[0] is read before it is written"]


@pytest.mark.usefixtures("without_code_generation")
def test_a_cache_that_is_joined_with_new_tokens_before_its_write_is_named() -> None:
    run(new_tokens_are_joined_with_the_cache_before_the_write, inputs(), on_unsupported="ignore")
    (site,) = last_report().sites
    assert site.reason == "its key cache kc is read before it is written"
    assert site.remedy == "write the new keys and values before attention reads the cache"


@pytest.mark.usefixtures("without_code_generation")
def test_caches_that_are_views_of_one_tensor_stay_plain() -> None:
    args, expected = inputs(), inputs()
    storage, expected_storage = torch.zeros(2, B, H, S, D), torch.zeros(2, B, H, S, D)
    args[3], args[4] = storage[0], storage[1]
    expected[3], expected[4] = expected_storage[0], expected_storage[1]
    out = run(step, args, on_unsupported="ignore")
    torch.testing.assert_close(out, run(step, expected, backend="eager"), rtol=0, atol=0)
    torch.testing.assert_close(storage, expected_storage, rtol=0, atol=0)
    assert any("bytes of a storage of" in note and "put a clone() in its place" in note for note in last_report().notes)


def test_overlapping_inputs_are_refused() -> None:
    def overlapping() -> list[Tensor]:
        args, storage = inputs(), torch.zeros(B, H, S + 1, D)
        args[3], args[4] = storage[:, :, :S], storage[:, :, 1:]
        return args

    args, expected = overlapping(), overlapping()
    out = run(step, args, on_unsupported="ignore")
    assert [site.reason_code for site in last_report().sites] == ["input_mismatch"]
    torch.testing.assert_close(out, run(step, expected, backend="inductor"), rtol=0, atol=0)
    torch.testing.assert_close(args, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("without_code_generation")
def test_a_mask_of_attention_without_a_head_dimension_is_refused() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
        write(kc, k, pos), write(vc, v, pos)
        mask = torch.ones(1, S, dtype=torch.bool)
        return sdpa(q[None], kc[None], vc[None], mask)

    assert reasons_after(fn, inputs()) == ["unknown_mask"]


@pytest.mark.usefixtures("without_code_generation")
def test_a_site_that_shares_its_cache_with_a_refused_one_is_refused_too() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
            return sdpa(q, kc, vc)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Layer()

        def forward(self, q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
            write(kc, k, pos), write(vc, v, pos)
            return self.first(q, kc, vc) + self.second(q, kc, vc)

    rules = [{"match": {"module": "second"}, "dtype": "auto"}]
    policy = {"version": 1, "rules": rules, "default": {"dtype": "fp8_e4m3"}}
    assert reasons_after(Model(), inputs(), policy=policy) == ["partner_refused", "policy_auto"]


@pytest.mark.usefixtures("no_kernels_of_inductor")
def test_a_refused_site_beside_a_packed_one_still_gives_plain_results() -> None:
    def two_layers(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        return step(q, k, v, kc, vc, pos), sdpa(q, k + 1, v + 1)

    args = inputs()
    _, out = run(two_layers, args, on_unsupported="ignore")
    _, expected = two_layers(*inputs())
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert [site.reason_code for site in last_report().sites] == [None, "no_cache"]
    assert isinstance(args[3], PackedTensor)
