"""The caches of a model under one policy, and their bytes as expressions in the context."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import sympy
import torch

from kvcompile.errors import PolicyError
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.packed.room import droppable_tokens, room_of_window
from kvcompile.passes.site import Site
from kvcompile.planning.errors import PlanError
from kvcompile.planning.model_caches import CONTEXT, LayerCache, ModelCaches
from kvcompile.planning.storage import DTYPE_BYTES, Measure, Storage, compressed, of_dtype, uncompressed
from kvcompile.policy.policy import Policy


@dataclass(frozen=True)
class StoredCache:
    """The cache of one layer, and the storages of its keys and values.

    Attributes:
        room: the number of tokens for which a cache with a window has room in a prepared model, where it drops whole
            blocks; None if its room is its window, or it has none.
    """

    cache: LayerCache
    key: Storage
    value: Storage
    room: int | None = None

    @property
    def halves(self) -> tuple[tuple[Role, Storage, int], ...]:
        """(role, storage, channels) for the key, and for the value unless values are read from the keys."""
        key: tuple[Role, Storage, int] = ("key", self.key, self.cache.key_dim)
        return (key, ("value", self.value, self.cache.value_dim)) if self.cache.value_dim else (key,)

    def nbytes(self, measure: Measure) -> sympy.Expr:
        """Bytes for one user, in ``CONTEXT``."""
        return sympy.Add(*self.bytes_by_storage(measure).values())

    def bytes_by_storage(self, measure: Measure) -> dict[str, sympy.Expr]:
        """:meth:`nbytes` by the name of the storage."""
        parts: dict[str, sympy.Expr] = {}
        for _, storage, width in self.halves:
            nbytes = self.cache.num_kv_heads * storage.nbytes(width, self._tokens(measure), measure)
            parts[storage.name] = parts.get(storage.name, sympy.Integer(0)) + nbytes
        return parts

    def _tokens(self, measure: Measure) -> sympy.Expr:
        """The number of tokens that the cache keeps, or for which it allocates memory."""
        is_longer = measure == "allocated" and self.room is not None
        return sympy.Min(CONTEXT, self.room) if is_longer else self.cache.tokens

    @property
    def workspace(self) -> sympy.Expr:
        """Bytes that attention of this layer needs in addition to the cache, for one user, in ``CONTEXT``.

        If a plain cache has fewer KV heads than query heads, models repeat its heads. The repeated keys and the
        repeated values are in memory at the same time. ``generate()`` of Transformers needs this memory twice: eager
        code reads a prompt, while the memory of a recorded decode step stays reserved. Attention on packed caches
        repeats no heads.
        """
        if self.key.format is not None or self.cache.num_heads <= self.cache.num_kv_heads:
            return sympy.Integer(0)
        widths = [storage.nbytes(width, self.cache.tokens, "allocated") for _, storage, width in self.halves]
        return 2 * self.cache.num_heads * sympy.Add(*widths)

    def bytes_per_token(self, measure: Measure) -> int:
        """Bytes of an additional token, without the padding of blocks."""
        vectors = [storage.bytes_per_token(width, measure) for _, storage, width in self.halves]
        return int(self.cache.num_kv_heads * sum(vectors))


@dataclass(frozen=True)
class PolicyCaches:
    """The caches of all layers under one policy.

    Attributes:
        policy: the name of the policy, as given.
        caches: in the order of the layers.
        notes: remarks for the reader of the plan, one line each.
    """

    policy: str
    caches: tuple[StoredCache, ...]
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def groups(self) -> dict[StoredCache, int]:
        """The distinct layers and their numbers; index and module are ignored."""
        return Counter(replace(stored, cache=replace(stored.cache, layer=0, module="")) for stored in self.caches)

    def nbytes(self, measure: Measure) -> sympy.Expr:
        """Bytes of one user's cache, in ``CONTEXT``."""
        return sympy.Add(*(count * stored.nbytes(measure) for stored, count in self.groups.items()))

    @property
    def workspace(self) -> sympy.Expr:
        """Bytes that attention needs besides the caches, for one user, in ``CONTEXT``. One layer runs at a time."""
        return sympy.Max(*(stored.workspace for stored in self.groups), 0)

    def bytes_by_storage(self, measure: Measure) -> dict[str, sympy.Expr]:
        """:meth:`nbytes` by the name of the storage."""
        parts: dict[str, sympy.Expr] = {}
        for stored, count in self.groups.items():
            for name, nbytes in stored.bytes_by_storage(measure).items():
                parts[name] = parts.get(name, sympy.Integer(0)) + count * nbytes
        return parts

    def bytes_per_token(self, measure: Measure) -> int:
        """Bytes of a token that every layer keeps, without the tokens of an encoder and the padding of blocks."""
        own = (item for item in self.groups.items() if item[0].cache.kind != "cross")
        return sum(count * stored.bytes_per_token(measure) for stored, count in own)


def apply_policy(name: str, model: ModelCaches) -> PolicyCaches:
    """The caches of ``model`` under the policy called ``name``.

    Args:
        name: ``bf16``, ``fp16`` or ``fp32`` for uncompressed caches; otherwise a preset or a file for ``Policy.load``.
        model: the caches.

    Raises:
        PolicyError: the policy does not exist, is invalid, or is strict and has a rule without effect.
        PlanError: the policy says ``on_unsupported: error`` and a format cannot hold a layer's vectors.
    """
    if name in DTYPE_BYTES:
        storage = uncompressed(name)
        return PolicyCaches(name, tuple(StoredCache(cache, storage, storage) for cache in model.caches))
    return store_caches(name, _load(name), model)


def store_caches(name: str, policy: Policy, model: ModelCaches) -> PolicyCaches:
    """The caches of ``model`` under ``policy``. Notes and errors call the policy ``name``.

    Raises:
        PolicyError, PlanError: as in :func:`apply_policy`.
    """
    notes = _idle_rules(name, policy, model)
    refusals: Counter[str] = Counter()
    caches = tuple(_stored(cache, policy, model, refusals) for cache in model.caches)
    for reason, count in refusals.items():
        text = f"{name}: {count} of {len(caches)} caches stay {of_dtype(model.dtype).name}: {reason}"
        if policy.on_unsupported == "error":
            raise PlanError(f"{text}; the policy says on_unsupported: error")
        notes.append(text)
    return PolicyCaches(name, _with_rooms(caches), tuple(notes))


def _with_rooms(caches: tuple[StoredCache, ...]) -> tuple[StoredCache, ...]:
    """``caches`` with the rooms of their windows, which all drop the same number of tokens at once."""
    halves = [half for stored in caches if stored.cache.window for half in stored.halves]
    drops = droppable_tokens(storage.residual for _, storage, _ in halves)
    rooms = (room_of_window(stored.cache.window, drops) if stored.cache.window else None for stored in caches)
    return tuple(replace(stored, room=room) for stored, room in zip(caches, rooms, strict=True))


def _load(name: str) -> Policy:
    try:
        return Policy.load(name)
    except PolicyError as error:
        if Path(name).is_file():
            raise
        raise PolicyError(f"{error}; uncompressed: {', '.join(DTYPE_BYTES)}") from None


def _idle_rules(name: str, policy: Policy, model: ModelCaches) -> list[str]:
    """A line for every rule without effect; PolicyError if the policy is strict and has such a rule."""
    sites = [Site(cache.module, cache.layer, cache.kind) for cache in model.caches]
    lines = [f"{name}: {line}" for line in policy.unmatched_rules(sites, model.num_layers)]
    if lines and policy.strict:
        raise PolicyError("\n".join(lines))
    return lines


def _stored(cache: LayerCache, policy: Policy, model: ModelCaches, refusals: Counter[str]) -> StoredCache:
    """The storages of a layer's cache.

    If a format cannot hold the cache, the cache keeps the model's dtype, as in the backend, and ``refusals`` counts the
    reason.
    """
    plain = of_dtype(model.dtype)
    formats = policy.formats_for(cache.module, cache.layer, model.num_layers, sizes_only=True)
    if formats is None:
        return StoredCache(cache, plain, plain)
    dtype = getattr(torch, model.dtype)
    key = compressed(formats.key, formats.residual("key", dtype))
    value = compressed(formats.value, formats.residual("value", dtype))
    stored = StoredCache(cache, key, value)
    for role, storage, width in stored.halves:
        reason = storage.refusal(width, role)
        if reason is not None:
            refusals[f"{storage.name}: {reason}"] += 1
            return StoredCache(cache, plain, plain)
    return stored
