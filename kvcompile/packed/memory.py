"""The memory of caches, measured from their storages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvcompile.compat.tensors import is_traceable_wrapper_subclass, storage_id


def cache_nbytes(*caches: Any) -> int:
    """Total size, in bytes, of the distinct storages of all tensors in ``caches``.

    The search covers lists, tuples, sets, dicts and attributes of objects (a Hugging Face ``Cache``, a module, a
    dataclass). A packed cache counts with its packed storage. A growing cache includes its spare room.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    pending = list(caches)
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if is_traceable_wrapper_subclass(value):
                pending.extend(getattr(value, name) for name in value.__tensor_flatten__()[0])
            else:
                storages[storage_id(value)] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending.extend(value)
        else:
            pending.extend(getattr(value, "__dict__", {}).values())
    return sum(storages.values())
