"""Tensors that a compiled graph may pack although it only reads them: ``kvcompile.pack_`` and attributes of objects.

A graph packs the caches that it writes. Keys and values that it only reads may be weights, or new at every call, and
are not packed by default. The keys and values of an encoder can be packed: they are computed once and read at every
step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvcompile.call.adoption import why_not_whole
from kvcompile.compat.tensors import is_autograd_view
from kvcompile.errors import InputError
from kvcompile.packed.subclass import PackedSubclass

T = TypeVar("T")

_MARK = "_kvcompile_pack"
_CACHE_RANKS = (3, 4)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
"""A key in a source name of Dynamo. Dots in it do not separate attributes."""


def pack_(owner: T) -> T:
    """Let compiled steps pack caches that they only read, such as precomputed keys and values of cross-attention.

    The first compiled call that reads such a tensor as keys or values packs it in place, in the format that its policy
    gives that layer. A tensor with any other use stays plain, and the report names that use. Call ``pack_`` before the
    first compilation: a graph that was compiled earlier is not compiled again. A graph that packs a marked tensor also
    packs other tensors that later calls pass in its place.

    A cache may have its dimensions in any order in memory, as ``projection(x).transpose(1, 2)`` has. A buffer or an
    attribute whose elements do not fill its memory is not marked.

    Args:
        owner: a tensor; a module, for its buffers; or a list, tuple, dict or object of another class, for the tensors
            that it and its attributes hold. Only floating-point tensors of three or four dimensions without gradients
            are marked; parameters are not.

    Returns:
        ``owner`` itself.

    Raises:
        InputError: ``owner`` holds no such tensor, or is a tensor, list, tuple or dict with a tensor that is a part of
            a larger one, or has elements that overlap in memory. An InputError is a KVCompileError and a ValueError.
    """
    found = list(_tensors_of(owner, set()))
    for tensor in found:
        if type(tensor) is not Tensor:
            continue  # it is packed
        if (reason := why_not_whole(tensor)) is None:
            setattr(tensor, _MARK, True)
        elif isinstance(owner, (Tensor, list, tuple, Mapping)):
            raise InputError(
                f"pack_: the tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, cannot be packed: {reason}"
            )
    if not found:
        raise InputError(
            f"pack_: {_in_words(owner)} holds no floating-point tensor of 3 or 4 dimensions without gradients; "
            "pass the tensors of keys and values, or the module or object that has them as buffers or attributes"
        )
    return owner


def _in_words(owner: object) -> str:
    if isinstance(owner, type):
        return f"the class {owner.__name__}"
    return "None" if owner is None else type(owner).__name__


def may_pack(value: Any, source: str) -> bool:
    """Whether a graph may pack the input ``value``, which Dynamo calls ``source``, although it only reads it.

    This is so if the caller has marked it, or if it is an attribute of an object, such as the encoder's part of a
    cache. A tensor that is an argument itself may be new at every call, and a tensor of a module may be a weight.
    """
    if type(value) is not Tensor or value.requires_grad:
        return False
    if getattr(value, _MARK, False):
        return True
    if is_autograd_view(value) or not value.is_contiguous():
        return False
    holder, _, attribute = _STRING.sub("", source).rpartition(".")
    return bool(holder) and not attribute.startswith(("_parameters", "_buffers"))


def _tensors_of(owner: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors of an object and its attributes that may be caches or are packed, each once."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, Tensor):
        is_floating = type(owner) is Tensor and owner.is_floating_point() and not owner.requires_grad
        if isinstance(owner, PackedSubclass) or (is_floating and owner.dim() in _CACHE_RANKS):
            yield owner
        return
    for part in _parts_of(owner):
        yield from _tensors_of(part, seen)


def _parts_of(owner: Any) -> list[Any]:
    if isinstance(owner, torch.nn.Module):
        return [*owner.buffers(), *(value for module in owner.modules() for value in _own_attributes(module))]
    if isinstance(owner, Mapping):
        return list(owner.values())
    if isinstance(owner, (list, tuple)):
        return list(owner)
    return list(getattr(owner, "__dict__", {}).values())


def _own_attributes(module: torch.nn.Module) -> list[Any]:
    """The tensors and lists of a module other than its buffers, parameters and modules."""
    held = (value for name, value in vars(module).items() if name not in _OF_MODULE)
    return [value for value in held if isinstance(value, (Tensor, list, tuple, Mapping))]


_OF_MODULE = frozenset(vars(torch.nn.Module()))
"""The attributes that every module has."""
