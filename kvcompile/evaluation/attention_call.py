"""One attention of a model, and its result on packed keys and values."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout, Role
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.packing import pack_tokens, read_tokens
from kvcompile.passes.site import FormatPair


@dataclass(frozen=True)
class AttentionCall:
    """The operands and the result of one attention; fields as in :class:`kvcompile.passes.marker.Marker`.

    Attributes:
        original: the model's own result, [batch, num_heads, q_len, v_head_dim].
        query: [batch, num_heads, q_len, head_dim].
        key: [batch, num_kv_heads, kv_len, head_dim].
        value: [batch, num_kv_heads, kv_len, v_head_dim].
        mask: broadcastable to [batch, num_heads, q_len, kv_len]; bool or float.
        sinks: [num_heads].
        is_causal, scale, softcap, dropout_p, unsupported: as in a marker.
    """

    original: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    is_causal: bool
    scale: float | None
    softcap: float
    dropout_p: float
    unsupported: str | None
    _packed: dict[PackedLayout, Tensor] = field(default_factory=dict, repr=False)

    @property
    def can_be_packed(self) -> bool:
        """Whether attention on packed caches can compute the same result."""
        if self.unsupported is not None or self.dropout_p or any(x.dim() != 4 for x in (self.query, self.key)):
            return False
        same_batch = self.query.shape[0] == self.key.shape[0] == self.value.shape[0]
        return same_batch and self.query.shape[1] % self.key.shape[1] == 0 and self.key.is_floating_point()

    def operand(self, role: Role) -> Tensor:
        """The keys or the values."""
        return self.key if role == "key" else self.value

    @functools.cached_property
    def repeats(self) -> int:
        """The number of copies of each KV head in keys and values, for models that expand them before attention."""
        heads = self.key.shape[1]
        divisors = [count for count in range(heads, 0, -1) if heads % count == 0]
        return next(count for count in divisors if _repeats(self.key, count) and _repeats(self.value, count))

    def of_kv_heads(self, role: Role) -> Tensor:
        """The keys or the values without repeated heads: [batch, num_kv_heads, kv_len, channels]."""
        return self.operand(role)[:, :: self.repeats]

    def sampled(self, queries: int) -> AttentionCall:
        """The same attention on at most ``queries`` query positions, spread evenly up to the last."""
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        if q_len <= queries:
            return self
        rows = torch.linspace(0, q_len - 1, queries, device=self.query.device).round().long()
        mask = self.mask
        if self.is_causal:
            mask = torch.arange(kv_len, device=rows.device) <= rows[:, None]
        elif mask is not None and mask.dim() > 1 and mask.shape[-2] != 1:
            mask = mask[..., rows, :]
        original, query = self.original[:, :, rows], self.query[:, :, rows]
        return replace(self, original=original, query=query, mask=mask, is_causal=False)

    def layout(self, formats: FormatPair, role: Role) -> PackedLayout:
        """The layout of the keys or the values in a cache of these formats."""
        operand = self.operand(role)
        return formats.layout(role, operand.shape[-1], operand.dtype)

    def stored(self, formats: FormatPair, role: Role) -> Tensor:
        """The keys or the values after a round trip through a cache of these formats, in float32."""
        layout = self.layout(formats, role)
        stored = read_tokens(self._data(layout), layout, self.operand(role).shape[2])
        return stored.repeat_interleave(self.repeats, 1)

    def on_packed(self, formats: FormatPair) -> Tensor:
        """The result of attention on keys and values packed in these formats, computed by the specification in float32.

        All keys and values are stored before the first is read, as in a compiled prefill.
        """
        key, value = self.layout(formats, "key"), self.layout(formats, "value")
        return attend(
            self.query.float(),
            self._data(key),
            self._data(value),
            key,
            value,
            mask=self.mask,
            sinks=self.sinks,
            kv_len=self.key.shape[2],
            is_causal=self.is_causal,
            scale=self.scale,
            softcap=self.softcap,
        )

    def _data(self, layout: PackedLayout) -> Tensor:
        """The keys or values packed in a layout. The data is kept, because several format pairs share a layout."""
        if layout not in self._packed:
            self._packed[layout] = pack_tokens(layout, self.of_kv_heads(layout.role))
        return self._packed[layout]


def _repeats(x: Tensor, count: int) -> bool:
    """Whether ``x`` has each head ``count`` times in a row."""
    groups = x.detach().unflatten(1, (-1, count))
    return count == 1 or bool((groups == groups[:, :, :1]).all())
