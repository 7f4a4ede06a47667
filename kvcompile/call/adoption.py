"""Adoption: a plain cache tensor becomes a packed cache in place, for every holder of the tensor.

Unpacking is the reverse: a packed cache becomes a plain tensor in place.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from kvcompile.compat.tensors import is_held_elsewhere, is_view_of_held_tensor, num_users
from kvcompile.errors import KVCompileError
from kvcompile.kernels.layout.axes import BLOCK_AXES, PartIndex, shape_of_part, sizes_by_axis, with_ranges
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import packed_of
from kvcompile.packed.shard import PackedShard
from kvcompile.packed.stack import PackedParts, PackedRanges, PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.view_geometry import is_permuted

_COPY_IT = "copy it before the compiled call"
_MISSED = "would not get the new tokens of a packed cache; take a clone() of it for the cache before the compiled call"


class AdoptionError(KVCompileError):
    """A plain cache cannot be adopted, or a packed one unpacked; the message says why. The cache is unchanged."""


def adopt(
    plain: Tensor,
    layout: PackedLayout,
    axes: str = "bhtd",
    *,
    growing: bool = False,
    shard: ContextShard | None = None,
    num_written: Tensor | None = None,
) -> PackedSubclass:
    """Quantizes the cache ``plain`` and swaps the packed tensor into its Python object.

    Afterwards every name, list and module attribute that held ``plain`` holds the packed cache. Attributes that were
    set on the object are kept. The plain storage is freed. A cache keeps its strides, whatever the order of its
    dimensions in memory: views and ``reshape`` then do what they did on ``plain``. Pools, shards and stacks report the
    strides of contiguous tensors, and only contiguous ones are adopted.

    Args:
        plain: a cache or a pool. ``axes`` is the order of its dimensions.
        layout: format and role of the packed cache.
        axes: an order of :mod:`kvcompile.passes.graph.permutations`.
        growing: whether the cache grows by concatenation.
        shard: this rank's share of the tokens, if several ranks divide the cache.
        num_written: as in :meth:`PackedTensor.from_dense`. A shard ignores it.

    Returns:
        The object ``plain`` itself: now a PackedTensor, a PackedPool if it has blocks, or a PackedShard.

    Raises:
        AdoptionError: the format cannot hold the cache, or other code would miss the swap: a view of the cache, its
            storage or another tensor on its storage is in use, or a weak reference to the cache exists.
    """
    check_adoptable(plain, {(): (layout, axes)}, shard=shard)
    with _normal_tensors_for(plain):
        if shard is not None:
            packed: Tensor = PackedShard.from_dense(plain, layout, shard, axes)
        else:
            packed = packed_of(plain, layout, axes, growing=growing, num_written=num_written)
            if isinstance(packed, PackedTensor):
                packed = packed.with_stride(plain.stride())
    _swap(plain, packed, packed.__dict__)
    assert isinstance(plain, PackedSubclass)
    return plain


def adopt_stack(
    plain: Tensor,
    parts: PackedParts,
    stacked_dims: Sequence[int] | None = None,
    num_written: Mapping[PartIndex, Tensor] | None = None,
    num_ranges: int = 0,
) -> PackedStack:
    """Adopts a tensor of several caches, as :func:`adopt` does for a single cache.

    The parts that ``parts`` names are quantized. Every other part becomes a plain tensor in its own memory.

    Args:
        plain: several caches or pools, stacked along ``stacked_dims``.
        parts: the format and role of each packed part.
        stacked_dims: the stacked dimensions; by default the first dimensions.
        num_written: as for :func:`adopt`, for each part whose number is known.
        num_ranges: if the parts are ranges of channels, their number; ``stacked_dims`` then counts the dimensions of
            ``plain`` with a dimension for the ranges, before the channels.

    Raises:
        AdoptionError: as for :func:`adopt`.
    """
    check_adoptable(plain, parts, stacked_dims, num_ranges)
    with _normal_tensors_for(plain):
        stack = PackedStack.from_dense(with_ranges(plain.detach(), num_ranges), parts, stacked_dims, num_written)
        packed = PackedRanges.of(stack) if num_ranges else stack
    _swap(plain, packed, packed.__dict__)
    assert isinstance(plain, PackedStack)
    return plain


def may_unpack(value: object) -> TypeGuard[PackedTensor]:
    """Whether ``value`` is one whole packed cache of fixed size, and no view of another one."""
    if type(value) is not PackedTensor:
        return False
    return value.is_whole and value.place.root is None and value.fixed_data is not None


def unpack(packed: Tensor) -> Tensor:
    """Swaps a plain tensor with the dequantized values into the Python object of a packed cache of fixed size.

    Afterwards every holder of ``packed`` has a plain tensor of the same shape, strides and dtype, with the attributes
    that were set on the object. The packed bytes are freed. Live views show the plain tensor from then on.

    Returns:
        The object ``packed`` itself: now a plain tensor.

    Raises:
        AdoptionError: other code would miss the swap: a view of the cache is in use, the cache is a view or grows, or a
            weak reference to it exists.
    """
    if not may_unpack(packed):
        raise _refusal(packed, "it is not a whole packed cache of fixed size", "unpacked")
    if (reason := _why_not_unpackable(packed)) is not None:
        raise _refusal(packed, reason, "unpacked")
    with _normal_tensors_for(packed), torch.no_grad():
        plain = torch.empty_strided(packed.shape, packed.stride(), dtype=packed.dtype, device=packed.device)
        plain.copy_(packed.dequantize())
        own = packed.detach().__dict__  # what every packed cache has; the user may have set more
    _swap(packed, plain, own, "unpacked")
    return packed


def check_adoptable(
    plain: Tensor,
    parts: PackedParts,
    stacked_dims: Sequence[int] | None = None,
    num_ranges: int = 0,
    shard: ContextShard | None = None,
) -> None:
    """Raises the AdoptionError of :func:`adopt_stack`, or of :func:`adopt` if the only part is ``()``."""
    reason = _why_not_plain(plain)
    keeps_strides = shard is None and () in parts and parts[()][1] not in BLOCK_AXES
    if reason is None and not keeps_strides and not plain.is_contiguous():
        reason = f"it is not contiguous; {_COPY_IT} with contiguous()"
    for index, (layout, axes) in parts.items():
        dims = range(len(index)) if stacked_dims is None else stacked_dims
        reason = reason or _why_not_packable(plain, shape_of_part(plain, dims, num_ranges), layout, axes)
    if reason is not None:
        raise _refusal(plain, reason)


@contextlib.contextmanager
def _normal_tensors_for(plain: Tensor) -> Iterator[None]:
    """A ``with`` block that leaves ``inference_mode`` if ``plain`` was made outside of it.

    Tensors that are made under ``inference_mode`` cannot be written in place outside of it. A cache that could be
    written before its adoption can be written afterwards.
    """
    if not torch.is_inference_mode_enabled() or plain.is_inference():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _swap(held: Tensor, new: Tensor, own: Container[str], action: str = "packed") -> None:
    """Swaps ``new`` into the Python object ``held``, which keeps its attributes except those in ``own``."""
    new.__dict__.update({name: value for name, value in held.__dict__.items() if name not in own})
    try:
        torch.utils.swap_tensors(held, new)
    except RuntimeError as error:
        raise _refusal(held, str(error), action) from error


def _refusal(cache: Tensor, reason: str, action: str = "packed") -> AdoptionError:
    return AdoptionError(f"cache of shape {tuple(cache.shape)}, {cache.dtype}, was not {action}: {reason}")


def _why_not_packable(plain: Tensor, shape: Sequence[int], layout: PackedLayout, axes: str) -> str | None:
    """Why ``layout`` cannot store the caches of ``shape`` in ``plain``."""
    has_dims = sizes_by_axis(shape, axes, layout.head_dim) is not None
    if not has_dims or not plain.is_floating_point():
        return f"it is not a {len(axes)}-dimensional floating-point cache of head_dim {layout.head_dim}"
    if (reason := layout.unsupported(plain.dtype) or layout.unsupported_on(plain.device)) is not None:
        return f"format {layout.spec}: {reason}"
    return None


def why_not_whole(plain: Tensor) -> str | None:
    """Why a plain tensor does not fill its storage with each element once; None if it does."""
    if not is_permuted(plain):
        return f"its elements overlap in memory, or have gaps between them; {_COPY_IT} with clone()"
    nbytes = plain.untyped_storage().nbytes()
    if nbytes != plain.nbytes:
        return (
            f"it covers {plain.nbytes} bytes of a storage of {nbytes} bytes; put a clone() in its place, which no "
            "larger tensor holds, or replace the larger tensor by PackedStack.from_dense"
        )
    return None


def _why_not_plain(plain: Tensor) -> str | None:
    """Why other code would miss the swap of ``plain`` for another tensor; None if it is safe."""
    if type(plain) is not Tensor:
        return f"it is a {type(plain).__name__}, not a plain tensor"
    if plain.requires_grad:
        return "it requires grad, and a packed cache has no gradient"
    if (reason := why_not_whole(plain)) is not None:
        return reason
    if is_view_of_held_tensor(plain):
        return f"it is a view of a tensor that is in use; delete that tensor, or {_COPY_IT} with clone()"
    if plain.device.type == "cpu" and plain.is_shared():  # always True on a GPU
        return f"its memory is shared with other processes, which {_MISSED}"
    if not plain.untyped_storage().resizable():  # it came from from_numpy or from_dlpack, or has been exported
        return f"its memory may belong to a NumPy array, a file or another library, which {_MISSED}"
    if num_users(plain) > 1:
        return (
            "a view of it, its storage, or another tensor on its storage is in use; delete it before the compiled call"
        )
    if weakref.getweakrefs(plain):
        return "something holds a weak reference to it"
    return None


def _why_not_unpackable(packed: PackedTensor) -> str | None:
    """Why other code would miss the swap of ``packed`` for a plain tensor; None if it is safe.

    A packed view has the bytes of the cache: the same tensor, or another one on the same storage. A live view has the
    Python object of the cache instead, which shows the plain values afterwards. But PyTorch cannot swap a tensor while
    it records a view of it.
    """
    if max(num_users(packed), num_users(packed.packed)) > 1 or is_held_elsewhere(packed, "_packed"):
        return "a view of it, or another tensor on its bytes, is in use"
    if weakref.getweakrefs(packed):
        return "something holds a weak reference to it"
    return None
