"""A function of ``aot_compile`` for a GPU gives the same answers and caches where it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decode_steps import step
from torch import Tensor
from torch._inductor.utils import fresh_cache

import kvcompile
from kvcompile.compat.ahead_of_time import CAN_STORE_CALLS
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CAN_STORE_CALLS, reason="this release of PyTorch stores no function of another backend"),
    pytest.mark.usefixtures("fresh_compiler"),
]


def packed(caches: Tensor) -> list[PackedTensor]:
    layouts = [PackedLayout("int4_per_token_head", role, 64) for role in ("key", "value")]
    return [PackedTensor.from_dense(cache, layout) for cache, layout in zip(caches, layouts, strict=True)]


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_a_loaded_function_gives_the_same_answers_and_caches(cudagraphs: bool, tmp_path: Path) -> None:
    plain = torch.randn(2, 2, 2, 200, 64, device="cuda")
    options = {"triton.cudagraphs": cudagraphs}
    backend = kvcompile.kvquant(policy="int4_per_token_head", on_unsupported="error", options=options)
    first, second = packed(plain), packed(plain)

    def given(position: int) -> tuple[Tensor, ...]:
        torch.manual_seed(position)
        return (*torch.randn(3, 2, 2, 1, 64, device="cuda"),)

    def at(position: int) -> Tensor:
        return torch.tensor([position], device="cuda")

    with torch.no_grad(), torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        function = compiled.aot_compile(((*given(0), *packed(plain), at(0)), {}))
        function.save_compiled_function(str(tmp_path / "step.bin"))
        expected = [function(*given(position), *first, at(position)).clone() for position in (5, 63, 64, 199)]
        torch._dynamo.reset()
        with fresh_cache(), (tmp_path / "step.bin").open("rb") as file:
            again = torch.compiler.load_compiled_function(file)
            found = [again(*given(position), *second, at(position)).clone() for position in (5, 63, 64, 199)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(torch.equal(one.packed, other.packed) for one, other in zip(second, first, strict=True))
