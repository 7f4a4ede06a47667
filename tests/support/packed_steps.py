"""A step that ``kvquant`` compiled, compared with the same step in eager code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.packed.tensor import PackedTensor

LOSSLESS = {"default": {"dtype": "float32"}}


def compiled_lossless(step: Callable[..., Any], **how: Any) -> Any:
    """``step``, compiled with packed caches in float32. A cache that cannot be packed is an error."""
    return torch.compile(step, backend="kvquant", options={"policy": LOSSLESS, "on_unsupported": "error"}, **how)


def check_step(
    compiled: Any, step: Any, new: Sequence[Tensor], packed: Sequence[Tensor], plain: Sequence[Tensor], pos: Tensor
) -> None:
    """The compiled step computes what ``step`` computes on plain caches, and leaves packed caches of equal values.

    Args:
        new: query, key and value.
        packed: the caches of the compiled step, plain before its first call.
        plain: the caches of ``step``.
    """
    torch.testing.assert_close(compiled(*new, *packed, pos), step(*new, *plain, pos))
    for cache, expected in zip(packed, plain, strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.dequantize(), expected)
