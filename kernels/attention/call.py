"""The arguments of an attention launch, in the form that the decode, prefill and latent launchers share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvcompile.kernels.layout.operand import PackedOperand


class AttentionCall(NamedTuple):
    """The arguments of an attention launch. Tensors are the same as in :func:`kvcompile.kernels.launch.attention`.

    Attributes:
        mask: the mask as kernels read it; any tensor if there is no mask.
        mask_strides: strides of the mask, expanded to [batch, num_heads, q_len, kv_len].
        mask_kind: ``none``, ``bool`` or ``float``.
        ranges: :func:`~kvcompile.kernels.tiles.visible_range.visible_range` of a bool mask, int32 [batch, q_len, 3];
            otherwise None.
        kv_len: the number of tokens to attend to.
        score_scale: factor of the scores times log2(e).
        softcap: bound of the scores times log2(e); 0 without a softcap.
        key, value: compile-time descriptions of keys and values.
        key_scale, value_scale: static scales of keys and values.
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
        """Query heads per KV head."""
        return self.query.shape[1] // self.k_data.shape[2]
