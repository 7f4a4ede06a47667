"""The general rule for in-place operators: dequantize, compute, and store the vectors that changed.

The rule handles writes to parts of token vectors. A vector has changed if any of its bits has. All other vectors keep
their bytes: quantizing them again at every write would make their values drift.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.pytree import tree_leaves, tree_map_only
from kvcompile.compat.tensors import is_autograd_view, storage_id
from kvcompile.packed.live_view import LiveView, copy_of_values
from kvcompile.packed.op_table import general_rule, written_arguments
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.repeated_heads import RepeatedHeads
from kvcompile.packed.shard import PackedShard
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.writes import coordinates_of, encoded, put

aten = torch.ops.aten

_CHANGES_STORAGE = frozenset(
    (aten.resize_.default, aten.resize_as_.default, aten.set_.source_Tensor, aten.set_.default)
)


@general_rule
def _read_compute_store(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that writes packed tensors on plain copies of packed arguments, then stores the changes.

    Views of one packed tensor share one copy, as plain views share memory. If the operator raises, nothing is stored.

    Raises:
        NotImplementedError: the operator would change the shape or the storage of a packed tensor, or it would write
            several packed tensors that share memory but are not views of one object.
    """
    written = [x for x in written_arguments(func, args, kwargs) if isinstance(x, PackedSubclass)]
    if not written:
        return NotImplemented
    if changes_tensor(func):
        raise NotImplementedError(
            f"{func} would change the shape or the storage of a packed KV cache; make a view or a clone() instead"
        )
    packed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, PackedSubclass)]
    sources = {id(source): source for source in map(_source_of, packed)}
    written_sources = {id(source): source for source in map(_source_of, written)}
    if len(written_sources) > 1:
        _refuse_shared_memory(func, written_sources.values(), sources.values())
    copies = {key: copy_of_values(source) for key, source in sources.items()}
    plain = {id(x): _view_of_copy(x, copies) for x in packed}
    plain_args, plain_kwargs = tree_map_only(PackedSubclass, lambda x: plain[id(x)], (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for x in written:
        if plain[id(x)].shape != x.shape:
            raise NotImplementedError(
                f"{func} would resize a packed KV cache of shape {tuple(x.shape)} to {tuple(plain[id(x)].shape)}; give "
                "it an out= of the right shape"
            )
    for key, source in written_sources.items():
        store_changes(source, copies[key])
    for x in written:
        _count_write(x)
    originals = {id(plain[id(x)]): x for x in written}
    return tree_map_only(Tensor, lambda x: originals.get(id(x), x), result)


def changes_tensor(func: Any) -> bool:
    """Whether an operator changes the shape or the storage of its argument, which packed tensors do not support."""
    return torch.Tag.inplace_view in func.tags or func in _CHANGES_STORAGE


def _count_write(x: PackedSubclass) -> None:
    """Increments the version of a live view's source after a write, unless PyTorch shares the version between them."""
    if isinstance(x, LiveView) and not x.data_is_traced and not is_autograd_view(x) and not x.source.is_inference():
        torch.autograd.graph.increment_version(x.source)


def _source_of(x: PackedSubclass) -> Tensor:
    return x.source if isinstance(x, LiveView) else x


def _view_of_copy(x: PackedSubclass, copies: dict[int, Tensor]) -> Tensor:
    return x.of(copies[id(x.source)]) if isinstance(x, LiveView) else copies[id(x)]


def _refuse_shared_memory(func: Any, written: Iterable[Tensor], all_sources: Iterable[Tensor]) -> None:
    others = [(source, _storages(source)) for source in all_sources]
    for one in written:
        own = _storages(one)
        if any(other is not one and not own.isdisjoint(storages) for other, storages in others):
            raise NotImplementedError(
                f"{func} would write several views of one packed KV cache at once; call it for one view after the other"
            )


def _storages(cache: Tensor) -> set[int]:
    """Identifiers of the storages that hold the bytes of a cache."""
    if isinstance(cache, PackedStack):
        return {storage for part in cache.parts for storage in _storages(part)}
    if isinstance(cache, PackedPool):
        return _storages(cache.slots)
    if isinstance(cache, PackedShard):
        return _storages(cache.local)
    return {storage_id(cache.packed if isinstance(cache, PackedTensor) else cache)}


def store_changes(cache: Tensor, values: Tensor) -> None:
    """Stores each vector of ``values`` that differs from the present vector of ``cache``; other bytes stay unchanged.

    The cache is dequantized again for the comparison, because equal bytes decode to equal bits. Only one such copy is
    in memory at a time.

    Args:
        cache: a packed tensor, unchanged since it was dequantized to ``values``, or a plain part of a stack.
        values: the dequantized values of ``cache``, possibly modified; same shape as ``cache``.
    """
    if isinstance(cache, LiveView):
        copy = copy_of_values(cache.source)
        cache.of(copy).copy_(values)
        store_changes(cache.source, copy)
    elif isinstance(cache, PackedStack):
        for part, own in zip(cache.parts, cache.unstacked(values), strict=True):
            store_changes(part, own)
    elif isinstance(cache, PackedShard):
        store_changes(cache.local, cache.shard.select(values, cache.local.token_dim))
    elif isinstance(cache, PackedPool):
        store_changes(cache.slots, (values.transpose(1, 2) if cache.heads_first else values).flatten(0, 1))
    elif isinstance(cache, PackedTensor):
        _store_changed_vectors(cache, values)
    elif not isinstance(cache, RepeatedHeads):  # its dequantized values are its memory
        cache.copy_(values)


def _store_changed_vectors(cache: PackedTensor, values: Tensor) -> None:
    old, new = (cache.to_stored_axes(x) for x in (cache.dequantize(), values))
    changed = (_bits(new) != _bits(old)).any(-1)
    if cache.data_is_traced:  # the changed vectors are known only at run time, so all are stored under a mask
        put(cache, cache.packed_for_write(), coordinates_of(cache), encoded(cache, new), valid=changed)
        return
    sequence, head, token = changed.nonzero(as_tuple=True)
    if token.numel():
        vectors = encoded(cache, new[sequence, head, token], head)
        put(cache, cache.packed_for_write(), (sequence, head, cache.start + token), vectors)


def _bits(x: Tensor) -> Tensor:
    """The bits of ``x`` as integers, so that a NaN equals itself."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
