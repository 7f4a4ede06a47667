"""Steps of a layer with a sliding window of fixed size, which is packed while it fills, and moves when it is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from decode_steps import step as step_of_fixed_size
from torch import Tensor

import kvcompile
from kvcompile.packed.tensor import PackedTensor

HEADS, HEAD_DIM, WINDOW, MAX_LEN = 2, 32, 70, 90
SHAPE = (1, HEADS, WINDOW, HEAD_DIM)

Step = Callable[..., Tensor]


class Layers:
    """A layer with a window, as those of Transformers, and maybe a layer that keeps all tokens."""

    def __init__(self, has_full_layer: bool = False) -> None:
        self.keys, self.values = torch.zeros(SHAPE), torch.zeros(SHAPE)
        full = (1, HEADS, MAX_LEN, HEAD_DIM)
        self.full = [torch.zeros(full) for _ in range(2)] if has_full_layer else None
        self.length = 0

    @property
    def window(self) -> list[Tensor]:
        return [self.keys, self.values]

    def reset(self) -> None:
        self.length = 0
        for cache in [*self.window, *(self.full or [])]:
            cache.zero_()


def moved(cache: Tensor, x: Tensor) -> None:
    new = cache.roll(-1, 2)
    new[:, :, torch.tensor([-1])] = x
    cache.copy_(new)


def step(q: Tensor, k: Tensor, v: Tensor, layers: Layers, position: Tensor, is_full: bool) -> Tensor:
    if not is_full:
        out = step_of_fixed_size(q, k, v, *layers.window, position)
    else:
        moved(layers.keys, k), moved(layers.values, v)
        out = F.scaled_dot_product_attention(q, *layers.window)
    return out if layers.full is None else step_of_fixed_size(out, k, v, *layers.full, position)


def compiled(policy: Any, **how: Any) -> Step:
    return torch.compile(step, backend=kvcompile.kvquant(policy=policy), **how)


def run(function: Step, layers: Layers, num_tokens: int) -> Tensor:
    """The next tokens of a request, one after the other if the window is full; returns the output of the last one."""
    out = torch.empty(0)
    while num_tokens:
        n = min(num_tokens, max(WINDOW - layers.length, 1))
        torch.manual_seed(layers.length)
        x = torch.randn(3, 1, HEADS, n, HEAD_DIM).unbind()
        out = function(*x, layers, torch.arange(layers.length, layers.length + n), layers.length >= WINDOW)
        layers.length, num_tokens = layers.length + n, num_tokens - n
    return out


def plain_twin(layers: Layers) -> Layers:
    """Plain caches with the values of ``layers``."""
    twin = Layers()
    twin.length = layers.length
    twin.keys, twin.values = (cache.dequantize() for cache in layers.window)
    if layers.full is not None:
        twin.full = [cache.dequantize() for cache in layers.full]
    return twin


def classes(layers: Layers) -> set[type]:
    return {type(cache) for cache in layers.window}


def filled(function: Step, has_full_layer: bool = False) -> Layers:
    """Layers whose window is full, and was packed while it filled."""
    layers = Layers(has_full_layer)
    run(function, layers, WINDOW - 1), run(function, layers, 1)
    assert classes(layers) == {PackedTensor}
    return layers
