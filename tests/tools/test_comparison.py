"""``kvcompile.compare``: errors follow their definitions, and the suggested rules help."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from documented_commands import command_line
from small_models import MODULES, save, small_model, some_bytes
from torch import Tensor
from typer.testing import CliRunner

import kvcompile
from kvcompile.cli.app import app
from kvcompile.evaluation import compare as compare_module
from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import AttentionTap
from kvcompile.evaluation.compare import compare_on
from kvcompile.evaluation.comparison import Comparison
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.layer_rules import as_text, layer_ranges, rules_for, with_rules
from kvcompile.evaluation.suggestion import worst
from kvcompile.kernels.formats import get_format
from kvcompile.passes.site import FormatPair, Site
from kvcompile.policy.policy import Policy
from kvcompile.tables import WIDTH

pytestmark = pytest.mark.usefixtures("without_code_generation")

TOKENS = torch.tensor(list(some_bytes(130)))


def relative(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention at all positions, written with basic operators."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value


def calls_of(model: Any, tokens: Tensor) -> dict[str, AttentionCall]:
    calls: dict[str, AttentionCall] = {}
    AttentionTap(model)(tokens, lambda site, call: calls.update({site.module: call}))
    return calls


def quantized(x: Tensor, format_name: str) -> Tensor:
    return get_format(format_name).decode(get_format(format_name).encode(x))


def test_errors_follow_their_definitions_and_the_suggestion_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompile.evaluation.site_errors.QUERIES", 1000)
    model = small_model()
    rule = {"match": {"layers": 1}, "key": {"dtype": "int4_per_token_head"}, "value": {"dtype": "int2_unrotated"}}
    policy = Policy.load({"rules": [rule], "default": {"dtype": "turboquant_4bit_nc"}})
    found = kvcompile.compare(model, TOKENS, policy, decode=1)
    assert [layer.module for layer in found.layers] == [MODULES[1], MODULES[0]], "worst first"
    calls = calls_of(model, TOKENS[:-1])

    def error(module: str, key: Tensor, value: Tensor) -> Any:
        call = calls[module]
        exact = attention(call.query, call.key, call.value)
        return pytest.approx(relative(attention(call.query, key, value), exact), rel=1e-3)

    for layer in found.layers:
        call = calls[layer.module]
        key, value = quantized(call.key, layer.key_format), quantized(call.value, layer.value_format)
        assert layer.key_error == pytest.approx(relative(key, call.key), rel=1e-4)
        assert layer.value_error == pytest.approx(relative(value, call.value), rel=1e-4)
        assert layer.attention_error == error(layer.module, key, value)
        assert layer.from_keys == error(layer.module, key, call.value)
        assert layer.from_values == error(layer.module, call.key, value)
        assert layer.model_error == found.result.attention_errors[layer.module]

    bad, suggestion = found.layers[0], found.suggestion
    assert bad.from_values > 3 * bad.from_keys, "the values do the harm"
    assert suggestion is not None
    assert suggestion.modules == (MODULES[1],)
    assert suggestion.policy.rules[1:] == policy.rules
    read = Policy.from_text(f"{suggestion.text}default: {{dtype: turboquant_4bit_nc}}\n")
    assert read.rules == suggestion.policy.rules[:1]
    assert read.formats_for(MODULES[1], 1, 2) == FormatPair("int4_per_token_head", "int8_per_token_head")
    assert sum(layer.divergence for layer in found.layers) == pytest.approx(found.mean_divergence, rel=0.5)
    call = calls[MODULES[1]]
    better = error(MODULES[1], quantized(call.key, "int4_per_token_head"), quantized(call.value, "int8_per_token_head"))
    estimate = bad.divergence * (better.expected / bad.attention_error) ** 2
    assert estimate <= suggestion.target < bad.divergence
    assert suggestion.saved == pytest.approx(bad.divergence - estimate, rel=1e-2)


def test_sampled_queries_see_the_same_keys_as_among_all_queries() -> None:
    call = calls_of(small_model(num_layers=1), TOKENS)[MODULES[0]]
    formats = FormatPair("int4_per_token_head", "int8_per_token_head")
    some = call.sampled(7)
    rows = torch.linspace(0, len(TOKENS) - 1, 7).round().long()
    torch.testing.assert_close(some.on_packed(formats), call.on_packed(formats)[:, :, rows])
    torch.testing.assert_close(some.original, call.original[:, :, rows])


def test_a_listener_may_change_the_result_of_an_attention() -> None:
    model = small_model()
    tap = AttentionTap(model)
    exact = tap(TOKENS, lambda site, call: None)
    torch.testing.assert_close(exact, model(input_ids=TOKENS[None], use_cache=False).logits[0])
    changed = tap(TOKENS, lambda site, call: call.original * (site.module != MODULES[1]))
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    without_layer_1 = model(input_ids=TOKENS[None], use_cache=False).logits[0]
    torch.testing.assert_close(changed, without_layer_1)
    assert not torch.allclose(changed, exact)


def test_without_packed_caches_nothing_is_suggested_and_earlier_compilations_do_not_matter() -> None:
    model, compilations, runs = small_model(num_layers=1), [], []

    def backend(gm: Any, example_inputs: Any) -> Any:
        compilations.append(gm)
        return lambda *args: runs.append(gm) or gm.forward(*args)

    for module in (model, model.model.layers[0]):
        module.compile(backend=backend)
    with torch.no_grad():
        model(input_ids=TOKENS[None], use_cache=False)
        before = len(compilations), len(runs)
        found = kvcompile.compare(model, TOKENS, {"default": {"dtype": "auto"}}, decode=1)
        assert (len(compilations), len(runs)) == before, "the unquantized model is the model itself, uncompiled"
        model(input_ids=TOKENS[None], use_cache=False)
    assert len(compilations) == before[0] > 0
    assert len(runs) == 2 * before[1]
    assert (found.layers, found.suggestion, found.same_top1) == ((), None, 1.0)
    assert found.mean_divergence == pytest.approx(0.0, abs=1e-9)
    assert "the policy says auto for this layer" in " ".join(str(found).split())


def test_the_worst_layers_add_half_of_the_divergence_and_are_few() -> None:
    assert worst({"a": 1.0, "b": 10.0, "c": 1.0, "d": 1.0}) == ["b"]
    assert worst({str(i): 1.0 for i in range(8)}) == ["0", "1"]
    assert worst({"a": 1.0}) == ["a"]


def test_rules_name_layers_where_they_are_unique_and_modules_elsewhere() -> None:
    sites = [Site(f"h.{i}.attn", i, "sdpa") for i in range(6)]
    sites += [Site("h.5.cross_attn", 5, "sdpa"), Site("pooler", None, "sdpa")]
    low, high = FormatPair("int4_per_channel", "int4_unrotated"), FormatPair("fp8_e4m3", "int4_unrotated", 64)
    choices = {f"h.{i}.attn": low if i in (0, 1, 2, 4) else high for i in range(6)} | {"pooler": None}
    base = Policy.load("int8_per_token_head")
    policy = with_rules(base, rules_for(choices, sites, base))
    assert "layers: 0-2, 4}" in as_text(policy.rules).replace("'", "")
    for site in sites:
        expected = choices.get(site.module, FormatPair("int8_per_token_head", "int8_per_token_head"))
        assert policy.formats_for(site.module, site.layer, 6) == expected
    assert layer_ranges([7, 3, 4, 5, 0]) == "0, 3-5, 7"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.randn(3, 4), "expected token ids, integers"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), "expected token ids, integers"),
        (torch.zeros(2, dtype=torch.int64), "1 rows of 2 tokens are too few"),
        ([1, 2, -3, 4], "the token id -3 is not among the 256 of the model"),
        ([1, 2, 256, 4], "the token id 256 is not among the 256 of the model, 0 to 255"),
        ([[1, 2, 3], [1, 2]], "token ids must be integers in rows of one length"),
        (["a", "b", "c"], "token ids must be integers"),
        ([1, 2, 10**30], "token ids must be integers"),
        (None, "token ids must be integers"),
        (torch.zeros(8, dtype=torch.int64, device="meta"), "token ids are on the device meta"),
        ({"input_ids": [1, 2, 3, 4], "attention_mask": "1111"}, "attention_mask must be integers"),
        ({"pixel_values": 1}, "the mapping has no input_ids"),
        ({"input_ids": torch.ones(1, 8, dtype=torch.int64), "attention_mask": torch.tensor([[0] + [1] * 7])}, "padded"),
    ],
)
def test_inputs_that_are_no_token_ids_are_refused(inputs: Any, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        kvcompile.compare(small_model(), inputs)


def test_decode_must_be_a_number_of_tokens() -> None:
    with pytest.raises(EvaluationError, match="decode: expected a number of tokens, got '2'"):
        kvcompile.compare(small_model(), [1, 2, 3, 4, 5, 6], decode="2")  # type: ignore[arg-type]


# The command


def run(command: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, shlex.split(command), prog_name="kvcompile")
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout if code == 0 else result.stderr


def test_the_command_prints_tables_and_writes_the_better_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(small_model(num_layers=1), tmp_path)
    reading = "--prefill 64 --decode 8 --chunk 4 --windows 1"
    command = f"compare --model {tmp_path} --policy int4_unrotated {reading}"
    found: list[Comparison] = []

    def compare_once(*args: Any, **kwargs: Any) -> Comparison:
        found.append(found[0] if found else compare_on(*args, **kwargs))
        return found[0]

    monkeypatch.setattr(compare_module, "compare_on", compare_once)
    out = run(f"{command} --output {tmp_path}/better.yaml")
    assert max(map(len, out.splitlines())) <= WIDTH
    compared = found[0]
    assert compared.suggestion is not None
    assert compared.suggestion.text.strip() in out
    assert [layer.module in out for layer in compared.layers] == [True]
    assert Policy.load(tmp_path / "better.yaml") == compared.suggestion.policy
    data = json.loads(run(f"{command} --json"))
    assert data["layers"][0]["attention_error"] == compared.layers[0].attention_error
    assert Policy.load(data["suggestion"]["policy"]) == compared.suggestion.policy
    assert "'nix' is neither a preset nor a file" in run(f"compare --model {tmp_path} --policy nix", code=2)


def test_the_examples_of_the_help_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples run up to the comparison, on a model with few positions."""
    save(small_model(num_layers=1), tmp_path)
    (tmp_path / "policy.yaml").write_text("default: {dtype: fp8_e4m3}\n")
    (tmp_path / "text.txt").write_bytes(some_bytes(300))
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[Policy, int]] = []

    def stop(model: Any, text: Any, policy: Any, **arguments: Any) -> Comparison:
        asked.append((Policy.load(policy), len(text.windows)))
        raise EvaluationError("stop here")

    monkeypatch.setattr(compare_module, "compare_on", stop)
    examples = [line.partition("kvcompile ")[2] for line in run("compare --help").splitlines() if "    python" in line]
    for example in (*examples, *(re.sub(r"--model \S+", "--model .", c) for c in command_line() if "compare " in c)):
        assert run(f"{example} --prefill 16 --decode 8", code=2) == "kvcompile: error: stop here\n"
    assert asked[1] == (Policy.load("fp8_e4m3"), 1)
    assert len(asked) > len(examples) > 2
