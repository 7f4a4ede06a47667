"""What each PyTorch operator does to a packed cache: quantize on write, dequantize on read.

``dispatch`` tries, in this order: the operator's handler; its decomposition, if it is composite; an error, if it would
write to a packed cache; the operator itself on dequantized values. Everything here and in the handlers is traceable:
sizes may be symbolic and nothing reads a tensor's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

import kvcompile.packed.copies
import kvcompile.packed.views
import kvcompile.packed.writes  # noqa: F401  (these three fill the table)
from kvcompile.packed.op_table import HANDLERS, Handler, is_view_op, views_of_normal_tensors, written_arguments
from kvcompile.packed.read_only_view import ReadOnlyView
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor

_REFUSAL = (
    "{func} would change a packed KV cache in place, but only whole token vectors can be written to it (index_copy_, "
    "index_put_ or an assignment that covers head_dim, copy_, fill_, zero_, cat); compute the new vectors first and "
    "assign them, or work on cache.dequantize()"
)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs operator ``func``; at least one argument is, or a list among the arguments holds, a PackedTensor.

    Raises:
        NotImplementedError: the operator would write to a packed cache and is not a write of whole token vectors.
    """
    return run(func, args, kwargs, PackedTensor, HANDLERS, _REFUSAL)


def run(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    packed_type: type[PackedSubclass],
    handlers: Mapping[Any, Handler],
    refusal: str,
) -> Any:
    """Runs ``func`` on arguments among which are some of ``packed_type``, by the rules of this module."""
    with views_of_normal_tensors(func, args):
        handler = handlers.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if any(isinstance(argument, packed_type) for argument in written_arguments(func, args, kwargs)):
            raise NotImplementedError(refusal.format(func=func))
        args, kwargs = tree_map_only(packed_type, packed_type.dequantize, (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map_only(Tensor, ReadOnlyView, result) if is_view_op(func) else result
