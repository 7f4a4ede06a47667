"""``static_cache`` makes a cache that is packed before its first write, with the formats of the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvcompile
from kvcompile.packed.tensor import PackedTensor

transformers = pytest.importorskip("transformers")
from tiny_llama import MAX_LEN, fresh_cache, tiny_llama  # noqa: E402

BATCH = 2
PLAIN_BYTES = BATCH * 2 * MAX_LEN * 64 * 4
"""Bytes of the keys of one layer in float32."""


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest tensor that an operation allocates and returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return out


def formats(cache: Any) -> list[list[str | None]]:
    """The formats of the keys and values of each layer; None for plain ones."""
    return [[getattr(getattr(x, "packed_layout", None), "format_name", None) for x in (layer.keys, layer.values)]
            for layer in cache.layers]  # fmt: skip


def test_no_plain_cache_is_ever_allocated() -> None:
    model = tiny_llama()
    with LargestAllocation() as largest:
        cache = kvcompile.static_cache(model, BATCH, MAX_LEN, "int4_per_token_head")
    assert 0 < largest.nbytes < PLAIN_BYTES / 4
    assert cache.get_seq_length() == 0
    assert kvcompile.cache_nbytes(cache) < 4 * PLAIN_BYTES / 5
    assert not any(layer.keys.dequantize().any() for layer in cache.layers)


def test_rules_choose_the_formats_by_layer_and_module() -> None:
    policy = {
        "rules": [
            {"match": {"layers": "0"}, "dtype": "auto"},
            {"match": {"module": "model.layers.1.self_attn"}, "dtype": "turboquant_k8v4"},
        ],
        "default": {"dtype": "int4"},
    }
    cache = kvcompile.static_cache(tiny_llama(num_layers=3), BATCH, MAX_LEN, policy)
    assert formats(cache) == [
        [None, None],
        ["fp8_e4m3_unit", "int4_unrotated"],
        ["int4_per_channel", "int4_per_token_head"],
    ]


def test_layers_with_a_sliding_window_are_layers_of_transformers() -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    cache = kvcompile.static_cache(transformers.Gemma2ForCausalLM(config), BATCH, MAX_LEN)
    assert formats(cache) == [[None, None], ["int8_per_token_head"] * 2]
    assert not cache.layers[0].is_initialized


@pytest.mark.usefixtures("without_code_generation")
def test_a_compiled_model_computes_the_same_as_with_a_cache_that_it_packs_itself() -> None:
    model = tiny_llama(num_layers=1)
    compiled = torch.compile(model, backend="kvquant", options={"on_unsupported": "error"})
    ids = torch.randint(0, 97, (BATCH, 72))
    caches = kvcompile.static_cache(model, BATCH, MAX_LEN), fresh_cache(model, "static")
    with torch.no_grad():
        for chunk in ids.split([70, 1, 1], dim=1):
            logits, expected = (compiled(input_ids=chunk, past_key_values=cache).logits for cache in caches)
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-5)
    ours, own = (cache.layers[0].keys for cache in caches)
    assert isinstance(own, PackedTensor)
    assert ours.cache_meta == own.cache_meta
    assert (ours - own).norm() < 1e-3 * own.norm() > 0


def test_generate_fills_it_in_eager_code() -> None:
    model = tiny_llama(num_layers=1)
    cache = kvcompile.static_cache(model, BATCH, MAX_LEN, "int8_per_token_head")
    keys = cache.layers[0].keys
    ids = torch.randint(0, 97, (BATCH, 5))
    out = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert out.shape == (BATCH, 9)
    assert cache.layers[0].keys is keys
    assert cache.get_seq_length() == 8
    assert keys[:, :, :8].abs().amax(-1).gt(0).all()
    assert not keys[:, :, 8:].any()


def test_a_format_that_cannot_hold_a_layer_is_an_error_that_names_it() -> None:
    with pytest.raises(kvcompile.PolicyError, match="layer 0: int4_per_group_128 cannot hold its keys: "):
        kvcompile.static_cache(tiny_llama(), BATCH, MAX_LEN, {"default": {"dtype": "int4_per_group_128"}})


def test_a_model_that_does_not_run_is_an_error_that_says_why() -> None:
    class Broken(torch.nn.Linear):
        config = tiny_llama(num_layers=1).config

    with pytest.raises(kvcompile.KVCompileError, match=r"Broken does not run .*input_ids.*PackedTensor\.zeros"):
        kvcompile.static_cache(Broken(2, 2), BATCH, MAX_LEN)
