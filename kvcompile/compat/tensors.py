"""Private names of tensors, their storages and the dispatcher. Without one of them this file cannot be imported.

There is no fallback: adoption would be unsafe without the counts of users, and packed tensors need the wrapper tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

# Makes a tensor of a subclass that has sizes and a dtype, but no memory.
new_wrapper = torch.Tensor._make_wrapper_subclass

# The value of ``__torch_function__`` for subclasses that handle operators in ``__torch_dispatch__`` only.
no_torch_function = torch._C._disabled_torch_function_impl

# A decorator: Dynamo calls the function and does not trace it. ``torch.compiler.disable`` would import Dynamo at once.
not_traced = _disable_dynamo

# A context in which no fake, functional or other mode sees the operators.
without_modes = _disable_current_modes

# Whether a tensor is wrapped by ``torch.vmap`` or another transform of ``torch.func``, and hides a dimension.
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor

_VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def without_view_tracking() -> AbstractContextManager[None]:
    """Views that are made in this context are not autograd views, as under ``inference_mode``."""
    return torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING)


def is_distributed(value: object) -> bool:
    """Whether ``value`` is a DTensor. The class is recognised by its name, because importing it is slow."""
    return (type(value).__module__, type(value).__name__) == ("torch.distributed.tensor", "DTensor")


def storage_id(tensor: Tensor) -> int:
    """A number that only tensors on the same storage share. Unlike an address, it also distinguishes fake storages."""
    return int(tensor.untyped_storage()._cdata)


def is_autograd_view(tensor: Tensor) -> bool:
    """Whether PyTorch records ``tensor`` as a view of another tensor."""
    return tensor._is_view()


def is_view_of_held_tensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a view of a tensor that something else uses, too.

    ``linear(x).transpose(1, 2)`` is a view of a tensor that nothing else uses: it lives as long as its view.
    """
    if not is_autograd_view(tensor):
        return False
    with torch.inference_mode(False):
        view_of_nothing_else = torch.empty(1, device="cpu").unsqueeze(0)
    return _counts_of_base(tensor) != _counts_of_base(view_of_nothing_else)


def _counts_of_base(view: Tensor) -> tuple[int, ...]:
    """How often C++ and Python refer to the tensor that ``view`` is a view of. Weak references count, too.

    A release of PyTorch may count the references of this function in its own way, so compare the counts of two views.
    """
    base = view._base
    assert base is not None, "an autograd view has a base"
    return base._use_count(), sys.getrefcount(base), weakref.getweakrefcount(base)  # type: ignore[attr-defined]


def num_users(tensor: Tensor) -> int:
    """The number of tensors, views and holders of the storage object that use the storage of ``tensor``, or ``tensor``.

    It is 1 if ``tensor`` is alone. The tensor that ``tensor`` is a view of does not count.
    """
    holders = _references_to_storage(tensor) - _references_to_storage(torch.empty(1, device="cpu"))
    storage = tensor.untyped_storage()
    of_storage = torch._C._storage_Use_Count(storage._cdata) - 1 + holders  # does not count ``storage`` itself
    base = tensor._base
    if base is not None and storage_id(base) == storage_id(tensor):  # ``base.data = other`` moves it to another storage
        of_storage -= 1
    return max(tensor._use_count(), of_storage)  # type: ignore[attr-defined]


def _references_to_storage(tensor: Tensor) -> int:
    """Python's references to the object of a storage, this function's included. Its tensor does not refer to it."""
    return sys.getrefcount(tensor.untyped_storage())


def is_held_elsewhere(owner: object, name: str) -> bool:
    """Whether Python refers to the tensor in the attribute ``name`` of ``owner`` from somewhere else, too."""
    alone = SimpleNamespace(**{name: torch.empty(1, device="cpu")})
    return _references_to(owner, name) != _references_to(alone, name)


def _references_to(owner: object, name: str) -> int:
    return sys.getrefcount(owner.__dict__[name])


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``target.copy_(source)`` for each pair, in one kernel for each dtype on a GPU."""
    dtypes = [target.dtype for target in targets]
    for dtype in set(dtypes):  # PyTorch launches a kernel for each pair if dtypes differ within a list
        of_dtype = [index for index, other in enumerate(dtypes) if other == dtype]
        torch._foreach_copy_([targets[index] for index in of_dtype], [sources[index] for index in of_dtype])


def schema_of(op: Any) -> Any:
    """The schema of an operator overload; None for anything else."""
    return getattr(op, "_schema", None)


def arguments_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the operator overload ``op``, by name, defaults included."""
    known = op._schema.arguments
    given = {argument.name: value for argument, value in zip(known, args, strict=False)}
    return {argument.name: argument.default_value for argument in known} | given | dict(kwargs)
