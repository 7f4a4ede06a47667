"""The KV cache of every layer of a model, from its config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import sympy

from kvcompile.errors import shown
from kvcompile.planning.config_file import MAX_LAYERS, Fields
from kvcompile.planning.errors import PlanError
from kvcompile.planning.families import FAMILIES, Family

CONTEXT = sympy.Symbol("context", integer=True, positive=True)
"""The tokens of one user, prompt and output. In an encoder-decoder model, the tokens of the decoder."""

Kind = Literal["full", "sliding", "chunked", "latent", "cross"]

_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM = ("head_dim", "d_kv")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_MAX_CONTEXT = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
_DECODER_NUM_LAYERS = ("num_decoder_layers", "decoder_layers", "num_layers", "num_hidden_layers")
_DECODER_NUM_HEADS = ("decoder_attention_heads", "num_heads", "num_attention_heads")

_KIND_OF_LAYER_TYPE: dict[str, Kind | None] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "hybrid": "full",
    **dict.fromkeys(("linear_attention", "mamba", "conv", "recurrent", "moe", "mlp")),
}
_HAS_STATE = {"linear_attention", "mamba", "conv", "recurrent", "hybrid"}

_RECURRENT = r"mamba|ssm|rwkv|lru_|linear_(num|key|value|attn)|hybrid|attn_layer|attention_layers|block_type"
_OTHER_CACHES = r"index_|indexer|compress|swa_|_global_|global_head|cross_attention_|new_decoder_arch"


@dataclass(frozen=True)
class LayerCache:
    """The cache that one layer keeps for one user.

    Attributes:
        module: qualified name of the module that calls attention, for policies.
        layer: the index of the layer.
        kind: the tokens that the cache keeps: ``full`` and ``latent`` keep all, ``sliding`` the last ``limit``,
            ``chunked`` the current chunk of ``limit``, ``cross`` the ``limit`` tokens of the encoder.
        num_kv_heads: the number of keys, and of values, of one token.
        key_dim: channels of a key.
        value_dim: channels of a value; 0 if the values are read from the keys' vectors, as in latent attention.
        limit: the maximum number of tokens, see ``kind``; None if all tokens are kept.
        num_heads: query heads; 0 if the config does not give the number, or if they read latents.
        shards: the number of ranks that divide its tokens (:mod:`kvcompile.planning.ranks`).
    """

    module: str
    layer: int
    kind: Kind
    num_kv_heads: int
    key_dim: int
    value_dim: int
    limit: int | None = None
    num_heads: int = 0
    shards: int = 1

    @property
    def window(self) -> int | None:
        """The number of tokens of its window or chunk; None without one."""
        return None if self.kind == "cross" else self.limit

    @property
    def tokens(self) -> sympy.Expr:
        """The number of tokens that the cache keeps, an expression in :data:`CONTEXT`."""
        if self.limit is None:
            return CONTEXT / self.shards
        return sympy.Integer(self.limit) if self.kind == "cross" else sympy.Min(CONTEXT, self.limit)


@dataclass(frozen=True)
class ModelCaches:
    """All caches of a model.

    Attributes:
        model_type: the model type of the config.
        dtype: the dtype of the model and of an unquantized cache, e.g. ``bfloat16``.
        caches: in the order of the layers; layers without a cache are skipped.
        num_layers: layers up to the last layer with attention. Negative indices in policies count from it.
        max_context: the longest context that the model supports; None if the config does not give it.
        notes: remarks for the reader of the plan, one line each.
        hidden_size: the width of the model; None if the config does not give it.
    """

    model_type: str
    dtype: str
    caches: tuple[LayerCache, ...]
    num_layers: int
    max_context: int | None
    notes: tuple[str, ...]
    hidden_size: int | None = None

    @property
    def groups(self) -> dict[LayerCache, int]:
        """The distinct caches and their numbers; layer and module are ignored."""
        return Counter(replace(cache, layer=0, module="") for cache in self.caches)

    @property
    def limits(self) -> tuple[int, ...]:
        """The contexts at which the cache of some layer stops growing."""
        return tuple(sorted({cache.window for cache in self.caches if cache.window}))


def read_model_caches(fields: Fields, source_tokens: int | None = None) -> ModelCaches:
    """The caches of the model that ``fields`` describes.

    Args:
        fields: from :func:`kvcompile.planning.config_file.read_config`.
        source_tokens: tokens of the encoder, for encoder-decoder models whose config does not fix them.

    Raises:
        PlanError: a field is missing, or has a value that the planner does not know, or the model has no cache.
    """
    notes: list[str] = []
    family = FAMILIES.get(fields.model_type)
    if family is None:
        _refuse_unknown_caches(fields)
        family = Family()
        known = "the plan assumes plain attention over the KV heads in the config, in every decoder layer"
        notes.append(f"model_type {shown(fields.model_type)} is unknown to the planner; {known}")
    caches = tuple(_Reader(fields, family, notes).read(source_tokens))
    if not caches:
        raise PlanError(f"{fields.source}: no layer of this model keeps keys and values; give a decoder's config")
    return ModelCaches(
        model_type=fields.model_type or "unnamed",
        dtype=_dtype(fields, notes),
        caches=caches,
        num_layers=1 + max(cache.layer for cache in caches),
        max_context=fields.integer(*_MAX_CONTEXT),
        notes=tuple(notes),
        hidden_size=fields.integer(*_HIDDEN_SIZE),
    )


class _Reader:
    """Reads the caches of one config, and appends remarks for the reader of the plan to ``notes``."""

    def __init__(self, fields: Fields, family: Family, notes: list[str]) -> None:
        self.fields = fields
        self.family = family
        self.notes = notes

    def read(self, source_tokens: int | None) -> Iterator[LayerCache]:
        if self.fields.get("is_encoder_decoder"):
            yield from self._encoder_decoder(source_tokens)
        else:
            if source_tokens is not None:
                raise PlanError(f"{self.fields.source}: --source-tokens is for encoder-decoder models; leave it out")
            yield from self._decoder()

    def _decoder(self) -> Iterator[LayerCache]:
        fields = self.fields
        kinds = self._kinds(fields.require(*_NUM_LAYERS, most=MAX_LAYERS))
        shared = fields.integer("num_kv_shared_layers", least=0)
        if shared:
            self.notes.append(f"the last {shared} layers read the caches of earlier layers and keep none")
            kinds = kinds[:-shared]
        module = self.family.module
        if fields.nested:
            module = re.sub("^model[.]", "model.language_model.", module)
        for layer, kind in enumerate(kinds):
            if kind is not None:
                yield self._layer_cache(self._fields_of(layer), module.format(layer=layer), layer, kind)

    def _layer_cache(self, fields: Fields, module: str, layer: int, kind: Kind) -> LayerCache:
        limit = None
        if kind in ("sliding", "chunked"):
            limit = fields.require("sliding_window" if kind == "sliding" else "attention_chunk_size")
        if fields.get("kv_lora_rank") is not None:
            # DeepSeek-V2, arXiv:2405.04434, section 2.1: a latent and a rotary key, shared by all heads.
            width = fields.require("kv_lora_rank") + fields.require("qk_rope_head_dim")
            return LayerCache(module, layer, "latent" if kind == "full" else kind, 1, width, 0, limit)
        key_dim = _head_dim(fields, _NUM_HEADS)
        value_dim = fields.integer("v_head_dim") or key_dim
        num_heads = fields.integer(*_NUM_HEADS) or 0
        return LayerCache(module, layer, kind, self._num_kv_heads(fields), key_dim, value_dim, limit, num_heads)

    def _num_kv_heads(self, fields: Fields) -> int:
        if fields.get("multi_query") is True:
            return 1
        given = fields.integer(*_NUM_KV_HEADS)
        if given is None and self.family.multi_head:
            return fields.require(*_NUM_HEADS)
        return given or fields.require(*_NUM_KV_HEADS)

    def _fields_of(self, layer: int) -> Fields:
        """The fields, with the config's overrides for this layer."""
        overrides = self.fields.get("per_layer_config")
        if not isinstance(overrides, dict):
            return self.fields
        of_layers = {int(key): own for key, own in overrides.items() if re.fullmatch("[0-9]{1,9}", key)}
        own: Any = of_layers.get(layer, {})
        if not isinstance(own, dict):
            raise self.fields.error("per_layer_config", f"expected an object of fields for layer {layer}")
        return replace(self.fields, values={**self.fields.values, **own})

    def _kinds(self, num_layers: int) -> list[Kind | None]:
        """The kind of every layer's cache; None for a layer without keys and values."""
        layer_types = self.fields.get("layer_types")
        if layer_types is None:
            layer_types = [self._layer_type(layer) for layer in range(num_layers)]
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise self.fields.error("layer_types", f"expected a list of {num_layers} names")
        unknown = [name for name in layer_types if not isinstance(name, str) or name not in _KIND_OF_LAYER_TYPE]
        if unknown:
            known = ", ".join(_KIND_OF_LAYER_TYPE)
            text = f"the planner does not know what a layer {shown(unknown[0])} keeps (known: {known})"
            raise self.fields.error("layer_types", text)
        with_state = sum(name in _HAS_STATE for name in layer_types)
        if with_state:
            self.notes.append(
                f"{with_state} of {num_layers} layers keep a state of constant size for each user, which is not counted"
            )
        return [_KIND_OF_LAYER_TYPE[name] for name in layer_types]

    def _layer_type(self, layer: int) -> str:
        """The type of a layer in a config without ``layer_types``, from older fields."""
        fields = self.fields
        if fields.get("full_attention_interval") is not None:
            return "linear_attention" if (layer + 1) % fields.require("full_attention_interval") else "full_attention"
        if fields.get("attn_layer_period") is not None:
            is_attention = layer % fields.require("attn_layer_period") == (fields.get("attn_layer_offset") or 0)
            return "attention" if is_attention else "mamba"
        if fields.get("attention_chunk_size") is not None:
            return self._chunked(layer)
        if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
            return "full_attention"
        if fields.get("use_sliding_window") is True:
            return "sliding_attention" if layer >= fields.require("max_window_layers") else "full_attention"
        period = fields.integer("sliding_window_pattern") or self.family.full_every
        if period is None:
            raise fields.missing("layer_types")
        return "full_attention" if period and (layer + 1) % period == 0 else "sliding_attention"

    def _chunked(self, layer: int) -> str:
        """Llama 4: layers with a rotary embedding attend within chunks; every fourth layer has no rotary embedding."""
        rotary = self.fields.get("no_rope_layers")
        period = self.fields.integer("no_rope_layer_interval") or 4
        if rotary and (not isinstance(rotary, list) or layer >= len(rotary)):
            raise self.fields.error("no_rope_layers", "expected a list with a number for each layer")
        uses_rope = rotary[layer] if rotary else (layer + 1) % period
        return "chunked_attention" if uses_rope else "full_attention"

    def _encoder_decoder(self, source_tokens: int | None) -> Iterator[LayerCache]:
        fields, family = self.fields, self.family
        fixed = fields.integer("max_source_positions")
        if fixed and source_tokens and source_tokens > fixed:
            raise PlanError(
                f"{fields.source}: --source-tokens {source_tokens}: give at most {fixed}, the max_source_positions"
            )
        source = source_tokens or fixed
        if source is None:
            raise PlanError(
                f"{fields.source}: an encoder-decoder model; give the encoder's tokens with --source-tokens"
            )
        if not family.cross_module:
            raise PlanError(
                f"{fields.source}: the planner does not know the encoder-decoder {shown(fields.model_type)}"
            )
        num_heads = fields.require(*_DECODER_NUM_HEADS)
        head_dim = _head_dim(fields, _DECODER_NUM_HEADS)
        for layer in range(fields.require(*_DECODER_NUM_LAYERS, most=MAX_LAYERS)):
            yield LayerCache(family.module.format(layer=layer), layer, "full", num_heads, head_dim, head_dim)
            cross = family.cross_module.format(layer=layer)
            yield LayerCache(cross, layer, "cross", num_heads, head_dim, head_dim, source)


def _head_dim(fields: Fields, num_heads_names: tuple[str, ...]) -> int:
    given = fields.integer(*_HEAD_DIM)
    if given is not None:
        return given
    hidden_size, num_heads = fields.require(*_HIDDEN_SIZE), fields.require(*num_heads_names)
    if hidden_size % num_heads:
        raise fields.error("head_dim", f"is missing, and {num_heads} heads do not divide {hidden_size} channels")
    return hidden_size // num_heads


def _dtype(fields: Fields, notes: list[str]) -> str:
    for values in (fields.values, fields.outer):
        dtype = values.get("dtype") or values.get("torch_dtype")
        if dtype not in (None, "auto"):
            return str(dtype).removeprefix("torch.")
    notes.append("the config names no dtype; bfloat16 is assumed")
    return "bfloat16"


def _refuse_unknown_caches(fields: Fields) -> None:
    """Raise PlanError if a field of an unknown model type hints at layers without plain keys and values."""
    says_which = fields.get("layer_types", "full_attention_interval") is not None
    pattern = _OTHER_CACHES if says_which else f"{_RECURRENT}|{_OTHER_CACHES}"
    hint = next((name for name, value in fields.values.items() if value and re.search(pattern, name)), None)
    if hint is not None:
        what = "says that some layers do not keep plain keys and values"
        raise fields.error(hint, f"{what}, and the planner does not know model_type {shown(fields.model_type)}")
