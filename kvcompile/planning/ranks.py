"""One of several GPUs that run a model together: its share of weights and caches, and the data that ranks exchange.

Tensor parallel divides KV heads and linear layers, as the plans of Transformers do. Context parallel divides the tokens
of every packed cache (docs/parallel.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.planning.errors import PlanError
from kvcompile.planning.model_caches import LayerCache, ModelCaches
from kvcompile.planning.storage import DTYPE_BYTES, of_dtype
from kvcompile.planning.stored_caches import PolicyCaches
from kvcompile.planning.weights import Weights

LINK = 450 * 10**9
"""Bytes per second that a GPU sends and, at the same time, receives: NVLink of an H100 or H200, according to NVIDIA."""

LATENCY = Fraction(10, 10**6)
"""Seconds of a collective of few bytes within a node. An all-reduce of 64 KiB on two H100s took 8 us."""

_SUM_BYTES = 4
"""Bytes of an element of the outputs that context parallel gathers: float32."""


@dataclass(frozen=True)
class Collective:
    """An operation in which all ranks take part, in one decode step.

    Attributes:
        name: the operation and its data.
        count: the number of runs in a step.
        nbytes: bytes that a rank receives in each run.
        seconds: seconds of all runs.
    """

    name: str
    count: int
    nbytes: int
    seconds: Fraction


@dataclass(frozen=True)
class Ranks:
    """The ranks that run a model together.

    Attributes:
        tensor_parallel: ranks that divide heads and linear layers.
        context_parallel: ranks that divide the tokens of every cache.
        link: bytes per second that a rank receives from others.
        latency: seconds of a collective of few bytes.
    """

    tensor_parallel: int = 1
    context_parallel: int = 1
    link: int = LINK
    latency: Fraction = LATENCY

    @property
    def count(self) -> int:
        return self.tensor_parallel * self.context_parallel

    def caches(self, model: ModelCaches) -> ModelCaches:
        """The caches of a rank that holds its share of the heads and all tokens.

        Raises:
            PlanError: tensor parallel does not divide the heads.
        """
        caches = tuple(self._heads(cache) for cache in model.caches)
        return replace(model, caches=caches)

    def _heads(self, cache: LayerCache) -> LayerCache:
        size = self.tensor_parallel
        if cache.kind == "latent":
            return cache  # all heads read the same latent
        for heads, what in ((cache.num_kv_heads, "KV heads"), (cache.num_heads, "query heads")):
            if heads % size:
                raise PlanError(
                    f"--tensor-parallel: {size} does not divide the {heads} {what} of layer {cache.layer}; use a "
                    "divisor, and --context-parallel for more ranks"
                )
        return replace(cache, num_kv_heads=cache.num_kv_heads // size, num_heads=cache.num_heads // size)

    def tokens(self, policy: PolicyCaches) -> PolicyCaches:
        """The caches of a policy with the tokens of the rank that has the most tokens.

        Blocks of 64 tokens are assigned to ranks in turn. This rank therefore has the number of blocks of the context
        divided by the number of ranks, rounded up. Caches that the backend does not divide are counted whole, with a
        note.
        """
        if self.context_parallel == 1:
            return policy
        divided = tuple(
            replace(one, cache=replace(one.cache, shards=self.context_parallel)) if _divides(policy, index) else one
            for index, one in enumerate(policy.caches)
        )
        whole = sum(one.cache.shards == 1 for one in divided)
        note = (
            f"{policy.policy}: every rank keeps all tokens of {whole} of {len(divided)} caches: context parallel "
            "divides packed caches that keep all tokens, in formats without recent or first tokens in full precision"
        )
        return replace(policy, caches=divided, notes=(*policy.notes, note) if whole else policy.notes)

    def weights(self, weights: Weights) -> Weights:
        """The weights of a rank: its share of linear layers, experts and the head, and all embeddings and norms."""
        size = self.tensor_parallel
        if size == 1:
            return weights
        if weights.parameters is None:
            meaning = f"{weights.meaning}, divided among {size} ranks"
            return replace(weights, nbytes=-(-weights.nbytes // size), meaning=meaning)
        parameters, of_role = weights.parameters, dict(weights.bytes_of_role)
        head = sum(parameters.count_of(term) for term in parameters.terms if term.name == "head")
        other = of_role["other"] / max(parameters.count("other"), 1)
        of_role["other"] -= head * other * Fraction(size - 1, size)
        of_role |= {role: of_role[role] / size for role in ("linear", "experts")}
        meaning = f"{weights.meaning}; linear layers, experts and the head are divided among {size} ranks"
        return replace(weights, nbytes=round(sum(of_role.values())), bytes_of_role=of_role, meaning=meaning)

    def collectives(self, model: ModelCaches, policy: PolicyCaches, users: int) -> tuple[Collective, ...]:
        """The collectives of a decode step. ``policy`` holds the caches of a rank.

        Raises:
            PlanError: the config does not say the width of the model.
        """
        return tuple(self._collectives(model, policy, users))

    def _collectives(self, model: ModelCaches, policy: PolicyCaches, users: int) -> Iterator[Collective]:
        size = self.tensor_parallel
        if size > 1:
            if model.hidden_size is None:
                raise PlanError(
                    "--tensor-parallel: give the config a hidden_size, the size of the all-reduced hidden states"
                )
            nbytes = users * model.hidden_size * DTYPE_BYTES[of_dtype(model.dtype).name]
            moved = nbytes * 2 * (size - 1) // size  # a ring: reduce-scatter, then all-gather
            yield self._collective("all-reduce of hidden states", 2 * model.num_layers, moved)
        divided = [one.cache for one in policy.caches if one.cache.shards > 1]
        for cache in dict.fromkeys(replace(cache, layer=0, module="") for cache in divided):
            count = sum(replace(one, layer=0, module="") == cache for one in divided)
            own = users * cache.num_heads * (cache.value_dim + 1) * _SUM_BYTES
            yield self._collective("all-gather of outputs", count, own * (self.context_parallel - 1))

    def _collective(self, name: str, count: int, nbytes: int) -> Collective:
        return Collective(name, count, nbytes, count * (self.latency + Fraction(nbytes, self.link)))


def _divides(policy: PolicyCaches, index: int) -> bool:
    """Whether context parallel divides the tokens of a cache (passes/prove/check_shards.py)."""
    one = policy.caches[index]
    packed = all(storage.block_tokens == BLOCK_TOKENS and storage.residual is None for _, storage, _ in one.halves)
    return packed and one.cache.kind == "full"
