"""Reads a window of text through a cache, step by step."""

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
    """What a model gave in one step.

    Attributes:
        positions: the tokens that it read.
        logits: [tokens, vocab_size], of the tokens that follow each.
        attention: the output of every attention module, by its name: [tokens, width].
    """

    positions: slice
    logits: Tensor
    attention: dict[str, Tensor]

    def to(self, device: Any) -> Step:
        """The same on another device."""
        attention = {name: output.to(device) for name, output in self.attention.items()}
        return Step(self.positions, self.logits.to(device), attention)


def new_cache(model: Any, schedule: Schedule) -> Any:
    """A static cache with exactly the slots that a window takes."""
    from transformers import StaticCache

    return StaticCache(config=text_config(model), max_cache_len=schedule.num_tokens)


def replay(
    forward: Callable[..., Any], window: Tensor, cache: Any, schedule: Schedule, heard: list[tuple[str, Tensor]]
) -> Iterator[Step]:
    """Feed ``window`` (int64 [window_tokens], on the model's device) in the steps of ``schedule``.

    ``heard`` is what :func:`~kvcompile.evaluation.attention_sites.tapped` gave.
    """
    for positions in schedule.steps():
        heard.clear()
        logits = forward(input_ids=window[None, positions], past_key_values=cache).logits[0]
        yield Step(positions, logits, {name: output[0] for name, output in heard})


def effective_bits(cache: Any) -> float:
    """Bits that a key or value of the cache takes, measured from the storages: scales, padding and all.

    A cache's last block may be partly empty, and what it keeps unquantized does not grow with it, so this depends on
    the number of its slots.
    """
    halves = [half for layer in cache.layers for half in (layer.keys, layer.values)]
    return 8 * cache_nbytes(halves) / sum(half.numel() for half in halves)
