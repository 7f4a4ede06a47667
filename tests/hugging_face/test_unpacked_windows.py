"""Static caches of Transformers with sliding windows, in models that only ``torch.compile`` has compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.packed.tensor import PackedTensor

transformers = pytest.importorskip("transformers")
from windowed_models import all_windowed, windowed  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "compiler"), [(all_windowed, "no_kernels_of_inductor"), (windowed, "without_code_generation")]
)
def test_a_static_cache_of_transformers_keeps_its_error_when_its_windows_move(
    model: Callable[[], Any], compiler: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(compiler)
    decoder = model()
    function = torch.compile(decoder, backend=kvcompile.kvquant(policy="int4"))
    cache = transformers.StaticCache(config=decoder.config, max_cache_len=40)
    ids = torch.randint(97, (1, 20))
    for begin, end in ((0, 14), (14, 15), (15, 16)):
        function(input_ids=ids[:, begin:end], past_key_values=cache)
    window = cache.layers[0]
    assert type(window.keys) is PackedTensor
    moved_keys = window.keys.dequantize()
    graphs = 0
    for place in range(16, 20):
        function(input_ids=ids[:, place : place + 1], past_key_values=cache)
        graphs = graphs or counters["stats"]["unique_graphs"]
        moved_keys = moved_keys[:, :, 1:]
        assert type(window.keys) is Tensor
        assert torch.equal(window.keys[:, :, : moved_keys.shape[2]], moved_keys)
    assert counters["stats"]["unique_graphs"] == graphs
    assert {type(layer.keys) for layer in cache.layers[1:]} <= {PackedTensor}
