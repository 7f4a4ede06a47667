"""The meaning of the bytes of a packed cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.kernels.layout.packed_layout import PackedLayout


@dataclass(frozen=True)
class CacheMeta:
    """Meaning of the bytes of a PackedTensor, apart from its shape. Dynamo guards on it as the flatten context.

    Attributes:
        layout: layout of the packed data.
        dtype: logical dtype.
        axes: the logical dimensions in order, a letter for each (:mod:`kvcompile.kernels.layout.axes`): ``bhtd`` is
            [batch, heads, tokens, head_dim], ``bthd`` is [batch, tokens, heads, head_dim]. An axis is missing if a
            single index was selected; the packed data then holds only this index.
        start: number of tokens in the first block before this view, 0 to 63. With a residual, every view includes the
            header, and ``start`` is the number of tokens of the cache before this view.
        growing: whether the cache grows by concatenation.
    """

    layout: PackedLayout
    dtype: torch.dtype
    axes: str
    start: int = 0
    growing: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheMeta:
        """This object itself: guards compare a deep copy at every call, and an object equals itself fastest."""
        return self
