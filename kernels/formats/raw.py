"""``bfloat16``, ``float16`` and ``float32``: plain floats in the same blocks and kernels as the quantized formats.

With these formats a policy can leave some caches unquantized and still use the fused attention. Fused attention reads
every key and value once for all query heads of a KV head, and reads only the filled part of a cache. Values are rounded
to nearest even; fp16 overflows to infinity, as everywhere in PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.bit_planes import Packing
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.lang.triton import jit, tl


@jit
def _levels(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    return codes.to(tl.float32)


@jit
def _encode(x, in_vector, OPERAND: tl.constexpr):
    scale = tl.sum(x, 1)  # not stored
    return x, scale, scale


class Raw(Format):
    """Vectors of plain floats of ``dtype``."""

    scale_dtype = None

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.packing = Packing(dtype, 8 * dtype.itemsize)
        self.codec = Codec(_encode, _levels)

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"codes": x.to(self.packing.dtype)}

    def quantize(self, x: Tensor) -> tuple[Tensor, None, None]:
        return x.to(self.packing.dtype), None, None

    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        return codes.float()


RAW_FORMATS = [
    Raw("bfloat16", torch.bfloat16),
    Raw("float16", torch.float16),
    Raw("float32", torch.float32),
]
