"""A compiled step may take a view of a packed cache that it does not use as a KV cache.

The view keeps the strides of an equal plain view, because strides decide whether ``reshape`` and ``contiguous`` return
a view, whose writes change the cache, or a copy. Compiled steps equal eager code on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 4, 70, 32
FORMAT = "int8_per_token_head"

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "the whole cache": lambda cache: cache,
    "tokens": lambda cache: cache[:, :, :65],
    "heads": lambda cache: cache[:, 1:3],
    "transposed": lambda cache: cache.transpose(1, 2),
    "tokens of the transposed cache": lambda cache: cache.transpose(1, 2)[:, :65],
    "one sequence for all": lambda cache: cache[:1].expand(3, -1, -1, -1),
}


def write_flattened(view: Tensor, new: Tensor) -> Tensor:
    view.flatten(1, 2)[:, 3:5] = new
    return view[:, 0] * 1


def write_merged_heads(view: Tensor, new: Tensor) -> Tensor:
    view.transpose(1, 2).flatten(2)[:, 1, :HEAD_DIM] = new[0]
    return view[:, 0] * 1


def write_contiguous(view: Tensor, new: Tensor) -> Tensor:
    rows = view.contiguous()
    rows[:, :1, :2] = new
    return rows[:, 0] * 1


def return_flattened(view: Tensor, new: Tensor) -> Tensor:
    return view.flatten(1, 2)


USES = [write_flattened, write_merged_heads, write_contiguous, return_flattened]


def packed(plain: Tensor, role: str) -> PackedTensor:
    return PackedTensor.from_dense(plain, PackedLayout(FORMAT, role, HEAD_DIM))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@torch.no_grad()
def test_a_view_as_input_of_a_packed_step_behaves_as_a_plain_view(
    view: Callable[[Tensor], Tensor], use: Callable[[Tensor, Tensor], Tensor], dynamic: bool
) -> None:
    if view is VIEWS["one sequence for all"] and use is not return_flattened:
        pytest.skip("eager code refuses a write to elements that overlap in memory")
    if dynamic and use is return_flattened:
        pytest.skip("AOTAutograd calls as_strided on the view, and a packed view does not know its offset")

    def step(x: Tensor, new: Tensor, keys: Tensor, values: Tensor, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        keys.index_copy_(2, pos, q)
        values.index_copy_(2, pos, q)
        return use(x, new), F.scaled_dot_product_attention(q, keys, values)

    run = torch.compile(step, backend="kvquant", dynamic=dynamic, options={"policy": FORMAT, "on_unsupported": "error"})
    other = packed(torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM), "key")
    plain = other.dequantize()
    keys, values = (packed(torch.zeros(BATCH, HEADS, TOKENS, HEAD_DIM), role) for role in ("key", "value"))
    new, q = torch.randn(2, HEAD_DIM), torch.randn(BATCH, HEADS, 1, HEAD_DIM)
    out, _ = run(view(other), new, keys, values, q, torch.tensor([64]))
    expected = use(view(plain), new)
    torch.testing.assert_close(out * 1, expected, rtol=0, atol=0.03)
    torch.testing.assert_close(other.dequantize(), plain, rtol=0, atol=0.03)
