"""Attention whose keys or values are some of the heads of a cache.

Differential attention, for one, gives the keys of all heads the values of one half of them, twice in turn. The heads
of the operands are cut into ranges in which keys and values are neighbours in their caches. Each is grouped-query
attention of its own, on a part of the packed data: heads lie apart there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcompile.passes.prove.reads import Read

aten = torch.ops.aten


@dataclass(frozen=True)
class HeadRange:
    """One of ``count`` equal ranges of the operands' heads, and where its keys and values lie in their caches.

    Attributes:
        index: of the range.
        count: ranges.
        key: the first KV head of its keys.
        value: the first KV head of its values.
        num_heads: of its KV heads.
        tiles: how often it has all of them in turn.
    """

    index: int
    count: int
    key: int
    value: int
    num_heads: int
    tiles: int


def head_ranges(key: Read, value: Read) -> list[HeadRange] | None:
    """The ranges of an attention that reads keys and values so; None if heads do not lie side by side in any."""
    num_heads = key.num_heads * key.head_tiles
    if num_heads != value.num_heads * value.head_tiles:
        return None
    if key.num_heads == value.num_heads:
        return [HeadRange(0, 1, key.first_head, value.first_head, key.num_heads, key.head_tiles)]
    size = math.gcd(key.num_heads, value.num_heads)
    return [
        HeadRange(
            index=begin // size,
            count=num_heads // size,
            key=key.first_head + begin % key.num_heads,
            value=value.first_head + begin % value.num_heads,
            num_heads=size,
            tiles=1,
        )
        for begin in range(0, num_heads, size)
    ]
