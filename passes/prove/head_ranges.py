"""Divide attention that reads some heads of a cache into ranges of heads.

Differential attention, for example, pairs the keys of all heads with the values of half of the heads, twice in turn.
The heads of the operands are divided into ranges in which keys and values are neighbours in their caches. Each range is
a separate grouped-query attention. It reads a part of the packed data, in which heads are separate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcompile.passes.prove.reads import Read


@dataclass(frozen=True)
class HeadRange:
    """One of ``count`` equal ranges of the operands' heads, and the places of its keys and values in their caches.

    Attributes:
        index: position of the range among the ranges.
        count: number of ranges.
        key: the first KV head of its keys, as an index in their cache.
        value: the first KV head of its values, as an index in their cache.
        num_heads: number of its KV heads.
        tiles: how often the range repeats all its KV heads in turn.
    """

    index: int
    count: int
    key: int
    value: int
    num_heads: int
    tiles: int


def head_ranges(key: Read, value: Read) -> list[HeadRange] | None:
    """The ranges of an attention with these reads; None if its keys and values have different numbers of heads."""
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
