"""The number of a model's parameters, as formulas.

The formulas count the parameters of the ``...ForCausalLM`` classes of Transformers 5.17 exactly, for the model types in
:data:`ARCHITECTURES`. For any other model, give the size of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import sympy

from kvcompile.errors import shown
from kvcompile.planning.config_file import Fields
from kvcompile.planning.errors import PlanError
from kvcompile.planning.model_caches import ModelCaches

Role = Literal["linear", "experts", "embedding", "other"]
Flag = bool | str


@dataclass(frozen=True)
class Architecture:
    """The parts of a model type's layers besides the matrices.

    A flag is true, false, or the name of a field of the config, which counts as false if it is missing.

    Attributes:
        qkv_bias, out_bias, mlp_bias: whether the projections of attention and the feed-forward part have biases.
        gated_mlp: whether the feed-forward part has three matrices instead of two.
        norms: the number of normalizations of the hidden state in a layer.
        norm_bias: whether the normalizations have a bias in addition to their weight.
        qk_norm: the normalization of queries and keys has a weight for every channel of a ``head`` or of ``all`` heads.
        learned_positions: whether the model has a table of position embeddings.
        sinks: whether every head has a learned attention sink.
        tied: whether the output head is the embedding, for configs without ``tie_word_embeddings``.
        experts: the kind of mixture of experts, such as ``mixtral``, ``qwen`` or ``deepseek``; empty if there are no
            experts.
    """

    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    gated_mlp: bool = True
    norms: int = 2
    norm_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    learned_positions: bool = False
    sinks: bool = False
    tied: bool = False
    experts: Literal["", "mixtral", "qwen", "deepseek"] = ""


_LLAMA = Architecture("attention_bias", "attention_bias", "mlp_bias")
_DEEPSEEK = Architecture(experts="deepseek")

ARCHITECTURES: dict[str, Architecture] = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gemma": Architecture("attention_bias", "attention_bias", tied=True),
    "gemma2": Architecture("attention_bias", "attention_bias", norms=4, tied=True),
    "gemma3_text": Architecture("attention_bias", "attention_bias", norms=4, qk_norm="head", tied=True),
    "gpt2": Architecture(True, True, True, False, norm_bias=True, learned_positions=True, tied=True),
    "gpt_neox": Architecture("attention_bias", "attention_bias", True, False, norm_bias=True),
    "gpt_oss": Architecture("attention_bias", "attention_bias", True, sinks=True, experts="mixtral"),
    "granite": _LLAMA,
    "llama": _LLAMA,
    "ministral3": Architecture(),
    "mistral": Architecture(),
    "mixtral": Architecture(experts="mixtral"),
    "olmo2": Architecture("attention_bias", "attention_bias", qk_norm="all"),
    "olmo3": Architecture("attention_bias", "attention_bias", qk_norm="all"),
    "phi3": Architecture(),
    "qwen2": Architecture(qkv_bias=True),
    "qwen2_moe": Architecture(qkv_bias=True, experts="qwen"),
    "qwen3": Architecture("attention_bias", "attention_bias", qk_norm="head"),
    "qwen3_moe": Architecture("attention_bias", "attention_bias", qk_norm="head", experts="qwen"),
    "smollm3": Architecture("attention_bias", "attention_bias", "mlp_bias", tied=True),
    "starcoder2": Architecture("use_bias", "use_bias", "use_bias", False, norm_bias=True, tied=True),
}


@dataclass(frozen=True)
class Term:
    """Some parameters of a model.

    Attributes:
        name: their name in the plan.
        role: weight quantization packs ``linear`` matrices and routed ``experts``. A step looks up one row of an
            ``embedding`` per token. The head, normalizations and biases are ``other``.
        formula: the number of parameters.
    """

    name: str
    role: Role
    formula: sympy.Expr


@dataclass(frozen=True)
class ParameterCount:
    """All parameters of a model.

    Attributes:
        terms: groups of parameters.
        values: the values of the symbols in the formulas.
        num_experts, experts_per_token: the experts of a layer, and the experts that serve one token; both are 1 if
            there are no experts.
    """

    terms: tuple[Term, ...]
    values: Mapping[sympy.Symbol, int]
    num_experts: int = 1
    experts_per_token: int = 1

    def count(self, *roles: Role) -> int:
        """The number of parameters in these roles; without an argument, in all roles."""
        formula = sum(term.formula for term in self.terms if not roles or term.role in roles)
        return int(sympy.sympify(formula).subs(self.values))

    def count_of(self, term: Term) -> int:
        return int(term.formula.subs(self.values))

    def experts_read(self, num_tokens: int) -> Fraction:
        """The share of experts that a step over ``num_tokens`` tokens reads, if the router chooses uniformly."""
        return 1 - (1 - Fraction(self.experts_per_token, self.num_experts)) ** num_tokens


def count_parameters(fields: Fields, caches: ModelCaches) -> ParameterCount:
    """The parameters of the model that ``fields`` describes.

    Raises:
        PlanError: the model type is not in :data:`ARCHITECTURES`, the model is a part of a larger model, or a field is
            missing.
    """
    architecture = ARCHITECTURES.get(fields.model_type)
    remedy = "give the size of the weights, e.g. --weights 16GB"
    if architecture is None:
        raise PlanError(
            f"{fields.source}: cannot count the parameters of model_type {shown(fields.model_type)}; {remedy}"
        )
    if fields.nested:
        raise PlanError(f"{fields.source}: the config also describes parts outside {fields.part[:-1]}; {remedy}")
    if fields.get("per_layer_config"):
        raise PlanError(f"{fields.source}: cannot count parameters of layers with a per_layer_config; {remedy}")
    return _Counter(fields, caches, architecture).count()


class _Counter:
    """Builds the terms of one model; ``symbol`` makes a symbol and stores its value."""

    def __init__(self, fields: Fields, caches: ModelCaches, architecture: Architecture) -> None:
        self.fields = fields
        self.architecture = architecture
        self.values: dict[sympy.Symbol, int] = {}
        self.terms: list[Term] = []
        self.biases: list[sympy.Expr] = []
        first = caches.caches[0]
        self.layers = self.symbol("num_layers", caches.num_layers)
        self.hidden = self.symbol("hidden_size", fields.require("hidden_size", "n_embd"))
        self.heads = self.symbol("num_heads", fields.require("num_attention_heads", "n_head"))
        if first.kind != "latent":
            self.kv_heads = self.symbol("num_kv_heads", first.num_kv_heads)
            self.head_dim = self.symbol("head_dim", first.key_dim)

    def symbol(self, name: str, value: int) -> sympy.Symbol:
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        self.values[symbol] = value
        return symbol

    def flag(self, flag: Flag) -> bool:
        return bool(self.fields.get(flag)) if isinstance(flag, str) else flag

    def add(self, name: str, role: Role, formula: Any) -> None:
        if formula != 0:
            self.terms.append(Term(name, role, formula))

    def count(self) -> ParameterCount:
        self._embeddings()
        if self.architecture.experts == "deepseek":
            self._latent_attention()
        else:
            self._attention()
        num_experts, experts_per_token = 1, 1
        if self.architecture.experts:
            num_experts, experts_per_token = self._experts()
        else:
            self._mlp(self.layers)
        bias = 2 if self.architecture.norm_bias else 1
        self.add("normalizations", "other", bias * self.hidden * (self.architecture.norms * self.layers + 1))
        self.add("biases", "other", sum(self.biases))
        return ParameterCount(tuple(self.terms), self.values, num_experts, experts_per_token)

    def _embeddings(self) -> None:
        vocab = self.symbol("vocab_size", self.fields.require("vocab_size"))
        tied = self.fields.get("tie_word_embeddings")
        tied = self.architecture.tied if tied is None else bool(tied)
        if tied:
            self.add("embedding, which is the head", "other", vocab * self.hidden)
        else:
            self.add("embedding", "embedding", vocab * self.hidden)
            self.add("head", "other", vocab * self.hidden)
        if self.architecture.learned_positions:
            positions = self.symbol("num_positions", self.fields.require("n_positions", "max_position_embeddings"))
            self.add("position embedding", "embedding", positions * self.hidden)

    def _attention(self) -> None:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.add("attention", "linear", self.layers * self.hidden * (2 * queries + 2 * keys))
        if self.flag(self.architecture.qkv_bias):
            self.biases.append(self.layers * (queries + 2 * keys))
        if self.flag(self.architecture.out_bias):
            self.biases.append(self.layers * self.hidden)
        weights = {"": 0, "head": 2 * self.head_dim, "all": queries + keys}[self.architecture.qk_norm]
        self.add("normalization of queries and keys", "other", self.layers * weights)
        if self.architecture.sinks:
            self.add("attention sinks", "other", self.layers * self.heads)

    def _latent_attention(self) -> None:
        """DeepSeek-V2, arXiv:2405.04434, appendix C."""
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        latent, rope, nope, value = (self.symbol(name, self.fields.require(name)) for name in names)
        queries = self.heads * (nope + rope)
        rank = self.fields.integer("q_lora_rank")
        q_rank = sympy.Integer(0) if rank is None else self.symbol("q_lora_rank", rank)
        query = self.hidden * queries if rank is None else q_rank * (self.hidden + queries)
        keys = self.hidden * (latent + rope) + latent * self.heads * (nope + value)
        self.add("attention", "linear", self.layers * (query + keys + self.heads * value * self.hidden))
        self.add("normalization of latents", "other", self.layers * (latent + q_rank))
        if self.flag("attention_bias"):
            self.biases.append(self.layers * (q_rank + latent + rope + self.hidden))

    def _mlp(self, layers: sympy.Expr) -> None:
        inner = self.fields.integer("intermediate_size", "n_inner")
        if inner is None and self.fields.get("n_embd") is not None:
            inner = 4 * self.values[self.hidden]  # the default of GPT-2's class for n_inner
        width = self.symbol("intermediate_size", inner or self.fields.require("intermediate_size"))
        matrices = 3 if self.architecture.gated_mlp else 2
        self.add("feed-forward", "linear", layers * matrices * self.hidden * width)
        if self.flag(self.architecture.mlp_bias):
            self.biases.append(layers * ((matrices - 1) * width + self.hidden))

    def _experts(self) -> tuple[int, int]:
        """Add the terms of layers with experts; returns the experts of a layer, and the experts that serve a token."""
        fields, sparse = self.fields, self._sparse_layers()
        total = fields.require("num_local_experts", "num_experts", "n_routed_experts")
        experts = self.symbol("num_experts", total)
        own_width = "intermediate_size" if self.architecture.experts == "mixtral" else "moe_intermediate_size"
        width = self.symbol(own_width, fields.require(own_width))
        self.add("experts", "experts", sparse * experts * 3 * self.hidden * width)
        self.add("routers", "other", sparse * experts * self.hidden)
        if self.flag(self.architecture.mlp_bias):
            self.biases.append(sparse * experts * (2 * width + self.hidden + 1))
        shared: sympy.Expr = sympy.Integer(0)
        if fields.get("shared_expert_intermediate_size"):
            shared = self.symbol("shared_width", fields.require("shared_expert_intermediate_size"))
            self.add("gates of shared experts", "other", sparse * self.hidden)
        elif fields.get("n_shared_experts"):
            shared = self.symbol("num_shared_experts", fields.require("n_shared_experts")) * width
        self.add("shared experts", "linear", sparse * 3 * self.hidden * shared)
        if self.values[sparse] < self.values[self.layers]:
            self._mlp(self.layers - sparse)
        return total, fields.require("num_experts_per_tok", "top_k_experts")

    def _sparse_layers(self) -> sympy.Symbol:
        """The number of layers that have experts."""
        first = self.fields.integer("first_k_dense_replace", least=0) or 0
        step = self.fields.integer("decoder_sparse_step") or 1
        dense = self.fields.get("mlp_only_layers") or []
        layers = range(first, self.values[self.layers])
        return self.symbol("num_sparse_layers", sum(i not in dense and (i + 1) % step == 0 for i in layers))
