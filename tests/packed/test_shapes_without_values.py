"""While Dynamo traces, operators on packed caches skip the computation of values, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcompile.compat.tracing import FakeTensorMode
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed import tokens, writes
from kvcompile.packed.tensor import PackedTensor

FORMATS = ["int8_per_token_head", "turboquant_2.5bit", "bfloat16", "int4_per_channel[recent=1,sinks=1,float32]"]
NEW = torch.ones(2, 3, 2, 64)


def written(cache: Any, new: Any = NEW) -> Any:
    cache.index_copy_(2, torch.tensor([63, 64]), new)
    return cache


def assigned(cache: Any, new: Any = NEW) -> Any:
    cache[:, :, 5:7] = new
    return cache


def put(cache: Any, new: Any = NEW) -> Any:
    coordinates = writes.coordinates_of(cache, "t", torch.tensor([5, 6]))
    writes.put(cache, cache.packed, coordinates, writes.encoded(cache, new))
    return cache


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "read": lambda cache: cache.dequantize(),
    "read with other axes": lambda cache: cache.transpose(1, 2).dequantize(),
    "read one token": lambda cache: cache[:, :, 1:2].dequantize(),
    "read some vectors": lambda cache: cache[1:, :, :66] + 0,
    "append": lambda cache: torch.cat([cache, NEW], 2),
    "append packed tokens": lambda cache: torch.cat([cache, cache], 2),
    "write": written,
    "assign": assigned,
    "put": put,
    "write one token": lambda cache: assigned(cache, torch.ones(2, 3, 1, 64)),
}


def on_fake_cache(operation: Callable[[Any], Any], format_name: str) -> Any:
    """The properties of the result of ``operation`` on a cache without values."""
    layout = PackedLayout.parse(format_name, "key", 64)
    cache = PackedTensor.from_dense(torch.zeros(2, 3, 70, 64), layout)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        x = operation(mode.from_tensor(cache))
    inner = [x.packed.shape, x.axes, x.growing] if isinstance(x, PackedTensor) else []
    return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, *inner


@pytest.mark.parametrize("format_name", FORMATS)
def test_shapes_and_strides_are_the_same_as_with_values(format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: on_fake_cache(operation, format_name) for name, operation in OPERATIONS.items()}
    for module in (tokens, writes):
        monkeypatch.setattr(module, "has_no_values", lambda data: False)
    assert found == {name: on_fake_cache(operation, format_name) for name, operation in OPERATIONS.items()}


@pytest.mark.parametrize("shape", [(2, 3, 3, 64), (2, 2, 2, 64), (3, 3, 2, 64), (2, 3, 2, 32)])
@pytest.mark.parametrize("format_name", [FORMATS[0], FORMATS[-1]])
@pytest.mark.parametrize("write", [written, assigned, put])
def test_new_tokens_that_do_not_fit_are_an_error(write: Any, format_name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        on_fake_cache(lambda cache: write(cache, torch.ones(shape)), format_name)


def test_a_graph_that_is_recorded_has_the_operators() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    layout = PackedLayout("int8_per_token_head", "key", 64)
    blocks = PackedTensor.from_dense(torch.randn(2, 3, 70, 64), layout).packed

    def read(data: torch.Tensor) -> torch.Tensor:
        return tokens.read_packed(data, layout, 70, torch.float32)

    graph = make_fx(read, tracing_mode="fake")(blocks)
    assert torch.equal(graph(blocks), read(blocks))
