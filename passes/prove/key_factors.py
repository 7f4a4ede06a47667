"""Prove that attention applies RoPE to cached keys: each channel is a sum of two cached channels, by token.

:mod:`kvcompile.passes.prove.computed_keys` has proven that each key is computed from the cached key of its token and
head. This module proves more about the same nodes:

- Each channel of a key is a sum of at most two channels of the cached key, times coefficients. The two are partners:
  the same pairs of channels for all tokens, sequences and heads.
- The coefficients depend on no cache, and are the same for all sequences and heads.

The proof assumes no formula of RoPE. :mod:`kvcompile.passes.prove.linear_keys` follows the nodes one by one;
each must be a linear operation that leaves tokens, sequences and heads in place. The same operations then run twice. On
generic numbers they show the partners. In the rewritten graph, on keys of ones and zeros, they give the coefficients of
each token (:mod:`kvcompile.kernels.spec.key_factors`). Keys without such a proof are computed from dequantized caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.tensors import without_modes
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.key_factors import paired_query
from kvcompile.passes.prove.linear_keys import LinearKeys, follow_linear_keys

ROTATED_CHANNELS = 128
"""The largest ``head_dim`` of a rotated format with pre-RoPE keys: a kernel holds its rotation in shared memory."""


@dataclass(frozen=True)
class KeyRope:
    """A rotary position embedding (RoPE) that a model applies to cached keys, proven on its nodes.

    Attributes:
        partners: for each channel, the other channel of its pair, or the channel itself.
        keys: the operations from the cached keys to the keys of attention.
    """

    partners: tuple[int, ...]
    keys: LinearKeys

    def factors(self, coefficients: Sequence[Tensor], num_tokens: int, device: torch.device) -> Tensor:
        """The factors of :class:`~kvcompile.kernels.spec.key_factors.KeyFactors`, [2, num_tokens, head_dim].

        They are float32, or float64 if the coefficients are, even if the model rounds its keys between operations:
        attention on packed keys does not round them.

        Args:
            coefficients: the values of ``keys.coefficients``.
            num_tokens: the number of cached keys.
            device: the device of the result.
        """
        is_first = _flags([at <= partner for at, partner in enumerate(self.partners)], device)
        has_partner = _flags([at != partner for at, partner in enumerate(self.partners)], device)
        of_first, of_second = (
            self.keys.computed(cached.float().expand(num_tokens, -1), coefficients) for cached in (is_first, ~is_first)
        )
        of_own = torch.where(is_first, of_first, of_second)
        of_partner = torch.where(has_partner, torch.where(is_first, of_second, of_first), 0.0)
        return torch.stack([of_own, paired_query(of_partner, self.partners)])


def read_rope(root: Node, axes: str, key: Node, between: Sequence[Node]) -> KeyRope | None:
    """The RoPE by which the keys of an attention are computed from its cache; None if it is not proven.

    Args:
        root: the cached keys.
        axes: the order of their dimensions, four letters.
        key: the keys of attention, [batch, heads, tokens, head_dim].
        between: the nodes whose numbers depend on ``root``, up to ``key``, in the order of the graph.
    """
    keys = follow_linear_keys(root, axes, key, between)
    if keys is None:
        return None
    with without_modes():  # on real numbers, although the graph holds fake tensors
        partners = partners_of(keys.dependence())
    return None if partners is None else KeyRope(partners, keys)


def partners_of(depends: Tensor) -> tuple[int, ...] | None:
    """The partner of each channel, or the channel itself if it has none; None if some channel has several partners.

    Args:
        depends: bool [head_dim, head_dim], whether a channel of the key (row) depends on a channel of the cached key.
    """
    partners = list(range(len(depends)))
    for channel, other in depends.nonzero().tolist():
        if channel == other:
            continue
        if partners[channel] not in (channel, other) or partners[other] not in (other, channel):
            return None
        partners[channel], partners[other] = other, channel
    return tuple(partners)


def can_apply_rope(query: Node, layout: PackedLayout) -> bool:
    """Whether attention of few queries can apply RoPE to packed keys in ``layout``.

    A kernel has to undo the rotation of a rotated format first. Kernels on a GPU undo it on tensor cores, for up to
    ROTATED_CHANNELS channels. No kernel undoes the basis of a calibrated format.

    Args:
        query: the query of attention, [batch, num_heads, q_len, head_dim].
        layout: the layout of the keys.
    """
    value = query.meta["val"]
    turns_back = value.device.type == "cuda" and statically_known_true(value.shape[3] <= ROTATED_CHANNELS)
    has_own_basis = not layout.format.rotated or turns_back
    return layout.format.has_levels and not layout.format.is_calibrated and has_own_basis


def _flags(flags: Sequence[bool], device: torch.device) -> Tensor:
    """``flags`` as a bool tensor that is computed, because a traced function captures no tensor.

    Each run of equal flags, or of alternating flags, is a comparison of the channels' numbers. Shifted bits would be
    shorter, but Triton 3.6 computes ``word >> channel % 32 & 1`` wrongly for some channels, in some sizes of a block.
    """
    channel = torch.arange(len(flags), device=device)
    result = torch.zeros_like(channel, dtype=torch.bool)
    begin = 0
    while begin < len(flags):
        end = begin + 1
        while end < len(flags) and (flags[end] != flags[end - 1]) == (flags[begin + 1] != flags[begin]):
            end += 1
        if any(flags[begin:end]):
            run = (channel >= begin) & (channel < end)
            if not all(flags[begin:end]):
                run = run & (channel % 2 == (begin if flags[begin] else begin + 1) % 2)
            result = result | run
        begin = end
    return result
