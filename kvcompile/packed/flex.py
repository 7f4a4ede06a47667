"""``flex_attention`` dequantizes packed tensors, in eager code and in code that Dynamo traces.

Higher-order operators do not reach ``__torch_dispatch__``. They have one implementation for each type of tensor. While
Dynamo traces, they call the implementation for fake tensors, which accepts no other type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from kvcompile.compat.operators import flex_attention
from kvcompile.compat.pytree import tree_map_only
from kvcompile.compat.tracing import FakeTensorMode

Packed = TypeVar("Packed", bound=Tensor)


def let_flex_attention_read(packed_type: type[Packed], values_of: Callable[[Packed], Tensor]) -> None:
    """Make ``flex_attention`` accept tensors of ``packed_type``; ``values_of`` returns their dequantized values."""
    of_fake_tensors = flex_attention.python_key_table[FakeTensorMode]

    def read_packed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(packed_type, values_of, (args, kwargs))
        return flex_attention(*args, **kwargs)

    def read_fake(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            args, kwargs = tree_map_only(packed_type, values_of, (args, kwargs))
        return of_fake_tensors(mode, *args, **kwargs)

    flex_attention.py_impl(packed_type)(read_packed)
    flex_attention.python_key_table[FakeTensorMode] = read_fake
