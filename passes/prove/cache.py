"""A proven KV cache of a graph: its input, its writes, its readers and its output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Node

from kvcompile.kernels.layout.axes import size_along
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.prove.cache_write import CacheWrite
from kvcompile.passes.prove.key_factors import KeyRope
from kvcompile.passes.prove.reads import Read

Kind = Literal["static", "functional", "allocated", "growing", "fresh", "read-only"]


@dataclass
class Cache:
    """A proven cache.

    Attributes:
        root: its value after all writes, which attention reads.
        role: ``key`` or ``value``.
        kind: ``static`` (an input that is mutated), ``functional`` (an input that stays unchanged; the graph writes it
            out of place and returns the result), ``allocated`` (made in the graph and returned), ``growing`` (an
            input that is concatenated and returned), ``fresh`` (new keys or values that are returned as a growing
            cache) or ``read-only`` (an input that is packed already, or an attribute of an object of the caller, such
            as an encoder's keys in a cache).
        base: its value before all writes; for ``fresh``, its new rows.
        in_growing_buffer: whether its packed data is in a growing buffer, now or after the graph.
        writes: its writes, in order of execution.
        axes: the order of the dimensions of ``base``. For a pool, the order of its cache of one sequence.
        root_axes: the order of the dimensions of ``root``.
        write_back: the ``copy_`` into ``base`` at the end of the graph, for ``static``.
        last_change: a change of ``root`` after attention reads it: the slice that a sliding window keeps, or a reorder
            of sequences. ``functional``, ``growing`` and ``fresh`` caches return its result in the place of ``root``,
            and ``static`` caches copy it back.
        returned: the output that is the cache, for ``functional``, ``allocated``, ``growing`` and ``fresh``.
        repeats_sequence: whether the only sequence of ``base`` is repeated for all sequences before the first write.
        reads: how each site reads it.
        readers: the markers of the sites that read it.
        pool_axes: the order of the dimensions of ``base`` if it is a pool of slots or blocks. Its later states are a
            cache [1, num_slots, num_kv_heads, head_dim].
        computing: for a cache that keys or values are computed from, the nodes that lead from it to attention.
        serves_both: whether a site reads it both as keys and as values. Its role is then ``key``.
    """

    root: Node
    role: Role
    kind: Kind
    base: Node
    writes: list[CacheWrite]
    axes: str
    root_axes: str
    write_back: Node | None = None
    in_growing_buffer: bool = False
    reads: list[Read] = field(default_factory=list)
    readers: set[Node] = field(default_factory=set)
    pool_axes: str | None = None
    computing: set[Node] = field(default_factory=set)
    serves_both: bool = False
    last_change: CacheWrite | None = None
    returned: Node | None = None
    repeats_sequence: bool = False

    @property
    def changes(self) -> list[CacheWrite]:
        """Its writes, and the change after attention reads it."""
        return self.writes if self.last_change is None else [*self.writes, self.last_change]

    @property
    def drops_tokens(self) -> bool:
        return any(write.drops_tokens for write in self.changes)

    def makes_new_data(self, write: CacheWrite) -> bool:
        """Whether ``write`` makes new packed data: the cache that was passed keeps its data, or has less room."""
        return write.drops_tokens or (write.reorders and self.kind != "static")

    @property
    def returns_new_data(self) -> bool:
        """Whether the graph returns packed data that the caller has not passed."""
        return any(map(self.makes_new_data, self.changes))

    @property
    def num_sequences(self) -> Any:
        """Its number of sequences before they are reordered."""
        reorder = next((change for change in self.changes if change.reorders), None)
        return self.size("b") if reorder is None else size_along(shape_of(reorder.base), reorder.axes, "b")

    @property
    def is_pool(self) -> bool:
        return self.pool_axes is not None

    @property
    def shape(self) -> tuple[Any, ...]:
        """Logical shape after the writes, in the order ``axes``."""
        has_input_shape = self.kind in ("static", "functional") and not self.is_pool and not self.repeats_sequence
        return tuple(shape_of(self.base if has_input_shape else self.root))

    @property
    def input_shape(self) -> tuple[Any, ...]:
        """Logical shape after the writes, as the caller knows it."""
        return tuple(shape_of(self.base)) if self.is_pool else self.shape

    @property
    def input_axes(self) -> str:
        """The order of the dimensions of ``base`` itself."""
        return self.pool_axes or self.axes

    def size(self, axis: str) -> Any:
        """Its size along ``b``, ``h``, ``t`` or ``d``, after the writes; 1 along a dimension that it lacks."""
        return size_along(self.shape, self.axes, axis)

    @property
    def dtype(self) -> torch.dtype:
        return self.root.meta["val"].dtype

    @property
    def num_kv_heads(self) -> int:
        return int(self.size("h"))

    @property
    def head_dim(self) -> int:
        return int(self.size("d"))

    @property
    def num_tokens(self) -> Any:
        return self.size("t")

    @property
    def write_form(self) -> str:
        forms = [write.form for write in self.changes]
        return ", ".join(dict.fromkeys(forms)) or "none"


@dataclass(frozen=True)
class Attention:
    """A marker with its caches proven.

    Attributes:
        marker: the marker.
        key, value: the caches.
        key_read, value_read: how attention reads them. If keys are computed from their cache and RoPE is not proven,
            ``key_read`` is how attention reads the computed keys.
        rope: the RoPE that attention applies to pre-RoPE keys; None for other keys.
    """

    marker: Node
    key: Cache
    value: Cache
    key_read: Read
    value_read: Read
    rope: KeyRope | None = None

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Key and value, or one cache that serves as both."""
        return (self.key,) if self.key is self.value else (self.key, self.value)

    @property
    def computes_keys(self) -> bool:
        """Whether attention reads keys that the graph computes from the dequantized key cache."""
        return self.key_read.root is not self.key.root

    @property
    def dequantized(self) -> tuple[Cache, ...]:
        """The caches whose tokens the graph dequantizes."""
        return (self.key,) if self.computes_keys else ()


@dataclass(frozen=True)
class ComputedRead:
    """The caches from which the keys or values of an attention are computed.

    Attributes:
        roles: the cache values that attention depends on, in the order of the graph, each with the role that it is
            packed in.
        computing: the nodes that lead from these values to the attention, its marker included.
        between: the nodes from the cached keys to the keys of attention that depend on the numbers of the cache, and
            not only on its size, in the order of the graph; empty for latents.
    """

    roles: dict[Node, Role]
    computing: frozenset[Node]
    between: tuple[Node, ...] = ()


@dataclass(frozen=True)
class ComputedAttention:
    """A marker whose keys or values are computed from caches, with these caches proven.

    Attributes:
        marker: the marker.
        caches: the caches, which are dequantized for the computation.
        note: the words of the report for the computation.
        fused: the same attention on packed data, best first: with a proven RoPE of its cached keys, or on computed keys
            and packed values. The first that the formats and the query allow takes the place of this one.
    """

    marker: Node
    caches: tuple[Cache, ...]
    note: str
    fused: tuple[Attention, ...] = ()

    @property
    def dequantized(self) -> tuple[Cache, ...]:
        """The caches whose tokens the graph dequantizes."""
        return self.caches
