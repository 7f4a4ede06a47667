"""The arguments of an attention launch, in the form that the decode, prefill and latent launchers share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvcompile.kernels.layout.operand import PackedOperand
from kvcompile.kernels.spec.key_factors import KeyFactors
from kvcompile.kernels.spec.new_tokens import NewTokens


class Source(NamedTuple):
    """Packed keys or packed values of an attention launch.

    Attributes:
        data: packed data.
        operand: its compile-time description.
        static_scale: the static scale of the format.
        new: new tokens, which attention reads in full precision; None if there are none.
    """

    data: Tensor
    operand: PackedOperand
    static_scale: float
    new: NewTokens | None


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
        new_keys, new_values: new tokens, which attention reads in full precision; None if there are none.
        key_factors: the factors of pre-RoPE keys; None if attention reads keys as cached.
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
    new_keys: NewTokens | None = None
    new_values: NewTokens | None = None
    key_factors: KeyFactors | None = None

    @property
    def keys(self) -> Source:
        return Source(self.k_data, self.key, self.key_scale, self.new_keys)

    @property
    def values(self) -> Source:
        return Source(self.v_data, self.value, self.value_scale, self.new_values)

    @property
    def has_new_tokens(self) -> bool:
        return self.new_keys is not None or self.new_values is not None

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.k_data.shape[2]
