"""Models with a ``generate()`` of their own, such as PEFT models and BLIP-2: the decoders in them are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile import PackedTensor, collect_reports
from kvcompile.generation.generate import Generation, generative_models

transformers = pytest.importorskip("transformers")
from tiny_llama import attention_llama  # noqa: E402
from transformers import GenerationMixin, LlamaForCausalLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")

LOSSLESS = {"default": {"dtype": "float32"}}
IDS = torch.tensor([[5, 6, 7, 8] * 5])


class Adapted(nn.Module):
    """Wraps a model as PEFT does: it is no Transformers model, and its model generates."""

    def __init__(self) -> None:
        super().__init__()
        self.model = attention_llama(num_layers=1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.generate(*args, **kwargs)


class Forwarding(Adapted):
    """Has the attributes of the wrapped model, as PEFT models have."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class Describing(LlamaForCausalLM):
    """Is a Transformers model whose ``generate()`` lets another decoder generate, as in BLIP-2."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.language_model = attention_llama(num_layers=1)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.language_model.generate(*args, **kwargs)


class Speaking(LlamaForCausalLM):
    """Decodes itself, and lets another decoder generate for each token, as in Moshi.

    Attributes:
        spoken: the tokens that the other decoder has generated.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.depth = attention_llama(num_layers=1)
        self.spoken: list[Tensor] = []

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        self.spoken.append(generated(self.depth))
        return super().prepare_inputs_for_generation(*args, **kwargs)


def small(cls: type[Any]) -> Any:
    torch.manual_seed(0)
    return cls(attention_llama(num_layers=1).config).eval()


def generated(model: Any, ids: Tensor = IDS) -> Tensor:
    result: Tensor = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return result


def caches_of(model: Any) -> Any:
    """The tensors of the cache with which ``model`` generates."""
    result = model.generate(IDS, max_new_tokens=2, pad_token_id=0, return_dict_in_generate=True)
    return [layer.keys for layer in result.past_key_values.layers]


@pytest.mark.parametrize("make", [Adapted, lambda: small(Describing)], ids=["adapted", "describing"])
def test_the_decoder_in_a_model_generates_with_a_packed_cache(make: Any) -> None:
    model = make()
    expected = generated(model)
    assert kvcompile.compile(model, policy=LOSSLESS) is model
    with collect_reports() as report:
        assert torch.equal(generated(model), expected)
    assert [site.rewritten for graph in report.graphs for site in graph.sites] == [True]
    assert all(isinstance(keys, PackedTensor) for keys in caches_of(model))
    assert torch.equal(kvcompile.uncompile(model)(IDS).logits, make()(IDS).logits)
    assert not any(Generation.of(module) for module in model.modules())
    assert torch.equal(generated(model), expected)


def test_a_call_of_a_wrapper_is_compiled() -> None:
    model = Adapted()
    expected = model(IDS).logits
    kvcompile.compile(model, policy=LOSSLESS)
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(model(IDS).logits, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_module_names_lead_through_a_wrapper() -> None:
    (site,) = kvcompile.explain(Forwarding(), input_ids=IDS).sites
    assert site.module == "model.model.layers.0.self_attn"


def test_a_decoder_that_serves_each_step_of_another_one_stays_eager() -> None:
    model = small(Speaking)
    expected, spoken = generated(model), model.spoken
    model.spoken = []
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        assert torch.equal(generated(model), expected)
    assert [len(graph.sites) for graph in report.graphs] == [1]
    assert torch.equal(torch.stack(model.spoken), torch.stack(spoken))


def test_models_that_generate_themselves_are_compiled_alone() -> None:
    llama = attention_llama(num_layers=1)
    assert generative_models(llama) == [llama]
    assert generative_models(nn.Sequential(llama)) == []
    assert generative_models(transformers.T5ForConditionalGeneration(transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20
    ))) == []  # fmt: skip
    both = Adapted()
    both.other = attention_llama(num_layers=1)
    assert generative_models(both) == [both.model, both.other]
    assert issubclass(Speaking, GenerationMixin)
