"""Replace logical caches by packed caches, their writes by stores, and markers by attention on packed data.

The graph's inputs keep their number and order, because AOTAutograd and Inductor refer to inputs by position. A
placeholder of packed data takes the place of the placeholder of each cache. The caller of the compiled graph passes
packed data there. :class:`InputAction` and :class:`OutputAction` describe the caller's duties for each input and
output.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.layout.axes import heads_first
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.spec.packing import float_blocks, move_tokens
from kvcompile.passes.calling import InputAction, OutputAction, Rewritten
from kvcompile.passes.graph.aten import SELECTIONS, SIZE_OPS, VIEW_OPS, WRITE_OPS, shape_of
from kvcompile.passes.graph.inline import fake_mode_of, inline, size_node
from kvcompile.passes.graph.pool_ops import GATHER_SLOTS, POOL_VIEW
from kvcompile.passes.marker import Marker, replace_marker
from kvcompile.passes.prove.cache import Attention, Cache
from kvcompile.passes.prove.cache_write import CacheWrite
from kvcompile.passes.prove.first_position import first_position
from kvcompile.passes.prove.head_ranges import HeadRange, head_ranges
from kvcompile.passes.prove.key_factors import KeyRope
from kvcompile.passes.prove.reads import Read
from kvcompile.passes.rewrite.context_shards import insert_owned, insert_sharded_attention
from kvcompile.passes.rewrite.heads import data_of_heads, group_heads, joined, narrowed, tile_heads
from kvcompile.passes.rewrite.hidden_rows import insert_nan_in_hidden_rows
from kvcompile.passes.rewrite.hidden_tokens import hide_first_tokens
from kvcompile.passes.rewrite.insert import (
    insert_attention,
    insert_dequantize,
    insert_gather,
    insert_move,
    insert_reorder,
    insert_store,
)
from kvcompile.passes.rewrite.key_factors import erase_unused, insert_factors, insert_paired_query
from kvcompile.passes.rewrite.new_tokens import NewTokens, can_be_exact
from kvcompile.passes.rewrite.operand_slots import insert_operand_slots
from kvcompile.passes.rewrite.same_blocks import with_same_blocks

aten = torch.ops.aten

_LOGICAL_OPS = VIEW_OPS | SELECTIONS | WRITE_OPS | SIZE_OPS | {aten.copy.default, POOL_VIEW, GATHER_SLOTS}
"""Operations on proven caches. Nodes without users after the rewrite are remains of the logical cache."""


def is_mutated(placeholder: Node) -> bool:
    """Whether a functional graph changes an input, by a copy into it at its end or by an op that mutates it."""
    return any(user.op == "call_function" and user.is_impure(impure_random=False) for user in placeholder.users)


class CacheRewriter:
    """Rewrites proven caches and the attention that reads them, in one graph."""

    def __init__(
        self,
        gm: GraphModule,
        example_inputs: list[Any],
        shard: ContextShard | None = None,
        *,
        exact_prompts: bool = False,
    ) -> None:
        self.gm = gm
        self.shard = shard
        self.exact_prompts = exact_prompts and shard is None
        self.graph: Graph = gm.graph
        self.placeholders = self.graph.find_nodes(op="placeholder")
        self.output = self.graph.output_node()
        self.fake_mode = fake_mode_of(self.graph)
        self.example_inputs = list(example_inputs)
        self.input_actions: list[InputAction] = []
        self.output_actions: list[OutputAction] = []
        self.packed: dict[Node, Node] = {}
        self.new_tokens: dict[Node, NewTokens] = {}
        self._last_stored: NewTokens | None = None

    def finish(self, gm: GraphModule) -> Rewritten:
        gm.graph.lint()
        gm.recompile()
        return Rewritten(tuple(self.input_actions), tuple(self.output_actions), self.example_inputs)

    def rewrite_cache(self, cache: Cache, layout: PackedLayout, *, dequantizes: bool = False) -> None:
        """Pack the storage of ``cache`` and turn its writes into stores; attention is rewritten afterwards.

        ``dequantizes``: whether keys or values are computed from its dequantized tokens.
        """
        # New nodes go right behind the logical write: its operands are defined there, and its readers come later.
        anchors = [write.node.next for write in cache.writes]
        if cache.base.op == "placeholder":
            data = self._packed_placeholder(cache, layout)
        else:
            with self.graph.inserting_before(anchors[0]):
                data = self._new_data(cache, layout)
        state = in_place = data
        self._last_stored = None
        at_end = cache.kind == "static" and (cache.drops_tokens or cache.last_change is not None)
        dropped = at_end
        for write, anchor in zip(cache.writes, anchors, strict=True):
            with self.graph.inserting_before(anchor):
                state = self._changed(cache, layout, state, write)
            dropped = dropped or cache.makes_new_data(write)
            in_place = in_place if dropped else state
        if cache.kind in ("static", "functional", "growing") and in_place is not data:
            self._write_back(cache, data, in_place)
        self.packed[cache.root] = state
        if self.exact_prompts and layout.takes_new_tokens and self._last_stored is not None:
            self.new_tokens[cache.root] = self._last_stored
        if dequantizes:
            self._dequantize(cache, layout)
        if cache.last_change is not None:
            with self.graph.inserting_before(cache.last_change.node.next):
                state = self._changed(cache, layout, state, cache.last_change)
        if at_end:
            self._write_back(cache, data, state)
        if cache.kind in ("functional", "allocated", "fresh", "growing"):
            self._replace_outputs(cache, layout, state)

    def _dequantize(self, cache: Cache, layout: PackedLayout) -> None:
        """Let the nodes that compute keys or values from a cache read its dequantized tokens."""
        users = [node for node in self.graph.nodes if node in cache.root.users and node in cache.computing]
        axes = cache.root_axes
        with self.graph.inserting_before(users[0]):
            num_tokens = size_node(self.graph, shape_of(cache.root)[axes.index("t")])
            dequantized = insert_dequantize(self.graph, self.packed[cache.root], layout, num_tokens, cache.dtype, axes)
        for user in users:
            user.replace_input_with(cache.root, dequantized)

    def _changed(self, cache: Cache, layout: PackedLayout, state: Node, write: CacheWrite) -> Node:
        """The packed data after a write, inserted at the graph's insertion point."""
        if write.form == "slice" and not write.drops_tokens:
            return state
        x, positions, valid = write.normalise(self.graph)
        if write.reorders:
            self._last_stored = None
            return insert_reorder(self.graph, state, positions)
        has_size = cache.kind in ("static", "functional")
        if write is cache.writes[0] and has_size and x is not None and write.first_sequence is None:
            first = first_position(self.gm, self.placeholders, positions, valid)
            self.input_actions[-1] = replace(self.input_actions[-1], first_position=first)
        if x is not None:
            if write.form == "cat" and cache.kind == "static" and state.op == "placeholder":
                state = self._window(cache, layout, state, self._all_tokens(cache), write)
            if self.shard is not None:
                x, positions, valid = insert_owned(self.graph, self.shard, x, positions, valid)
            self._last_stored = NewTokens(x, positions, valid) if write.first_sequence is None else None
            return insert_store(self.graph, state, layout, x, positions, valid, write.first_sequence)
        if write.drops_tokens:
            self._last_stored = self._last_stored and self._last_stored.after_slice(self.graph, positions)
            return self._window(cache, layout, state, positions, write)
        self._last_stored = None
        return insert_move(self.graph, state, layout, positions)

    def rewrite_attention(self, attention: Attention, key: PackedLayout, value: PackedLayout) -> None:
        """Replace the marker by attention on the packed caches."""
        marker = attention.marker
        with self.graph.inserting_before(marker):
            first_token, num_tokens = attention.key_read.first_token, attention.key_read.num_tokens
            kv_len = size_node(self.graph, first_token + num_tokens)
            if attention.computes_keys:
                self._pack_computed_keys(attention.key_read, key)
            k_data = self._read(attention.key_read, key)
            v_data = k_data if attention.key is attention.value else self._read(attention.value_read, value)
            end = first_token + num_tokens
            stored = end if self.shard is None else self.shard.num_tokens(end)
            data = with_same_blocks(self.graph, (k_data, v_data), (key, value), stored)
            ranges = head_ranges(attention.key_read, attention.value_read)
            assert ranges is not None, "it was checked when the caches were proven"
            call = Marker.of(marker)
            shown = call
            if not statically_known_true(first_token == 0):
                shown = hide_first_tokens(self.graph, call, first_token, num_tokens)
            new = tuple(
                self.new_tokens.get(read.root) if can_be_exact(read, call.query) else None
                for read in (attention.key_read, attention.value_read)
            )
            rope = None
            if attention.rope is not None:
                new = (None, None)  # few queries read new tokens packed
                rope = attention.rope, insert_factors(self.graph, attention.rope, num_tokens, call.query)
            parts = [self._attend(shown, heads, data, (key, value), kv_len, new, rope) for heads in ranges]
            result = joined(self.graph, parts)
            channels = attention.value_read.num_channels
            if channels != value.head_dim:
                result = inline(self.graph, lambda out: out[..., :channels].contiguous(), result)
            if call.mask is not None and call.hidden_rows_are_nan:
                result = insert_nan_in_hidden_rows(self.graph, result, call.mask, num_tokens)
            dtype = marker.meta["val"].dtype
            if result.meta["val"].dtype != dtype:
                result = inline(self.graph, lambda out: out.to(dtype), result)
        replace_marker(self.graph, marker, result)
        if attention.rope is not None:
            erase_unused(self.graph, set(attention.rope.keys.computes))

    def _attend(
        self,
        marker: Marker,
        heads: HeadRange,
        data: tuple[Node, Node],
        layouts: tuple[PackedLayout, PackedLayout],
        kv_len: Any,
        new: tuple[NewTokens | None, ...],
        rope: tuple[KeyRope, Node] | None,
    ) -> Node:
        """Attention of a range of heads, inserted at the graph's insertion point.

        ``rope``: the RoPE of the keys and the factors of all tokens; None if attention reads keys as cached.
        """
        call = narrowed(self.graph, marker, heads)
        k_data = data_of_heads(self.graph, data[0], heads.key, heads.num_heads)
        v_data = k_data if data[1] is data[0] else data_of_heads(self.graph, data[1], heads.value, heads.num_heads)
        if heads.tiles != 1:
            call = group_heads(self.graph, call, heads.num_heads, heads.tiles)
        key, value = layouts[0].of_heads(heads.key, heads.num_heads), layouts[1].of_heads(heads.value, heads.num_heads)
        if self.shard is None:
            new_keys, new_values = (
                tokens and tokens.of_heads(self.graph, first, heads.num_heads)
                for tokens, first in zip(new, (heads.key, heads.value), strict=True)
            )
            key_factors = None
            if rope is not None:
                key_factors = insert_paired_query(self.graph, rope[0], call.query), rope[1]
            result = insert_attention(
                self.graph, call, k_data, v_data, key, value, kv_len, new_keys, new_values, key_factors
            )
        else:
            assert rope is None, "check_shards refuses shards of pre-RoPE keys"
            result = insert_sharded_attention(self.graph, self.shard, call, k_data, v_data, (key, value), kv_len)
        if heads.tiles != 1:
            result = tile_heads(self.graph, result, heads.num_heads, heads.tiles)
        return result

    def _pack_computed_keys(self, read: Read, layout: PackedLayout) -> None:
        """Lay out computed keys as packed data of plain floats, which is a view of whole blocks of tokens."""

        def packed(keys: Tensor) -> Tensor:
            return float_blocks(layout, heads_first(keys, read.axes).to(layout.format.packing.dtype))

        self.packed[read.root] = inline(self.graph, packed, read.root)

    def _read(self, read: Read, layout: PackedLayout) -> Node:
        """The packed data that attention reads. If it is a part of a cache, its nodes go to the insertion point."""
        data = self.packed[read.root]
        if read.gathers:
            return insert_gather(self.graph, data, layout, insert_operand_slots(self.graph, read))
        if read.regroups_heads:
            sizes = [size_node(self.graph, size) for size in (read.num_sequences, read.num_heads)]
            regrouped: Node = inline(
                self.graph, lambda data, *sizes: data.flatten(1, 2).unflatten(1, sizes), data, *sizes
            )
            return regrouped
        if read.first_sequence is None:
            return data
        first, count = (size_node(self.graph, size) for size in (read.first_sequence, read.num_sequences))
        part: Node = inline(self.graph, lambda data, first, count: data.narrow(1, first, count), data, first, count)
        return part

    def erase_logical(self, caches: list[Cache]) -> None:
        """Remove the remaining nodes of the logical caches: write-backs, reads, writes and placeholders."""
        for cache in caches:
            if cache.write_back is not None:
                self.graph.erase_node(cache.write_back)
        bases = {cache.base for cache in caches if cache.kind != "fresh"}
        remains = set(bases)
        for node in self.graph.nodes:
            if not remains.isdisjoint(node.all_input_nodes) and node.target in _LOGICAL_OPS:
                remains.add(node)
        for node in self.graph.nodes:
            if node in remains and node.target in SIZE_OPS:
                with self.graph.inserting_before(node):
                    node.replace_all_uses_with(size_node(self.graph, node.meta["val"]))
        for node in reversed(list(self.graph.nodes)):
            if node in remains and not node.users:
                self.graph.erase_node(node)

    def _data_shape(self, cache: Cache, layout: PackedLayout) -> tuple[Any, ...]:
        count = layout.growing_blocks if cache.in_growing_buffer else layout.blocks
        return (count(self._stored_tokens(cache)), cache.num_sequences, cache.num_kv_heads, layout.block_bytes)

    def _stored_tokens(self, cache: Cache) -> Any:
        """Number of tokens that the storage of a cache holds before a window drops some."""
        if self.shard is not None:
            return self.shard.num_tokens(cache.num_tokens)
        if cache.kind == "static" or not cache.drops_tokens:
            return cache.num_tokens
        stored = takewhile(lambda write: not write.drops_tokens, cache.writes)
        return shape_of([cache.base, *(write.node for write in stored)][-1])[cache.axes.index("t")]

    def _packed_placeholder(self, cache: Cache, layout: PackedLayout) -> Node:
        index = self.placeholders.index(cache.base)
        with self.fake_mode:
            fake = torch.empty(self._data_shape(cache, layout), dtype=torch.uint8, device=cache.base.meta["val"].device)
        with self.graph.inserting_before(cache.base):
            data = self.graph.placeholder(f"{cache.base.name}_packed")
        data.meta["val"] = fake
        self.example_inputs[index] = fake
        self.input_actions.append(self._input_action(cache, layout, index))
        return data

    def _input_action(self, cache: Cache, layout: PackedLayout, index: int) -> InputAction:
        if cache.kind not in ("functional", "growing"):
            kind: Literal["static", "read-only"] = "static" if cache.kind == "static" else "read-only"
            return InputAction(index, kind, layout, cache.input_axes, in_growing_buffer=cache.in_growing_buffer)
        new_tokens = self._stored_tokens(cache) - shape_of(cache.base)[cache.axes.index("t")]
        num_sequences = cache.num_sequences if cache.repeats_sequence else None
        made = None if cache.returns_new_data else cache.returned
        # Outputs that the call wraps as caches (_replace_outputs) and dropped outputs are None.
        places = enumerate(self.output.args[0]) if made is not None else ()
        outputs = tuple(place for place, node in places if node is made)
        return InputAction(
            index,
            "growing" if cache.kind == "growing" else "functional",
            layout,
            cache.axes,
            new_tokens,
            num_sequences,
            outputs,
        )

    def _new_data(self, cache: Cache, layout: PackedLayout) -> Node:
        """Packed zeros, for a cache that the graph makes."""
        device = cache.root.meta["val"].device
        shape = [size_node(self.graph, size) for size in self._data_shape(cache, layout)]
        return inline(self.graph, lambda *sizes: torch.zeros(sizes, dtype=torch.uint8, device=device), *shape)

    def _write_back(self, cache: Cache, data: Node, state: Node) -> None:
        """Mutate the packed input: copy its last state into it. Inductor turns the stores into in-place stores.

        Nothing else aliases the packed data. It replaces one placeholder, and AOTAutograd has already found that the
        logical tensor aliases no other input. Its only users are the stores, and attention reads the last state.
        """
        anchor = cache.write_back if cache.write_back is not None else self.output
        with self.graph.inserting_before(anchor):
            copy = self.graph.call_function(aten.copy_.default, (data, state))
        copy.meta["val"] = data.meta["val"]

    def _all_tokens(self, cache: Cache) -> Node:
        """The positions of all tokens of a cache."""
        device, count = cache.base.meta["val"].device, size_node(self.graph, cache.num_tokens)
        return inline(self.graph, lambda n: torch.arange(n, device=device), count)

    def _window(self, cache: Cache, layout: PackedLayout, state: Node, source: Node, write: CacheWrite) -> Node:
        """New packed data whose first tokens are a byte-by-byte copy of the tokens at ``source``, with room for more.

        A window without a copy would begin at its first token. The place of this token in its block changes in every
        step, so that each compiled graph and kernel would have to take it as an argument. The size of the copy is
        bounded by the window, which attention reads at every step anyway. The copy goes to new data, so that the cache
        that was passed, and every tensor that shares its storage, keeps its tokens. The next step appends to spare room
        in the copy.

        A window of fixed size keeps its input, into which the last state is copied. Attention reads more tokens than
        this state has: the first query's window holds tokens that the last query's window has dropped.
        """
        if cache.returned is not None:
            count = layout.growing_blocks(shape_of(cache.returned)[cache.axes.index("t")] + BLOCK_TOKENS)
        else:
            later = [change.node for change in cache.changes[cache.changes.index(write) :] if change.form == "cat"]
            count = layout.blocks(shape_of(later[-1])[cache.axes.index("t")] if later else cache.num_tokens)
        blocks = size_node(self.graph, count)

        def move(data: Tensor, source: Tensor, blocks: Any) -> Tensor:
            return move_tokens(data, layout, source, data.new_zeros((blocks, *data.shape[1:])))

        return inline(self.graph, move, state, source, blocks)

    def _replace_outputs(self, cache: Cache, layout: PackedLayout, state: Node) -> None:
        outputs = list(self.output.args[0])
        replaced = [index for index, node in enumerate(outputs) if node is cache.returned]
        for index in replaced:
            if cache.kind in ("functional", "growing") and not cache.returns_new_data:
                outputs[index] = None
                continue
            outputs[index] = state
            growing, shape = cache.in_growing_buffer, tuple(shape_of(cache.returned))
            self.output_actions.append(OutputAction(index, growing, shape, cache.dtype, layout, cache.axes))
        self.output.args = (tuple(outputs),)
        # Inductor keeps the strides of the outputs in this list. Packed data has other strides, and None has none.
        visible = self.output.meta.get("user_visible_output_idxs", ())
        self.output.meta["user_visible_output_idxs"] = [index for index in visible if index not in replaced]
