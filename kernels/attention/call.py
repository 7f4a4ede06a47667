"""The arguments of an attention launch, which the decode, prefill and latent launchers share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvcompile.kernels.layout.operand import PackedOperand


class AttentionCall(NamedTuple):
    """The arguments of an attention launch: tensors as in :func:`kvcompile.kernels.launch.attention`.

    Attributes:
        mask: the mask as the kernels read it, any tensor without one; ``mask_strides`` are those of
            [batch, num_heads, q_len, kv_len], ``mask_kind`` is ``none``, ``bool`` or ``float``.
        ranges: int32 [batch, q_len, 3] of a bool mask, else None.
        score_scale, softcap: in units of log2.
        key, value: the formats, and key_scale, value_scale their static scales.
    """

    query: Tensor
    k_data: Tensor
    v_data: Tensor
    mask: Tensor
    mask_strides: tuple[int, ...]
    mask_kind: str
    ranges: Tensor | None
    kv_len: int
    is_causal: bool
    score_scale: float
    softcap: float
    key: PackedOperand
    value: PackedOperand
    key_scale: float
    value_scale: float

    @property
    def group_size(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.k_data.shape[2]
