"""Reading a window of text through a cache, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcompile.evaluation.models import text_config
from kvcompile.evaluation.schedule import Schedule
from kvcompile.packed.memory import cache_nbytes


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


def replay(
    forward: Callable[..., Any],
    window: Tensor,
    cache: dict[str, Any],
    schedule: Schedule,
    heard: list[tuple[str, Tensor]],
) -> Iterator[Step]:
    """Feed ``window`` (int64 [window_tokens], on the model's device) in the steps of ``schedule``.

    ``cache`` is the argument that :func:`~kvcompile.compat.transformers.with_cache` makes, and ``heard`` the list that
    :func:`~kvcompile.evaluation.attention_sites.tapped` yields.
    """
    for positions in schedule.steps():
        heard.clear()
        logits = forward(input_ids=window[None, positions], **cache).logits[0]
        yield Step(positions, logits, {name: output[0] for name, output in heard})


def effective_bits(cache: Any) -> float:
    """Bits per element of the cache, measured from the storages, scales and padding included.

    The result depends on the capacity of the cache: its last block may be partly empty, and its exact blocks have a
    fixed size.
    """
    halves = [half for layer in cache.layers for half in (layer.keys, layer.values)]
    return 8 * cache_nbytes(halves) / sum(half.numel() for half in halves)
