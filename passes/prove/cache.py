"""A KV cache that was proven in a graph: how it comes in, what is written, who reads it, and what goes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Node

from kvcompile.kernels.layout.axes import BLOCK_AXES, SLOT_AXES
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.prove.reads import Read
from kvcompile.passes.prove.writes import CacheWrite

Kind = Literal["static", "allocated", "growing", "fresh", "read-only"]


@dataclass
class Cache:
    """A proven cache.

    Attributes:
        root: its value after all writes; what attention reads.
        role: ``key`` or ``value``.
        kind: ``static`` (an input that is mutated), ``allocated`` (made in the graph, returned), ``growing`` (an input
            concatenated and returned), ``fresh`` (new keys returned, to be a growing cache) or ``read-only`` (an input
            that is packed already, or that an object holds as it holds a cache; the encoder's part of one, say).
        base: its value before all writes; for ``fresh``, its new rows.
        in_growing_buffer: whether its packed data lies, or will lie, in a growing buffer.
        writes: in order of execution.
        axes: the order of the dimensions of ``base``; of a pool, that of the cache of one sequence.
        write_back: the ``copy_`` into ``base`` at the end of the graph, for ``static``.
        kept: the slice of ``root`` that is returned in its place, for ``growing`` and ``fresh``, or copied back, for
            ``static``; a window does that.
        returned: the output that it is, for ``allocated``, ``growing`` and ``fresh``.
        reads: how each site reads it.
        readers: the markers of those sites.
        is_pool: whether ``base`` is a pool of slots, [num_slots, num_kv_heads, head_dim] or with slots in blocks; its
            later states are a cache [1, num_slots, num_kv_heads, head_dim].
        heads_first: whether it is a pool whose blocks hold heads before tokens.
        computing: the nodes that lead from it, a cache of latents, to attention whose keys and values are computed.
        serves_both: whether a site reads it as its keys and as its values, such as latents; its role is then ``key``.
    """

    root: Node
    role: Role
    kind: Kind
    base: Node
    writes: list[CacheWrite]
    axes: str
    write_back: Node | None = None
    in_growing_buffer: bool = False
    reads: list[Read] = field(default_factory=list)
    readers: set[Node] = field(default_factory=set)
    is_pool: bool = False
    heads_first: bool = False
    computing: set[Node] = field(default_factory=set)
    serves_both: bool = False
    kept: CacheWrite | None = None
    returned: Node | None = None

    @property
    def changes(self) -> list[CacheWrite]:
        """Its writes, and what becomes of it after attention has read it."""
        return self.writes if self.kept is None else [*self.writes, self.kept]

    @property
    def drops_tokens(self) -> bool:
        return any(write.drops_tokens for write in self.changes)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Logical shape after the writes, in the order ``axes``."""
        return tuple(shape_of(self.base if self.kind == "static" and not self.is_pool else self.root))

    @property
    def input_shape(self) -> tuple[Any, ...]:
        """Logical shape after the writes, as the caller knows it."""
        return tuple(shape_of(self.base)) if self.is_pool else self.shape

    @property
    def input_axes(self) -> str:
        """The order of the dimensions of ``base`` itself."""
        if not self.is_pool:
            return self.axes
        return SLOT_AXES if len(shape_of(self.base)) == 3 else BLOCK_AXES[self.heads_first]

    def size(self, axis: str) -> Any:
        """Its size after the writes along ``b``, ``h``, ``t`` or ``d``."""
        return self.shape[self.axes.index(axis)]

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
    """A marker with its caches proven."""

    marker: Node
    key: Cache
    value: Cache
    key_read: Read
    value_read: Read

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Key and value, or one cache that serves as both."""
        return (self.key,) if self.key is self.value else (self.key, self.value)


@dataclass(frozen=True)
class AttentionOnLatents:
    """A marker whose keys and values are computed from caches, with these proven."""

    marker: Node
    caches: tuple[Cache, ...]
