"""Reading a window of text through a cache, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcompile.caches.blockwise_window import prepared_for_step
from kvcompile.caches.static import packed_cache, windows_of
from kvcompile.errors import KVCompileError
from kvcompile.evaluation.models import text_config
from kvcompile.evaluation.schedule import Schedule
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.packed.memory import cache_nbytes
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy


@dataclass(frozen=True)
class Step:
    """The outputs of a model in one step.

    Attributes:
        positions: the positions of the tokens that the model read.
        logits: [tokens, vocab_size], the predictions of the next tokens.
        attention: the output [tokens, width] of every attention module, by its name.
    """

    positions: slice
    logits: Tensor
    attention: dict[str, Tensor]

    def to(self, device: Any) -> Step:
        """The step on another device."""
        attention = {name: output.to(device) for name, output in self.attention.items()}
        return Step(self.positions, self.logits.to(device), attention)


def new_cache(model: Any, schedule: Schedule) -> Any:
    """A static cache whose capacity is exactly one window."""
    from transformers import StaticCache

    return StaticCache(config=text_config(model), max_cache_len=schedule.num_tokens)


def cache_with_windows(model: Any, schedule: Schedule, policy: Policy) -> Any:
    """A packed cache as ``generate()`` makes it, for a model with sliding windows.

    Graphs on the windows of Transformers' own cache move the tokens of these windows, which few formats support.

    Returns:
        None if no layer of the model has a window, or if a format of the policy cannot hold a layer.
    """
    if not windows_of(text_config(model), new_cache(model, schedule)):
        return None
    try:
        return packed_cache(model, 1, schedule.num_tokens, policy, blockwise=True)
    except KVCompileError:  # the report on compiled steps will say why
        return None


def replay(
    forwards: tuple[Callable[..., Any], Callable[..., Any]],
    window: Tensor,
    cache: dict[str, Any],
    schedule: Schedule,
    recorded: list[tuple[str, Tensor]],
) -> Iterator[Step]:
    """Read ``window`` (int64 [window_tokens], on the model's device) in the steps of ``schedule``.

    ``forwards`` are the model for the prefill and the model for the later steps. ``cache`` is the argument that
    :func:`~kvcompile.compat.transformers.with_cache` makes, and ``recorded`` the list that
    :func:`~kvcompile.evaluation.attention_sites.tapped` yields.
    """
    (held,) = cache.values()
    for positions in schedule.steps():
        recorded.clear()
        forward = forwards[0] if positions.start == 0 else forwards[1]
        with prepared_for_step(held, positions.stop - positions.start):
            logits = forward(input_ids=window[None, positions], **cache).logits[0]
        yield Step(positions, logits, {name: output[0] for name, output in recorded})


@dataclass(frozen=True)
class CacheSize:
    """The size of a cache.

    Attributes:
        bits: bits per element, measured from the storages, with scales, padding and exact tokens. The number depends on
            the capacity of the cache: its last block may be partly empty, and its exact tokens have a fixed size.
        packed_bits: bits per element without exact tokens. Layers that are not packed count in full.
        exact_tokens: number of tokens that a cache can also keep in the dtype of the cache, on average over keys and
            values. It may exceed the capacity of the cache.
        exact_share: the fraction of the tokens in the cache that are exact, on average over keys and values.
        is_exact: whether all tokens of every packed cache are exact.
    """

    bits: float
    packed_bits: float
    exact_tokens: float
    exact_share: float
    is_exact: bool

    @classmethod
    def of(cls, cache: Any) -> CacheSize:
        halves = [half for layer in cache.layers for half in (layer.keys, layer.values)]
        numel, nbytes = sum(half.numel() for half in halves), cache_nbytes(halves)
        packed = [half for half in halves if isinstance(half, PackedTensor)]
        residuals = [half.packed_layout.residual for half in packed]
        exact = [BLOCK_TOKENS * residual.num_entries if residual is not None else 0 for residual in residuals]
        shares = [min(1.0, tokens / half.num_tokens) for tokens, half in zip(exact, packed, strict=True)]
        headers = sum(half.packed_layout.header_blocks * half.packed[0].nbytes for half in packed)
        return cls(
            8 * nbytes / numel,
            8 * (nbytes - headers) / numel,
            sum(exact) / len(halves),
            sum(shares) / len(halves),
            bool(shares) and min(shares) == 1.0,
        )
