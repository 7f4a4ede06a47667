"""Stage B, analysis: find the KV caches behind marked attention, and prove that every use of them is understood.

A site is rewritten only if both its caches are proven: the cache arrives as an input (or is made in the graph, or is
returned from it), is written by recognised writes alone, is read by attention alone, and is not visible otherwise. Any
other use raises a Refusal, which becomes the site's reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.match_write import WRITE_OPS, CacheWrite, match_write, returned_rows, shape_of
from kvcompile.passes.refusal import Reason, Refusal
from kvcompile.passes.trace_read import VIEW_OPS, Read, trace_read

aten = torch.ops.aten

Kind = Literal["static", "allocated", "growing", "fresh", "read-only"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SIZES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default)


@dataclass
class Cache:
    """A proven cache.

    Attributes:
        root: its value after all writes; what attention reads.
        role: ``key`` or ``value``.
        kind: ``static`` (an input that is mutated), ``allocated`` (made in the graph, returned), ``growing`` (an input
            concatenated and returned), ``fresh`` (new keys returned, to be a growing cache) or ``read-only``.
        base: its value before all writes; for ``fresh``, its new rows.
        writes: in order of execution.
        token_axis: 2 for [B, H, S, D], 1 for [B, S, H, D].
        write_back: the ``copy_`` into ``base`` at the end of the graph, for ``static``.
        reads: how each site reads it.
    """

    root: Node
    role: str
    kind: Kind
    base: Node
    writes: list[CacheWrite]
    token_axis: int
    write_back: Node | None = None
    reads: list[Read] = field(default_factory=list)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Logical shape after the writes, in the model's own layout."""
        return tuple(shape_of(self.root))

    @property
    def dtype(self) -> torch.dtype:
        return self.root.meta["val"].dtype

    @property
    def num_kv_heads(self) -> int:
        return self.shape[3 - self.token_axis]

    @property
    def head_dim(self) -> int:
        return self.shape[3]

    @property
    def num_tokens(self) -> Any:
        return self.shape[self.token_axis]

    @property
    def write_form(self) -> str:
        forms = [write.form for write in self.writes]
        return ", ".join(dict.fromkeys(forms)) or "none"


@dataclass(frozen=True)
class Attention:
    """A marker with its caches proven."""

    marker: Node
    key: Cache
    value: Cache
    key_read: Read
    value_read: Read


class CacheFinder:
    """Finds caches by the value that attention reads; remembers them, so that sites can share one."""

    def __init__(self, graph: Graph, packed_inputs: frozenset[Node]) -> None:
        """``packed_inputs``: placeholders whose caller passes a packed cache already."""
        self.output = graph.output_node()
        self.outputs = frozenset(node for node in self.output.args[0] if isinstance(node, Node))
        self.packed_inputs = packed_inputs
        self.caches: dict[Node, Cache] = {}

    def attention(self, marker: Node) -> Attention:
        """Prove the caches of one site; raises Refusal."""
        _, key, value, *_ = marker.args
        key_read, value_read = self._read(key, "key"), self._read(value, "value")
        if key_read.root is value_read.root:
            raise Refusal(Reason.shared_key_value)
        attention = Attention(
            marker, self._cache(key_read, "key"), self._cache(value_read, "value"), key_read, value_read
        )
        _check_heads(marker, attention)
        for cache, read in ((attention.key, key_read), (attention.value, value_read)):
            cache.reads.append(read)
        return attention

    def _read(self, operand: Node, role: str) -> Read:
        return trace_read(operand, self.outputs, role)

    def _cache(self, read: Read, role: str) -> Cache:
        known = self.caches.get(read.root)
        if known is None:
            known = self.caches[read.root] = self._prove(read, role)
        if known.role != role:
            raise Refusal(Reason.shared_key_value)
        return known

    def _prove(self, read: Read, role: str) -> Cache:
        writes, base = self._writes(read, role)
        kind, write_back = self._kind(read, writes, base, role)
        cache = Cache(read.root, role, kind, base, writes, read.token_axis, write_back)
        if cache.dtype not in _FLOATS:
            raise Refusal(Reason.unsupported_dtype, role=role, dtype=cache.dtype)
        self._check_base_uses(cache)
        return cache

    def _writes(self, read: Read, role: str) -> tuple[list[CacheWrite], Node]:
        """The writes that led to the value read, oldest first, and the value before them."""
        writes: list[CacheWrite] = []
        node = read.root
        while node.target in WRITE_OPS and not (node in self.outputs and _is_new_rows(node)):
            write = match_write(node, read.token_axis, role)
            if write is None:
                break
            writes.insert(0, write)
            node = write.base
        return writes, node

    def _kind(self, read: Read, writes: list[CacheWrite], base: Node, role: str) -> tuple[Kind, Node | None]:
        root = read.root
        if writes and writes[-1].form == "cat":
            if len(writes) == 1 and base.op == "placeholder" and root in self.outputs:
                return "growing", None
            raise Refusal(Reason.no_cache, role=role)
        if base.op == "placeholder":
            if not writes:
                if base in self.packed_inputs:
                    return "read-only", None
                raise Refusal(Reason.plain_read_only, role=role, source=base.name)
            for user in root.users:
                if user.target is aten.copy_.default and user.args[0] is base:
                    return "static", user
            raise Refusal(Reason.not_written_back, role=role, source=base.name)
        if writes and _is_zeros(base) and root in self.outputs:
            return "allocated", None
        if root in self.outputs:
            writes[:] = [returned_rows(root, read.token_axis)]
            return "fresh", None
        raise Refusal(Reason.no_cache, role=role)

    def _check_base_uses(self, cache: Cache) -> None:
        """No one else may look at the cache before or between its writes."""
        states = [write.base for write in cache.writes]
        for state, write in zip(states, cache.writes, strict=True):
            if cache.kind == "fresh" or (cache.kind == "allocated" and state is cache.base):
                continue  # a value made in this graph, not a buffer: its other users see no write
            for user in state.users:
                own = user is write.node or user in write.own or user.target in _SIZES
                if not own and user is not cache.write_back:
                    raise Refusal(
                        Reason.used_elsewhere, role=cache.role, source=state.name, user=user.format_node() or user.name
                    )

    def check_reads(self, cache: Cache) -> None:
        """Nothing but attention, the write-back and the caller may see the cache after its writes; raises Refusal."""
        if cache.kind == "fresh":
            return  # the rows themselves stay as they are; only attention and the caller see them quantized
        allowed = {node for read in cache.reads for node in read.chain}
        for node in (cache.root, *allowed):
            for user in node.users:
                if user in allowed or user.target in _SIZES or user is cache.write_back:
                    continue
                if user.target is torch.ops.kvcompile.sdpa.default and any(_last(read) is node for read in cache.reads):
                    continue
                if user is self.output and node is cache.root and cache.kind in ("allocated", "growing"):
                    continue
                reason = Reason.used_elsewhere if node is cache.root else Reason.escaping_view
                what = "the caller" if user is self.output else user.format_node() or user.name
                raise Refusal(reason, role=cache.role, source=cache.root.name, user=what)


def _last(read: Read) -> Node:
    return read.chain[-1] if read.chain else read.root


def _is_zeros(node: Node) -> bool:
    return node.target is aten.empty.memory_format or (node.target is aten.full.default and node.args[1] == 0)


def _is_new_rows(node: Node) -> bool:
    """Whether a returned ``cat`` only assembles new rows (as rotary embeddings do), rather than extending a cache."""
    return node.target is aten.cat.default and (
        not isinstance(node.args[0][0], Node) or node.args[0][0].op != "placeholder"
    )


def _check_heads(marker: Node, attention: Attention) -> None:
    query = shape_of(marker.args[0])
    for cache in (attention.key, attention.value):
        batch, heads, head_dim = cache.shape[0], cache.num_kv_heads, cache.head_dim
        fits = len(query) == 4 and isinstance(heads, int) and isinstance(head_dim, int) and isinstance(query[1], int)
        fits = fits and query[1] % heads == 0 and statically_known_true(query[0] == batch)
        fits = fits and (cache.role == "value" or query[3] == head_dim)
        if not fits:
            raise Refusal(
                Reason.unsupported_shape, query=list(query), role=cache.role, cache=list(cache.shape)
            )
    # Lengths of growing key and value caches can be distinct symbols; comparing them guards on their equality.
    same_length = bool(attention.key_read.num_tokens == attention.value_read.num_tokens)
    if attention.key.num_kv_heads != attention.value.num_kv_heads or not same_length:
        raise Refusal(
            Reason.unsupported_shape, query=list(query), role="key and value", cache=list(attention.value.shape)
        )


assert VIEW_OPS.isdisjoint(WRITE_OPS), "an op is either a view of a cache or a write of it"
