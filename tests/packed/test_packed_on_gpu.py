"""Eager code on packed caches runs kernels on a GPU. They match the specification and allocate little extra memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.layout.axes import CACHE_AXES
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.gpu

FORMATS = [
    "int8_per_token_head",
    "int4_per_token_head",
    "int4_per_channel[recent=1,sinks=0,bfloat16]",
    "int8_per_token_head[recent=2,sinks=1,bfloat16]",
    "turboquant_3bit",
    "fp8_e4m3",
    "bfloat16",
]
MIB = 1 << 20


def caches(spec: str, axes: str, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, PackedLayout]:
    sizes = {"b": 2, "h": 3, "t": num_tokens, "d": 64}
    return torch.randn([sizes[axis] for axis in axes], dtype=dtype), PackedLayout.parse(spec, "key", 64)


def assert_same_cache(actual: PackedTensor, expected: PackedTensor) -> None:
    """Compare the values. Codes may differ where a quotient lies halfway between two codes."""
    expected_values, values = expected.dequantize().float(), actual.dequantize().cpu().float()
    assert actual.dequantize().stride() == expected.dequantize().stride()
    same = torch.isclose(values, expected_values, rtol=2e-2, atol=2e-2)
    assert same.float().mean() > 0.999, f"{(~same).sum()} of {same.numel()} values differ"


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("spec", FORMATS)
def test_a_plain_cache_is_packed_as_on_a_cpu(spec: str, num_tokens: int) -> None:
    x, layout = caches(spec, "bhtd", num_tokens)
    assert_same_cache(PackedTensor.from_dense(x.cuda(), layout), PackedTensor.from_dense(x, layout))


@pytest.mark.parametrize("axes", CACHE_AXES)
@pytest.mark.parametrize("spec", FORMATS[1:3])
def test_every_order_of_axes_is_packed_written_and_read(spec: str, axes: str) -> None:
    x, layout = caches(spec, axes, 130)
    on_cpu, on_gpu = PackedTensor.from_dense(x, layout, axes), PackedTensor.from_dense(x.cuda(), layout, axes)
    dim = axes.index("t")
    index = torch.tensor([3, 129, 64, 63])
    new = torch.randn_like(x.index_select(dim, index))
    on_cpu.index_copy_(dim, index, new)
    on_gpu.index_copy_(dim, index.cuda(), new.cuda())
    assert_same_cache(on_gpu, on_cpu)


def assigned(cache: Tensor, positions: list[int], new: Tensor) -> Tensor:
    cache[:, :, torch.tensor(positions, device=cache.device)] = new
    return cache


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one token": lambda cache, new: cache.index_copy_(2, torch.tensor([70], device=cache.device), new[:, :, :1]),
    "a slice": lambda cache, new: cache[:, :, 60:160].copy_(new[:, :, :100]),
    "some sequences": lambda cache, new: cache[1:].copy_(new[1:]),
    "a head of a slice": lambda cache, new: cache[:, 2:, 5:70].copy_(new[:, 2:, 5:70]),
    "all": lambda cache, new: cache.copy_(new),
    "no token": lambda cache, new: cache.index_copy_(2, torch.tensor([], dtype=torch.int64, device=cache.device),
                                                     new[:, :, :0]),
    "some positions": lambda cache, new: assigned(cache, [-1, 3], new[:, :, :2]),
    "another packed cache": lambda cache, new: cache.copy_(
        PackedTensor.from_dense(new, PackedLayout.parse("int8_per_token_head", "key", 64))),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("spec", FORMATS[1:4])
def test_writes_reach_the_same_tokens_as_on_a_cpu(spec: str, write: str) -> None:
    x, layout = caches(spec, "bhtd", 200)
    new = torch.randn_like(x)
    on_cpu, on_gpu = PackedTensor.from_dense(x, layout), PackedTensor.from_dense(x.cuda(), layout)
    WRITES[write](on_cpu, new)
    WRITES[write](on_gpu, new.cuda())
    assert_same_cache(on_gpu, on_cpu)


@pytest.mark.parametrize("spec", FORMATS[1:4])
def test_a_growing_cache_is_extended(spec: str) -> None:
    x, layout = caches(spec, "bhtd", 70)
    new = torch.randn(2, 3, 100, 64, dtype=torch.bfloat16)
    on_cpu, on_gpu = (
        torch.cat([PackedTensor.from_dense(a, layout, growing=True), b], 2)
        for a, b in ((x, new), (x.cuda(), new.cuda()))
    )
    assert isinstance(on_cpu, PackedTensor)
    assert isinstance(on_gpu, PackedTensor)
    assert_same_cache(on_gpu, on_cpu)
    assert_same_cache(on_gpu[:, :, 30:], on_cpu[:, :, 30:])  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", FORMATS)
def test_packing_writing_and_reading_take_little_memory_besides_their_results(spec: str) -> None:
    layout = PackedLayout.parse(spec, "key", 64)
    x = torch.randn(2, 8, 1 << 15, 64, dtype=torch.bfloat16, device="cuda")  # 64 MiB
    tokens = torch.arange(1 << 14, device="cuda")

    def temporaries(run: Callable[[], Tensor], result: int) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run()
        assert kept.shape == x.shape
        return torch.cuda.max_memory_allocated() - before - result

    cache = PackedTensor.from_dense(x, layout)
    assert temporaries(lambda: PackedTensor.from_dense(x, layout), cache.packed.nbytes) < 8 * MIB
    assert temporaries(lambda: cache.index_copy_(2, tokens, x[:, :, : len(tokens)]), 0) < 8 * MIB
    assert temporaries(cache.dequantize, x.nbytes) < 8 * MIB
