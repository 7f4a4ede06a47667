"""A layer with a sliding window that moves by whole blocks of tokens.

The layer of Transformers with a sliding window moves all tokens of its cache by one slot at every step. This costs
three times the traffic of attention, and formats whose blocks share scales, or are kept exactly, cannot do it. A
:class:`BlockwiseWindow` has room for more tokens than its window. It writes new tokens to the next slots, as a layer
without a window does, and drops its first blocks when it has no more room. Transformers computes attention masks from
``get_mask_sizes``, so they hide the tokens that have left the window.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcompile.caches.layer import append_pair, clear, extend
from kvcompile.errors import KVCompileError
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.packed.room import drop_first_tokens_, room_of_window
from kvcompile.packed.writes import plain, takes_pairs

if TYPE_CHECKING:
    from transformers.cache_utils import StaticLayer
else:
    StaticLayer = object  # Transformers is not imported before there is a cache: see blockwise_window_class


class BlockwiseMoves(StaticLayer):
    """The methods of the class ``BlockwiseWindow``, see :func:`blockwise_window_class`.

    The slots of such a layer hold the last tokens in order, at least those of its window.

    Attributes:
        window: number of tokens to which attention of a token may read, itself included.
        drops: the least number of tokens that are dropped at once.
        holds_request: whether there is room for all tokens of the longest request.
        num_dropped: number of tokens that were dropped. Slot ``i`` holds the token at position ``num_dropped + i``.
        cumulative_length: number of used slots, int64 [], on the device.
        cumulative_length_int: number of all tokens so far.
        num_prepared: number of tokens of the next update if :func:`prepared_for_step` has made room for them and will
            count them; otherwise 0. The update then reads no number that changes from step to step, so that compiled
            steps do not depend on one.
    """

    is_sliding = True
    keys: Any
    values: Any

    def __init__(self, max_cache_len: int, sliding_window: int, drops: int = BLOCK_TOKENS) -> None:
        """
        Args:
            max_cache_len: number of tokens of the longest request.
            sliding_window: number of tokens of the window.
            drops: number of tokens that can be dropped at once, see :func:`kvcompile.packed.room.droppable_tokens`.
        """
        super().__init__(max_cache_len=min(max_cache_len, room_of_window(sliding_window, drops)))
        self.window = sliding_window
        self.drops = drops
        self.holds_request = max_cache_len == self.max_cache_len
        self.cumulative_length_int = self.num_dropped = 0
        self.num_prepared = 0

    @classmethod
    def replacing(cls, layer: Any, max_cache_len: int, sliding_window: int, drops: int) -> BlockwiseMoves:
        """A layer with the tokens of ``layer``, a layer of Transformers that has lost no token of its window."""
        made = cls(max_cache_len, sliding_window, drops)
        if layer.is_initialized:
            room, used = made.max_cache_len, layer.get_seq_length()
            vars(made).update(vars(layer))
            made.num_dropped = max(used - layer.max_cache_len, 0)
            made.cumulative_length.fill_(used - made.num_dropped)  # it is not counted in a window that is full
            extend(made, room)
        return made

    def serve(self, num_tokens: int) -> None:
        """Serve a request of up to ``num_tokens`` tokens next; the layer is empty."""
        self.holds_request = num_tokens <= self.max_cache_len

    def widen(self, max_cache_len: int) -> None:
        """Serve requests of up to ``max_cache_len`` tokens, in place."""
        room = min(max_cache_len, room_of_window(self.window, self.drops))
        self.holds_request = max_cache_len == room
        if room > self.max_cache_len:
            extend(self, room)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [batch, num_kv_heads, n, head_dim]; return those that attention reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_new = key_states.shape[2]
        if not self.num_prepared:
            if not self.make_room(num_new):
                return self._update_beside(key_states, value_states)
            self.cumulative_length_int += num_new
        elif num_new != self.num_prepared:
            raise KVCompileError(
                f"the model stores {num_new} tokens in a window, and its input has {self.num_prepared}; call "
                "kvcompile.uncompile(model), and compile it with torch.compile(model, backend=kvcompile.kvquant(...))"
            )
        keys, values = super().update(key_states, value_states)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that the next update returns for ``query_length`` tokens, and the first one's position."""
        to_drop = self._tokens_to_drop(query_length)
        if to_drop is None:
            return self._num_used + query_length, self.num_dropped
        return self.max_cache_len, self.num_dropped + to_drop

    def make_room(self, num_new: int) -> bool:
        """Drop tokens if the slots are too few for ``num_new`` more. False if the new tokens have too few even then."""
        to_drop = self._tokens_to_drop(num_new)
        if to_drop:
            self._drop(to_drop)
        return to_drop is not None

    def reset(self) -> None:
        if self.is_initialized:
            clear(self)
        self.cumulative_length_int = self.num_dropped = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens.

        Raises:
            KVCompileError: tokens that would be in the window then have been dropped. It is not raised if the layer
                ``is_croppable``.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop: tokens_to_remove is {tokens_to_remove}; pass a negative number of tokens")
        if self.num_dropped and self._num_used + tokens_to_remove < self.window - 1:
            raise KVCompileError(
                f"crop: a window of {self.window} tokens cannot remove its last {-tokens_to_remove}, because it has "
                "dropped earlier ones; read the prompt again"
            )
        self.cumulative_length.add_(tokens_to_remove)
        self.cumulative_length_int += tokens_to_remove

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the last tokens can be removed: no token has left the layer or will leave it."""
        return self.holds_request and self.num_dropped == 0

    def get_seq_length(self) -> int:
        return self.cumulative_length_int

    @property
    def _num_used(self) -> int:
        return self.cumulative_length_int - self.num_dropped

    def _tokens_to_drop(self, num_new: int) -> int | None:
        """The number of tokens to drop so that ``num_new`` more fit; None if they do not fit even then.

        As many tokens as possible are dropped, so that it happens seldom. The tokens that the first new token may
        attend to remain.
        """
        if self._num_used + num_new <= self.max_cache_len:
            return 0
        droppable = max(self._num_used - self.window + 1, 0)
        to_drop = droppable // self.drops * self.drops
        return to_drop if self._num_used - to_drop + num_new <= self.max_cache_len else None

    @torch.compiler.disable  # it runs once in many steps
    def _drop(self, num_tokens: int) -> None:
        for cache in (self.keys, self.values):
            drop_first_tokens_(cache, num_tokens)
        self.cumulative_length.sub_(num_tokens)
        self.num_dropped += num_tokens

    @torch.compiler.disable
    def _update_beside(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """An update that does not fit: attention reads the stored and the new tokens together, in full precision.

        The last tokens are stored, at least those of the window.
        """
        new, num_new = [key_states.to(self.keys.dtype), value_states.to(self.values.dtype)], key_states.shape[2]
        if self.max_cache_len < room_of_window(self.window, self.drops):
            raise KVCompileError(
                f"the cache has room for {self.max_cache_len} tokens, and {self._num_used + num_new} are needed; make "
                "a longer cache"
            )
        returned = new
        if self._num_used:
            old = (plain(cache[:, :, : self._num_used]) for cache in (self.keys, self.values))
            returned = [torch.cat(pair, dim=2) for pair in zip(old, new, strict=True)]
        too_many = self._num_used + num_new - self.max_cache_len
        to_drop = -(-too_many // self.drops) * self.drops
        if to_drop < self._num_used:
            self._drop(to_drop)
            kept = new
        else:
            self.num_dropped = self.cumulative_length_int + max(num_new - self.window, 0)
            clear(self)
            kept = [x[:, :, -self.window :] for x in new]
        self.cumulative_length_int += num_new
        self._append(*kept)
        return returned[0], returned[1]

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Store tokens in the next slots, by one launch if possible."""
        if not takes_pairs(self.keys, self.values):
            super().update(keys, values)
            return
        append_pair(self, keys, values)


@functools.cache
def blockwise_window_class() -> Any:
    """The class of layers with a window that moves by whole blocks."""
    from transformers.cache_utils import StaticLayer

    return type("BlockwiseWindow", (BlockwiseMoves, StaticLayer), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """The class by its name, for pickle."""
    if name == "BlockwiseWindow":
        return blockwise_window_class()
    raise AttributeError(f"module {__name__} has no attribute {name}")


def is_blockwise(layer: Any) -> bool:
    """Whether the window of a layer moves by whole blocks."""
    return isinstance(layer, BlockwiseMoves)


@contextmanager
def prepared_for_step(cache: Any, num_new: int) -> Iterator[None]:
    """Inside the ``with`` block, updates of ``num_new`` tokens find room in blockwise windows, and need not count them.

    It does nothing if the new tokens do not fit into the windows, or for any other cache.
    """
    windows = [layer for layer in getattr(cache, "layers", ()) if is_blockwise(layer) and layer.is_initialized]
    if not all(layer.make_room(num_new) for layer in windows):
        windows = []
    for layer in windows:
        layer.num_prepared = num_new
    try:
        yield
        for layer in windows:
            layer.cumulative_length_int += num_new
    finally:
        for layer in windows:
            layer.num_prepared = 0
