"""``generate()`` of a model that gets no packed cache runs as without kvcompile, and the report says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile import KVCompileError, collect_reports
from kvcompile.generation.generate import Generation

transformers = pytest.importorskip("transformers")
from sweep_library import architecture_of  # noqa: E402
from tiny_llama import attention_llama  # noqa: E402

LOSSLESS = "float32"


def small(model_type: str, attention: str = "sdpa") -> Any:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} lacks it")
    return architecture_of(model_type).build(model_type, attention)


def windowed(model_type: str) -> Any:
    """A model of one sequence at a time, whose layers cannot drop tokens."""
    window = {"sliding_window": 16} if model_type == "mistral" else {}
    model = small(model_type)
    return type(model)(type(model.config)(**{**model.config.to_dict(), **window})).eval()


def generated(model: Any, num_tokens: int = 6, **arguments: Any) -> Tensor:
    num_sequences = 1 if arguments else 2  # assisted decoding takes one
    ids = torch.randint(3, 97, (num_sequences, num_tokens), generator=torch.Generator().manual_seed(1))
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    return model.generate(ids, **common, **arguments)


def keeps_a_cache(model: Any) -> bool:
    """Whether the next request of a compiled model may use a cache again."""
    return Generation.of(model)._caches._kept is not None


@pytest.fixture(autouse=True)
def _node_by_node(without_code_generation: None) -> None:
    """Graphs run node by node."""


@pytest.mark.parametrize(
    ("model_type", "attention", "reason"),
    [
        ("minimax", "sdpa", "Transformers lets the model make its cache itself; call kvcompile.uncompile(model), and "),
        ("deepseek_v4", "eager", "static_cache: DeepseekV4ForCausalLM does not run on one token with a static cache"),
    ],
)
def test_the_report_says_why_nothing_is_packed(model_type: str, attention: str, reason: str) -> None:
    model = small(model_type, attention)
    expected = generated(model)
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        for _ in range(2):
            assert torch.equal(generated(model), expected)
    line = f"generate() of this {type(model).__name__} runs without a packed cache: {reason}"
    assert [note.startswith(line) for note in report.notes] == [True]


def test_a_model_that_makes_its_cache_itself_is_packed_by_model_compile() -> None:
    """This is the remedy in the reason of the test before."""
    model = small("minimax")
    expected = generated(model)
    model.compile(backend=kvcompile.kvquant(policy=LOSSLESS))
    with collect_reports() as report:
        assert torch.equal(generated(model), expected)
    assert report.totals.packed_layers == 1


def test_no_warning_is_given_if_the_policy_packs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A report on nothing else still says why."""
    model = kvcompile.compile(attention_llama(num_layers=1), policy={"default": {"dtype": "auto"}})
    generated(model)
    assert caplog.records == []
    with collect_reports() as report:
        generated(model)
    (note,) = report.notes
    assert note.endswith("without a packed cache: it has no layer of keys and values for which the policy has a format")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"use_cache": False}, "use_cache is False"),
        ({"custom_generate": lambda model, input_ids, **kwargs: model(input_ids).logits.argmax(-1)}, "custom_generate"),
    ],
    ids=["without a cache", "code of the caller"],
)
def test_the_report_on_a_request_that_is_left_to_transformers_says_why(arguments: dict[str, Any], reason: str) -> None:
    """It does not tell users of ``kvcompile.compile`` to compile the model."""
    model = kvcompile.compile(attention_llama(num_layers=1), policy=LOSSLESS)
    with collect_reports() as report:
        generated(model, **arguments)
    line = f"generate() of this LlamaForCausalLM runs without a packed cache: {reason}"
    assert [note.startswith(line) for note in report.notes] == [True]


@pytest.mark.parametrize(
    ("model_type", "num_tokens", "kind"),
    [("lfm2_moe", 6, "LinearAttentionLayer"), ("mistral", 126, "BlockwiseWindow")],
)
def test_the_report_says_why_assisted_decoding_is_not_packed(model_type: str, num_tokens: int, kind: str) -> None:
    model = windowed(model_type)
    expected = generated(model, num_tokens, prompt_lookup_num_tokens=2)
    kvcompile.compile(model, policy=LOSSLESS)
    for _ in range(2):  # the reason is logged once, but every report has it
        with collect_reports() as report:
            assert torch.equal(generated(model, num_tokens, prompt_lookup_num_tokens=2), expected)
        (note,) = report.notes
        assert f"layers of the kind {kind} cannot drop tokens; without assistant_model" in note
    assert not keeps_a_cache(model)
    generated(model)  # other requests get a packed cache
    assert keeps_a_cache(model)


def test_assisted_decoding_is_packed_if_no_token_leaves_its_window() -> None:
    model = windowed("mistral")
    expected = generated(model, prompt_lookup_num_tokens=2)
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        assert torch.equal(generated(model, prompt_lookup_num_tokens=2), expected)
    assert report.notes == []


def test_a_model_whose_inputs_are_not_prepared_for_a_static_cache_keeps_plain_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Llama 4 with Transformers 5.17: its call runs with a static cache, but ``generate()`` raises an error."""

    def masks(*args: Any, **kwargs: Any) -> None:
        raise TypeError("got an unexpected argument")

    model = attention_llama(num_layers=1)
    expected = generated(model)
    monkeypatch.setattr(type(model), "create_masks_for_generate", staticmethod(masks), raising=False)
    kvcompile.compile(model, policy=LOSSLESS)
    for _ in range(2):
        with collect_reports() as report:
            assert torch.equal(generated(model), expected)
        (note,) = report.notes
        assert "does not prepare the inputs of LlamaForCausalLM for a static cache (got an unexpected argument)" in note


def test_inputs_are_prepared_for_chunks_of_llama_4_or_the_report_says_why_not() -> None:
    model = small("llama4_text")
    expected = generated(model)
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        assert torch.equal(generated(model), expected)
    assert report.totals.packed_layers or "does not prepare the inputs of Llama4ForCausalLM" in report.notes[0]


def test_a_model_without_static_caches_is_named() -> None:
    """Transformers has no static layers for DeepSeek-V4, and fails to make a cache."""
    with pytest.raises(KVCompileError, match="static_cache: DeepseekV4ForCausalLM does not run on one token with a"):
        kvcompile.static_cache(small("deepseek_v4", "eager"), 1, 64, LOSSLESS)


class Repeating(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A Llama that reads each prompt five times, and whose code needs values."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids.repeat(1, 5 if input_ids.min().item() >= 0 else 1), **kwargs)


@pytest.mark.parametrize(("kind", "num_written"), [("cpmant", 33), ("a model that needs values", 5)])
def test_a_model_that_writes_more_tokens_than_it_reads_is_refused_before_it_writes(
    kind: str, num_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, a write past the end of the cache would end all work of the process."""
    model = small("cpmant", "eager") if kind == "cpmant" else Repeating(attention_llama(num_layers=1).config).eval()
    expected = generated(model) if kind == "cpmant" else None
    with monkeypatch.context() as during:
        during.setattr(Tensor, "index_copy_", lambda *args: pytest.fail("it writes"))
        with pytest.raises(KVCompileError, match=f"writes {num_written} tokens for one token of input, and a static"):
            kvcompile.static_cache(model, 2, 64, LOSSLESS)
    if expected is not None:
        kvcompile.compile(model, policy=LOSSLESS)
        with collect_reports() as report:
            assert torch.equal(generated(model), expected)
        assert "runs without a packed cache: static_cache: CpmAntForCausalLM writes 33 tokens" in report.notes[0]


def test_a_model_that_needs_values_gets_a_cache_that_is_shorter_than_the_tokens_of_its_test() -> None:
    class NeedsValues(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            return super().forward(input_ids + int(input_ids.min().item() < 0), **kwargs)

    cache = kvcompile.static_cache(NeedsValues(attention_llama(num_layers=1).config).eval(), 1, 2, LOSSLESS)
    assert cache.layers[0].keys.shape[2] == 2


def test_states_outside_of_the_cache_stay_as_they_were() -> None:
    """RecurrentGemma keeps the states of its recurrent layers in attributes of modules."""
    model = small("recurrent_gemma")
    kvcompile.static_cache(model, 2, 64, LOSSLESS)
    states = [module.recurrent_states for module in model.modules() if hasattr(module, "recurrent_states")]
    assert states == [None, None]
    expected = generated(model)
    assert torch.equal(generated(kvcompile.compile(model, policy=LOSSLESS)), expected)
