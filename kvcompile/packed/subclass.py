"""The base class of packed tensors, which have the shape and dtype of a plain tensor but no plain memory.

The dispatch tries, in this order: the handler of the operator; its decomposition, if it is composite; the general rules
(a view becomes a live view; a write dequantizes, computes and stores); the operator itself on dequantized values. Eager
and traced code take the same path, so sizes may be symbolic, and the dispatch never reads values of traced data.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcompile.compat.pytree import tree_map_only
from kvcompile.compat.tensors import no_torch_function, not_traced, without_view_tracking
from kvcompile.packed.op_table import GENERAL_RULES, Handler, views_of_normal_tensors


def _untracked(take_slice: Callable[..., Tensor]) -> Any:
    """Wraps a slicing method: outside of grad mode its result is not an autograd view, as under ``inference_mode``.

    Dynamo rebuilds a graph input that is a view by replaying the view on its base. The replay fails for growing sizes.
    """

    @not_traced
    @functools.wraps(take_slice)
    def slice_untracked(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled():
            return take_slice(self, *args, **kwargs)
        with without_view_tracking():
            return take_slice(self, *args, **kwargs)

    return slice_untracked


class PackedSubclass(torch.Tensor):
    """A tensor that stores packed data and dequantizes its values on each read.

    Attributes:
        handlers: maps an operator overload to its handler. Every class has its own table.
    """

    handlers: ClassVar[dict[Any, Handler]]

    def __init_subclass__(cls) -> None:
        cls.handlers = {}

    @classmethod
    @not_traced
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        with views_of_normal_tensors(func, args):
            handler = cls.handlers.get(func)
            if handler is not None and (result := handler(*args, **kwargs)) is not NotImplemented:
                return result
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
            for rule in GENERAL_RULES:
                if (result := rule(func, args, kwargs)) is not NotImplemented:
                    return result
            args, kwargs = tree_map_only(PackedSubclass, _values_of, (args, kwargs))
            return func(*args, **kwargs)

    @property
    def data_is_traced(self) -> bool:
        """Whether this tensor belongs to a graph that is being traced. If so, its values must not be read."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """The values, as a plain tensor of the same shape and dtype."""
        raise NotImplementedError

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    __getitem__ = _untracked(torch.Tensor.__getitem__)
    narrow = _untracked(torch.Tensor.narrow)  # type: ignore[assignment]

    def tolist(self) -> Any:  # type: ignore[override]
        return self.dequantize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a read-only array, because a write to the array would not reach the cache."""
        array = self.dequantize().numpy(force=force)
        array.flags.writeable = False
        return array

    def _refuse_plain_memory(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "a packed KV cache has no plain memory to share; share the bytes in cache.packed, or cache.dequantize()"
        )

    __dlpack__ = share_memory_ = _refuse_plain_memory  # type: ignore[assignment]

    def __copy__(self) -> Tensor:
        return self.detach()

    @not_traced
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            result = memo[id(self)] = self.clone()
            for name, value in self.__dict__.items():  # copy attributes that users set, as for any tensor
                if name not in result.__dict__:
                    result.__dict__[name] = copy.deepcopy(value, memo)
        return memo[id(self)]


def _values_of(x: PackedSubclass) -> Tensor:
    return x.dequantize()
