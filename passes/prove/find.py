"""Find the KV caches that marked attention reads, and prove that every use of them is understood.

A site is rewritten only if both its caches are proven. A proven cache is an input of the graph, is made in the graph,
or is returned from it. Only recognised writes write it, only attention reads it, and nothing else sees it. Any other
use raises a Refusal, which becomes the site's reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from kvcompile.kernels.layout.axes import CACHE_AXES, WHOLE_AXES
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.calling import PackedInput
from kvcompile.passes.graph.aliases import viewed_by
from kvcompile.passes.graph.aten import (
    WRITE_OPS,
    arguments,
    shape_of,
    view_chain,
)
from kvcompile.passes.graph.names import AXIS_NAMES, cache_name, operation, operations
from kvcompile.passes.graph.permutations import (
    REPETITIONS,
    axes_before,
    axes_of_last,
    permutes_dims,
    repeats_sequence,
)
from kvcompile.passes.graph.pool_ops import GATHER_SLOTS, POOL_VIEW
from kvcompile.passes.graph.sizes_from_data import has_size_from_data
from kvcompile.passes.graph.states import first_state, states_of
from kvcompile.passes.marker import Marker, is_marker, owners_of_originals
from kvcompile.passes.prove.cache import Attention, Cache, ComputedAttention, ComputedRead, Kind
from kvcompile.passes.prove.cache_write import CacheWrite
from kvcompile.passes.prove.changes import (
    change_after,
    is_new_rows,
    is_overwritten,
    is_written_before,
    keeps_values,
    permutations_of,
)
from kvcompile.passes.prove.computed_keys import read_computed_keys, read_like
from kvcompile.passes.prove.head_ranges import head_ranges
from kvcompile.passes.prove.key_factors import read_rope
from kvcompile.passes.prove.latents import has_one_head, is_written, later_states, read_latents, read_whole
from kvcompile.passes.prove.reads import Read, channels_not_last, trace_read
from kvcompile.passes.prove.reorders import match_reorder
from kvcompile.passes.prove.uses import UseChecker
from kvcompile.passes.prove.why_not import (
    check_not_returned_whole,
    check_whole,
    is_copied_back,
    is_joined,
    no_cache,
)
from kvcompile.passes.prove.windows import is_growing, is_shifting, windows_of
from kvcompile.passes.prove.writes import match_slice, match_write, returned_rows
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten

_PERHAPS_COMPUTED = (Reason.no_cache, Reason.computed_from_cache, Reason.joined, Reason.read_before_write)
"""The reasons to refuse an operand that may be computed from a cache in a way that can be packed."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class CacheFinder:
    """Finds caches by the value that attention reads, and remembers them, so that sites can share a cache."""

    def __init__(
        self, graph: Graph, packed_inputs: Mapping[Node, PackedInput], read_only_caches: Collection[Node] = ()
    ) -> None:
        """
        Args:
            graph: functional ATen graph with markers.
            packed_inputs: placeholders that arrive as packed caches.
            read_only_caches: placeholders of plain tensors that may be packed although the graph only reads them.
        """
        self.output = graph.output_node()
        self.outputs = frozenset(node for node in self.output.args[0] if isinstance(node, Node))
        copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
        self.kept = self.outputs.union(copy.args[1] for copy in copies)
        self.kept_states = {state for node in self.kept for state in states_of(node)}
        self.windows = windows_of(self.output)
        self.dropping = frozenset(window.slice for window in self.windows.values() if window.drops_appended)
        self.packed_inputs = packed_inputs
        self.read_only_caches = read_only_caches
        self.caches: dict[Node, Cache] = {}
        self.uses = UseChecker(self.output, self.outputs, owners_of_originals(graph))
        self.later_states = later_states(graph)

    def attention(self, marker: Node) -> Attention | ComputedAttention:
        """Prove the caches of one site; raises Refusal."""
        try:
            return self._attention(marker)
        except Refusal as refusal:
            if refusal.reason not in _PERHAPS_COMPUTED:
                raise
            computed = self._attention_on_latents(marker) or self._attention_with_computed_keys(marker)
            if computed is None:
                raise
            return computed

    def _attention_on_latents(self, marker: Node) -> ComputedAttention | None:
        read = read_latents(marker, self._may_be_latents)
        if read is None:
            return None
        latents = [self._latents(root, role) for root, role in read.roles.items()]
        return self._computed(marker, read, latents, "computed from latents")

    def _attention_with_computed_keys(self, marker: Node) -> ComputedAttention | None:
        try:
            value = self._read(Marker.of(marker).value, "value")
        except Refusal:
            return None
        read = read_computed_keys(marker, value, self._may_be_cache)
        if read is None:
            return None
        keys = next(root for root in read.roles if root is not value.root)
        key = read_like(keys, value)
        if key is None or value.gathers:
            return None
        caches = self._cache(key, "key"), self._cache(value, "value")
        computed = self._computed(marker, read, caches, "keys computed from their cache")
        fused = []
        if (rope := read_rope(keys, key.axes, Marker.of(marker).key, read.between)) is not None:
            fused.append(Attention(marker, *caches, key, value, rope))
        if Marker.of(marker).key.meta["val"].dtype in _FLOATS:
            with contextlib.suppress(Refusal):
                computed_key = trace_read(Marker.of(marker).key, frozenset(), "key")
                fused.append(Attention(marker, *caches, computed_key, value))
        return replace(computed, fused=tuple(one for one in fused if _has_fitting_heads(marker, one)))

    def _computed(self, marker: Node, read: ComputedRead, caches: Sequence[Cache], note: str) -> ComputedAttention:
        for cache in caches:
            cache.computing |= read.computing
            cache.readers.add(marker)
        return ComputedAttention(marker, tuple(caches), note)

    def _may_be_cache(self, node: Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or not value.is_floating_point() or is_marker(node):
            return False
        if self._is_changed_copy(node):
            return False
        packed = self.packed_inputs.get(node)
        if node in self.outputs or node in self.windows or (packed is not None and "b" in packed.axes):
            return True
        return node in self.later_states and any(is_written(node, axes) for axes in CACHE_AXES)

    def _may_be_latents(self, node: Node) -> bool:
        if not has_one_head(node):
            return False
        packed = self.packed_inputs.get(node)
        if node in self.later_states or (packed is not None and "b" in packed.axes):
            return True
        # New rows of a single token do not tell the token axis. With heads first, the token axis is the third.
        return (node in self.outputs or node in self.windows) and has_one_head(node, 1)

    def _latents(self, root: Node, role: Role) -> Cache:
        if root not in self.caches:
            cache = self.caches[root] = self._prove(read_whole(root), role)
            packed = self.packed_inputs.get(cache.base)
            cache.role = packed.layout.role if packed is not None else role
        return self.caches[root]

    def _attention(self, marker: Node) -> Attention:
        call = Marker.of(marker)
        key_read, value_read = self._read(call.key, "key"), self._read(call.value, "value")
        key = self._cache(key_read, "key")
        if key_read.root is value_read.root:
            _check_order(key, value_read, "value")
            key.serves_both, value = True, key
        else:
            value = self._cache(value_read, "value")
        attention = Attention(marker, key, value, key_read, value_read)
        _check_heads(marker, attention)
        for cache, read in ((attention.key, key_read), (attention.value, value_read)):
            cache.reads.append(read)
            cache.readers.add(marker)
        return attention

    def _read(self, operand: Node, role: Role) -> Read:
        """How ``operand`` reads an existing cache, or new rows that the graph returns."""
        root, chain = view_chain(operand, self.dropping)
        if root.target is GATHER_SLOTS:
            return self._trace(operand, self.dropping, role)
        check_whole(root, role)
        if self._is_changed_copy(root):
            raise no_cache(root, role, self.later_states)
        if (_holds_tokens(root) and not self._are_copied_rows(root, chain)) or root in self.dropping:
            read = self._trace(operand, self.dropping, role)
            states, writes = self._history(read, role)
            if states[0].op == "placeholder" or (writes and _is_zeros(states[0])):
                return read
        returned = self.outputs.union(self.windows)
        root, _ = view_chain(operand, returned)
        is_write = root.target in WRITE_OPS and not _joins_pairs(root)
        if root.op != "placeholder" and root not in returned and not is_write:
            check_not_returned_whole(root, role, returned)
            raise no_cache(root, role, self.later_states)
        return self._trace(operand, returned, role)

    def _trace(self, operand: Node, stop: frozenset[Node], role: Role) -> Read:
        """How ``operand`` reads a cache, in the order of its packed data, its other reads or its writes, if one fits.

        Sequences and heads can be taken for each other if there is one of either. Each site takes the likelier, and the
        sites of one cache, in one graph or several, may differ.
        """
        read = trace_read(operand, stop, role)
        other = read.exchanged
        return other if other is not None and not self._fits_cache(read) and self._fits_cache(other) else read

    def _fits_cache(self, read: Read) -> bool:
        """Whether ``read`` has the order of its cache, as far as the graph tells it."""
        known = self.caches.get(read.root)
        if known is not None:
            return read.axes == known.root_axes
        states = states_of(read.root)
        packed = self.packed_inputs.get(states[0])
        if packed is not None:
            return read.axes == axes_of_last(states, packed.axes)
        return is_written(read.root, read.axes)

    def _is_changed_copy(self, node: Node) -> bool:
        """Whether ``node`` is a changed copy of a cache that the graph writes and keeps without this change."""
        written = (state for state in states_of(node)[:-1] if state.target in WRITE_OPS)
        return node not in self.kept_states and not self.kept_states.isdisjoint(written)

    def _are_copied_rows(self, root: Node, chain: Sequence[Node]) -> bool:
        """Whether attention reads a copy of an input that holds no known cache, and the graph returns the copy."""
        if root.op != "placeholder" or root in self.packed_inputs or root in self.read_only_caches:
            return False
        return any(node in self.outputs and viewed_by(node) is not root for node in chain)

    def _cache(self, read: Read, role: Role) -> Cache:
        known = self.caches.get(read.root)
        if known is None:
            known = self.caches[read.root] = self._prove(read, role)
        if known.role != role:
            raise Refusal(Reason.other_role, role=role, other=known.role)
        _check_order(known, read, role)
        return known

    def _prove(self, read: Read, role: Role) -> Cache:
        states, writes = self._history(read, role)
        base = states[0]
        axes = read.axes
        for state in reversed(states[1:]):
            axes = axes_before(state, axes)
        if axes not in WHOLE_AXES:
            raise channels_not_last(base, role, AXIS_NAMES[axes[-1]])
        kind, write_back = self._kind(read, states, writes, axes, role)
        packed = self.packed_inputs.get(base)
        in_growing_buffer = kind in ("growing", "fresh") or (packed is not None and packed.growing)
        cache = Cache(read.root, role, kind, base, writes, axes, read.axes, write_back, in_growing_buffer)
        pool = next((state for state in states if state.target is POOL_VIEW), None)
        cache.pool_axes = pool.args[2] if pool is not None else None
        cache.repeats_sequence = any(map(_repeats, states))
        if kind == "static":
            cache.last_change = self._shifted(read) or self._reorder_after(read)
        elif kind == "functional":
            cache.last_change, cache.returned = self._reorder_after(read), self._returned_as(read, axes)
        elif kind != "read-only":
            cache.last_change, cache.returned = self._returned(read)
        for state in filter(None, (base, cache.root, cache.returned)):
            if has_size_from_data(state):
                raise Refusal(Reason.size_from_data, role=role, op=operation(state))
        if cache.dtype not in _FLOATS:
            raise Refusal(Reason.unsupported_dtype, role=role, dtype=cache.dtype)
        if base.op == "placeholder":
            self.uses.check_earlier_states(cache, states[:-1])
        return cache

    def _history(self, read: Read, role: Role) -> tuple[list[Node], list[CacheWrite]]:
        """The states of the cache, from before its writes to the value that is read, and the writes in between.

        A write through ``cache.transpose(1, 2)`` is a write between two transposes in the graph, which are states, too.
        """
        node, axes = read.root, read.axes
        states: list[Node] = [node]
        writes: list[CacheWrite] = []
        while True:
            is_returned = node in self.outputs or node in self.windows
            repeats = repeats_sequence(node, axes) and not is_written_before(node)
            if (keeps_values(node) or repeats) and not is_returned:
                node, axes = node.args[0], axes_before(node, axes)
            elif (node.target in WRITE_OPS and not (is_returned and is_new_rows(node))) or self._is_move(node, writes):
                write = _write_of(node, axes, role)
                if write is None:
                    return states, writes
                writes.insert(0, write)
                node = write.base
            else:
                return states, writes
            states.insert(0, node)

    def _kind(
        self, read: Read, states: list[Node], writes: list[CacheWrite], axes: str, role: Role
    ) -> tuple[Kind, Node | None]:
        """The kind of the cache whose first state has the order ``axes``, and the copy back into that state."""
        root, base = read.root, states[0]
        last, order = self._result(read)
        keeps_order = not any(map(permutes_dims, states))
        kept, returned = self._returned(read)
        if any(write.form in ("cat", "slice") for write in writes):
            grows = is_growing(writes if kept is None else [*writes, kept])
            if grows and returned is not None and base.op == "placeholder" and keeps_order:
                return "growing", None
            shifted = self._shifted(read)
            changes = writes if shifted is None else [*writes, shifted]
            write_back = _find_write_back(changes[-1].node, base, read.axes, axes)
            if keeps_order and is_shifting(changes, base, axes) and write_back is not None:
                return "static", write_back
            other = next((write for write in writes if write.form not in ("cat", "slice")), None)
            if other is not None and is_joined(root):
                raise Refusal(Reason.joined, role=role, op=operation(root))
            if other is not None:
                detail = "a cache that grows may only be appended to"
                raise Refusal(Reason.unknown_write, role=role, op=operation(other.node), detail=detail)
            raise no_cache(root, role, self.later_states, base)
        if base.op == "placeholder":
            if not writes:
                if is_overwritten(base):
                    raise Refusal(Reason.read_before_write, role=role, source=cache_name(base))
                if base in self.packed_inputs or (base in self.read_only_caches and not read.gathers):
                    return "read-only", None
                if is_copied_back(base):
                    raise no_cache(root, role, self.later_states)
                raise Refusal(Reason.plain_read_only, role=role, source=cache_name(base))
            write_back = _find_write_back(last, base, order, axes)
            if write_back is not None:
                return "static", write_back
            if not read.gathers and self._returned_as(read, axes) is not None:
                return "functional", None
            if (change := change_after(root, base)) is not None:
                source, op = cache_name(base), operation(change)
                raise Refusal(Reason.written_after_read, role=role, source=source, op=op)
            raise Refusal(Reason.not_written_back, role=role, source=cache_name(base))
        if writes and axes == read.axes and _is_zeros(base) and root in self.outputs:
            return "allocated", None
        if returned is not None:
            writes[:] = [returned_rows(root, read.axes)]
            return "fresh", None
        raise no_cache(root, role, self.later_states, base)

    def _returned(self, read: Read) -> tuple[CacheWrite | None, Node | None]:
        """The change of the cache that is returned, and the output that is the cache after it.

        The change is a slice, as a move, or a reorder of sequences; None if the cache itself is returned.
        """
        root = read.root
        reorder = self._reorder_after(read)
        if reorder is not None:
            forms = permutations_of(reorder.node, reorder.axes)
            kept = next((node for node, axes in forms if axes == read.axes and node in self.outputs), None)
            return (None, None) if kept is None else (reorder, kept)
        if root in self.dropping:
            dropped = self.windows[root.args[0]]
            return None, dropped.output if dropped.is_returned else None
        window = self.windows.get(root)
        if window is None or not window.is_returned:
            return None, root if root in self.outputs else None
        kept = match_slice(window.output, read.axes)
        return kept, None if kept is None else window.output

    def _returned_as(self, read: Read, axes: str) -> Node | None:
        """The output that is the cache, with its dimensions in the order ``axes``."""
        forms = permutations_of(*self._result(read))
        return next((node for node, order in forms if order == axes and node in self.outputs), None)

    def _result(self, read: Read) -> tuple[Node, str]:
        """The cache after its last change, and the order of its dimensions."""
        reorder = self._reorder_after(read)
        return (read.root, read.axes) if reorder is None else (reorder.node, reorder.axes)

    def _reorder_after(self, read: Read) -> CacheWrite | None:
        """The reorder of sequences after attention reads the cache, if the graph keeps its result and not the cache."""
        forms = list(permutations_of(read.root, read.axes))
        if read.gathers or read.root in self.windows or any(form in self.kept for form, _ in forms):
            return None
        reorders = (match_reorder(user, order) for form, order in forms for user in form.users)
        kept = (
            reorder
            for reorder in filter(None, reorders)
            if any(form in self.kept for form, _ in permutations_of(reorder.node, reorder.axes))
        )
        return next(kept, None)

    def _shifted(self, read: Read) -> CacheWrite | None:
        """The slice that a window of fixed size keeps, if attention reads further tokens."""
        window = self.windows.get(read.root)
        return None if window is None or window.is_returned else match_slice(window.output, read.axes)

    def _is_move(self, node: Node, writes: list[CacheWrite]) -> bool:
        """Whether ``node`` may be a slice of a growing cache, before or after a ``cat``."""
        return node in self.dropping or (node.target is aten.slice.Tensor and bool(writes) and writes[0].form == "cat")


def _check_order(cache: Cache, read: Read, role: Role) -> None:
    """Raise Refusal if ``read`` has another order than the cache, which an earlier site has read."""
    if read.axes != cache.root_axes:
        raise Refusal(Reason.unknown_read, role=role, op=operations(read.chain or (read.root,)))


def _write_of(node: Node, axes: str, role: Role) -> CacheWrite | None:
    """``node`` as a write of a cache, or None; raises Refusal if a write of an input is not understood.

    A write into a tensor that the graph makes is a cache write only if it is understood. Other such writes assemble new
    rows (such as channels with rotary positions and channels without) or a tensor for this attention alone.
    """
    try:
        return match_slice(node, axes) or match_write(node, axes, role)
    except Refusal:
        if first_state(node).op == "placeholder":
            raise
        return None


def _holds_tokens(root: Node) -> bool:
    """Whether ``root`` is an input or a newly allocated buffer, or a later state of either; False for new rows."""
    if root.target not in WRITE_OPS:
        return root.op == "placeholder"
    first = first_state(root)
    return first.op == "placeholder" or _is_zeros(first)


def _joins_pairs(root: Node) -> bool:
    """Whether ``root`` stacks channels, as a rotary embedding of neighbouring channels does. It writes no tokens."""
    rank = len(shape_of(root))
    return root.target is aten.cat.default and rank > 4 and bool(arguments(root)[1] == rank - 1)


def _repeats(state: Node) -> bool:
    """Whether ``state`` repeats the sequence before it; an expansion to the same size does not."""
    return state.target in REPETITIONS and not keeps_values(state)


def _find_write_back(node: Node, base: Node, axes: str, axes_of_base: str) -> Node | None:
    """The ``copy_`` into ``base`` of ``node``, which has the order ``axes``, or of a permutation of ``node``."""
    for form, order in permutations_of(node, axes):
        for user in form.users:
            if user.target is aten.copy_.default and user.args[0] is base and order == axes_of_base:
                return user
    return None


def _is_zeros(node: Node) -> bool:
    return node.target is aten.empty.memory_format or (node.target is aten.full.default and node.args[1] == 0)


def _has_fitting_heads(marker: Node, attention: Attention) -> bool:
    """Whether :func:`_check_heads` raises no Refusal."""
    with contextlib.suppress(Refusal):
        _check_heads(marker, attention)
        return True
    return False


def _check_heads(marker: Node, attention: Attention) -> None:
    """Check that the shapes form grouped-query attention over the same tokens; raises Refusal.

    Comparing symbolic sizes here guards on the answer, as intended. Head counts and head_dim are constants of a model
    even under ``dynamic=True``, and key and value caches with different symbols for their lengths grow together.
    """
    call = Marker.of(marker)
    query = shape_of(call.query)
    key, value = attention.key, attention.value
    for cache, operand in ((key, call.key), (value, call.value)):
        fits = len(query) == 4 and bool(query[0] == shape_of(operand)[0])
        num_kv_heads = int(shape_of(operand)[1])
        fits = fits and num_kv_heads > 0 and int(query[1]) % num_kv_heads == 0
        fits = fits and (cache is value or int(query[3]) == cache.head_dim)
        if not fits:
            raise Refusal(Reason.unsupported_shape, query=list(query), role=cache.role, cache=list(cache.shape))
    same_length = bool(attention.key_read.num_tokens == attention.value_read.num_tokens)
    ranges = head_ranges(attention.key_read, attention.value_read)
    if not same_length or (ranges is None and key.num_kv_heads != value.num_kv_heads):
        shapes = [list(key.shape), list(value.shape)]
        raise Refusal(Reason.unsupported_shape, query=list(query), role="key and value", cache=shapes)
    if not bool(attention.key_read.first_token == attention.value_read.first_token):
        raise Refusal(Reason.unknown_read, role="value", op="a slice of other tokens than the keys have")
    if ranges is None:
        raise Refusal(Reason.unknown_read, role="value", op="a repetition of heads that the keys do not have")
    if key is value and any(heads.key != heads.value or heads.num_heads != key.num_kv_heads for heads in ranges):
        raise Refusal(Reason.shared_key_value, detail="only some of its heads are read")
    if key is value and attention.key_read.first_sequence != attention.value_read.first_sequence:
        raise Refusal(Reason.shared_key_value, detail="keys and values are read from different sequences")
