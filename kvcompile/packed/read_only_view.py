"""What a view of a packed cache becomes when it cannot be expressed on packed data: its values, but not its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from kvcompile.packed.flex import let_flex_attention_read
from kvcompile.packed.op_table import is_view_op, views_of_normal_tensors, written_arguments


class ReadOnlyView(torch.Tensor):
    """Dequantized values of a view (``unsqueeze``, ``view``, a slice of channels, ...) of a packed cache.

    In plain PyTorch a write to such a view is a write to the cache. Here it would be lost, so it raises. Any operator
    that is not a view returns plain tensors.
    """

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> ReadOnlyView:
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["value"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> ReadOnlyView:
        return ReadOnlyView(inner["value"])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @_disable_dynamo
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if any(isinstance(arg, ReadOnlyView) for arg in written_arguments(func, args, kwargs)):
            raise NotImplementedError(
                f"{func} writes to a view of a packed KV cache that has no packed form, so the write would be lost; "
                "write whole token vectors to the cache itself (cache[:, :, positions] = x), or clone() the view first"
            )
        with views_of_normal_tensors(func, args):
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            args, kwargs = tree_map_only(ReadOnlyView, lambda view: view.value, (args, kwargs))
            result = func(*args, **kwargs)
            return tree_map_only(Tensor, ReadOnlyView, result) if is_view_op(func) else result

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReadOnlyView({self.value!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.value.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value.clone().__reduce_ex__(protocol)


let_flex_attention_read(ReadOnlyView, lambda view: view.value)
