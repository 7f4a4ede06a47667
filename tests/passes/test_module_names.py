"""Sites have the qualified names of modules, however the call of the model is decorated."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvcompile

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


class Layer(nn.Module):
    def forward(self, x: Tensor, cache: Tensor, pos: Tensor) -> Tensor:
        cache.index_copy_(2, pos, x)
        mask = torch.arange(cache.shape[2]) <= pos[:, None]
        return F.scaled_dot_product_attention(x, cache, cache, attn_mask=mask)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, caches: list[Tensor], pos: Tensor) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, pos)
        return x


class Decorated(Model):
    """As Transformers decorates a ``forward`` with a renamed argument: the model is the first of ``*args``."""

    @functools.wraps(Model.forward)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return Model.forward(*args, **kwargs)


@pytest.mark.parametrize("model", [Model, Decorated])
def test_sites_are_called_after_their_modules(model: type[Model]) -> None:
    caches = [torch.zeros(1, 2, 70, 32) for _ in range(2)]
    x, pos = torch.randn(1, 2, 1, 32), torch.tensor([3])
    with kvcompile.collect_reports() as report:
        torch.compile(model(), backend="kvquant")(x, caches, pos)
    sites = [site for graph in report.graphs for site in graph.sites]
    assert [(site.module, site.layer) for site in sites] == [("layers.0", 0), ("layers.1", 1)]
