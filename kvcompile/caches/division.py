"""Division of the tensors of a cache among ranks, by heads and by tokens.

The saved description (:mod:`kvcompile.caches.description`) has the sizes of the whole cache. The functions of this file
convert between these sizes and the sizes of one rank, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcompile.errors import CacheFileError
from kvcompile.kernels.layout.axes import CACHE_AXES, divided_axes
from kvcompile.kernels.layout.packed_layout import PackedLayout, num_blocks
from kvcompile.parallel.context_parallel import Member
from kvcompile.parallel.ranks import Ranks

BLOCK_DIM, HEAD_DIM_OF_PACKED, HEAD_DIM_OF_PLAIN = 0, 2, 1
"""The dimensions of packed data [num_blocks, batch, num_kv_heads, block_bytes] and of plain keys that ranks divide."""

_CONTENTS = ("list", "tuple")
_LEAVES = ("tensor", "packed", "stack", "pool")

Place = str
"""The place of a tensor: ``keys`` for the keys or values of a layer of Transformers, ``part`` in a stack or pool."""

Change = Callable[[dict[str, Any], Place], dict[str, Any]]


def mapped(content: Any, change: Change, place: Place = "") -> Any:
    """A description in which ``change`` has replaced each tensor, stack and pool, parts before their whole."""
    if not isinstance(content, dict):
        return content
    kind = next(iter(content))
    if kind in _CONTENTS:
        return {kind: [mapped(item, change) for item in content[kind]]}
    if kind == "dict":
        return {kind: [[key, mapped(item, change)] for key, item in content[kind]]}
    if kind == "object":
        places = {"keys": "keys", "values": "keys"}
        state = [[key, mapped(item, change, places.get(key, ""))] for key, item in content["state"]]
        return {**content, "state": state}
    if kind == "stack":
        content = {**content, "parts": [mapped(part, change, "part") for part in content["parts"]]}
    if kind == "pool":
        content = {**content, "slots": mapped(content["slots"], change, "part")}
    return change(content, place) if kind in _LEAVES else content


def name_of(content: Mapping[str, Any]) -> str:
    """The name of a tensor, stack or pool, from its description."""
    name: str = content[next(iter(content))]
    return name


def head_dim_of(content: Mapping[str, Any], rank: int, place: Place) -> int | None:
    """The dimension of the heads in the stored data of a tensor of ``rank`` dimensions; None if it has no heads."""
    if "packed" in content:
        return HEAD_DIM_OF_PACKED if "h" in divided_axes(content["axes"]) else None
    return HEAD_DIM_OF_PLAIN if place == "keys" and rank == 4 else None


def with_heads(content: dict[str, Any], heads: Callable[[str, int], int]) -> dict[str, Any]:
    """A packed tensor, a stack or a pool with other numbers of heads.

    Args:
        content: the description. If it is a stack or a pool, its parts have already been changed.
        heads: takes the name and the number of heads of a packed tensor, and returns the new number.
    """
    if "packed" in content and "h" in divided_axes(content["axes"]):
        axis, width = ("h", 1) if "h" in content["axes"] else ("m", PackedLayout.parse(*content["layout"]).head_dim)
        dim, shape = content["axes"].index(axis), list(content["shape"])
        shape[dim] = heads(content["packed"], shape[dim] // width) * width
        return {**content, "shape": shape}
    if "pool" in content:
        shape = list(content["shape"])
        shape[1 if content["heads_first"] else 2] = content["slots"]["shape"][1]
        return {**content, "shape": shape}
    if "stack" in content:
        part, dims = content["parts"][0], content["dims"]
        rest = iter(part.get("shape", []))
        if "shape" not in part or any(other.get("shape") != part["shape"] for other in content["parts"]):
            raise CacheFileError(f"{content['stack']} has plain parts, whose heads ranks cannot divide; pack all parts")
        shape = [size if dim in dims else next(rest) for dim, size in enumerate(content["shape"])]
        return {**content, "shape": shape}
    return content


@dataclass
class Share:
    """The part of a saved cache that one rank takes.

    Attributes:
        content: the description with the heads of this rank. It counts the tokens of the whole cache, and ``split``
            marks the tensors whose tokens the ranks divide.
        ranges: the indices of each stored tensor that the rank needs, by name.
    """

    content: Any = None
    ranges: dict[str, dict[int, range]] = field(default_factory=dict)


def share_of(content: Any, ranks: Ranks | None, shapes: Mapping[str, Sequence[int]]) -> Share:
    """The share of this rank.

    Args:
        content: the description of the whole cache.
        ranks: this rank; None for a process that takes everything.
        shapes: the shapes of the stored tensors, by name.

    Raises:
        CacheFileError: the ranks cannot divide a tensor.
    """
    share = Share(content)
    if ranks is None:
        return share

    def change(one: dict[str, Any], place: Place) -> dict[str, Any]:
        if ranks.context.size > 1:
            one = _with_tokens(one, place, ranks.context, share.ranges)
        if ranks.tensor.size > 1 and not one.get("alike"):
            one = _with_own_heads(one, place, ranks.tensor, share.ranges, shapes)
        return one

    share.content = mapped(content, change)
    return share


def _with_tokens(
    one: dict[str, Any], place: Place, context: Member, ranges: dict[str, dict[int, range]]
) -> dict[str, Any]:
    if "tensor" in one:
        return one
    if (reason := why_not_split(one, place)) is not None:
        raise CacheFileError(
            f"ranks cannot split the tokens of {name_of(one)}, because {reason}; load it without context_parallel"
        )
    blocks = num_blocks(one["shape"][one["axes"].index("t")])
    ranges.setdefault(one["packed"], {})[BLOCK_DIM] = range(context.rank, blocks, context.size)
    return {**one, "split": True}


def why_not_split(one: Mapping[str, Any], place: Place) -> str | None:
    """Why ranks cannot divide the tokens of a packed tensor; None if they can."""
    if place == "part" or "packed" not in one:
        return "it is a stack or a pool"
    layout = PackedLayout.parse(*one["layout"])
    if one["growing"] or one["start"] != 0 or one["axes"] not in CACHE_AXES:
        return "it is not a whole cache of fixed size"
    if layout.residual is not None or layout.format.is_calibrated:
        return f"{layout.description} keeps tokens in full precision or is calibrated"
    return None


def _with_own_heads(
    one: dict[str, Any],
    place: Place,
    tensor: Member,
    ranges: dict[str, dict[int, range]],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    name = name_of(one)
    if "packed" in one and PackedLayout.parse(*one["layout"]).format.is_calibrated:
        raise CacheFileError(
            f"{name} has a calibrated format, whose heads load_cache cannot divide among ranks; load it without "
            "tensor_parallel"
        )
    dim = head_dim_of(one, len(shapes.get(name, ())), place)
    if dim is not None:
        ranges.setdefault(name, {})[dim] = own_heads(name, shapes[name][dim], tensor)
    return with_heads(one, lambda name, total: len(own_heads(name, total, tensor)))


def own_heads(name: str, total: int, tensor: Member) -> range:
    """The heads of a rank: an equal share of ``total`` heads, or one head that consecutive ranks share.

    Raises:
        CacheFileError: neither the number of heads nor the number of ranks divides the other.
    """
    if total % tensor.size == 0:
        count = total // tensor.size
        return range(tensor.rank * count, (tensor.rank + 1) * count)
    if total > 0 and tensor.size % total == 0:
        head = tensor.rank // (tensor.size // total)
        return range(head, head + 1)
    raise CacheFileError(
        f"{name} has {total} KV heads, which {tensor.size} tensor-parallel ranks cannot divide; load it with another "
        "number of ranks"
    )
