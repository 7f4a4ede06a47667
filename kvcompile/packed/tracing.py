"""Queries about the tracer that calls the dispatch of packed caches (Dynamo's fake tensors, AOTAutograd)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvcompile.compat.tensors import storage_id
from kvcompile.compat.tracing import (
    FakeTensor,
    FunctionalTensor,
    converted_tensors,
    detect_fake_mode,
    functional_mode,
    records_operators,
)


def is_traced(data: Tensor) -> bool:
    """Whether ``data`` stands for a tensor of a graph that is being traced."""
    return type(data) is not Tensor


def has_no_values(data: Tensor) -> bool:
    """Whether operators on ``data`` only compute shapes: it is a fake tensor, and no graph records the operators.

    This is so while Dynamo traces. Code may then skip operators that affect neither shapes nor errors.
    """
    return type(data) is FakeTensor and not records_operators()


def is_functionalized(data: Tensor) -> bool:
    """Whether AOTAutograd is functionalizing the code that uses ``data``."""
    return isinstance(data, FunctionalTensor)


def ends_functional_graph(data: Tensor) -> bool:
    """Whether AOTAutograd is copying new contents into ``data``, a mutated graph input, after functionalized code.

    During this copy the input is not a functional tensor, although the functional mode is still on. The new contents
    were computed from the old ones, and ``copy_`` is the only write that the graph may contain.
    """
    return functional_mode() is not None and not is_functionalized(data)


def refuse_aliased_inputs(cache_type: type) -> None:
    """Raises if two packed inputs of the graph that is being functionalized share a storage.

    AOTAutograd does not detect storages that tensor subclasses share, so each input would miss writes to the other. The
    check covers all tensors that the fake mode has converted, including the base of a view. It may therefore refuse a
    valid graph, but it accepts no invalid graph.
    """
    fake_mode = detect_fake_mode()
    if fake_mode is None:
        return
    caches: list[Any] = [tensor for tensor in converted_tensors(fake_mode) if isinstance(tensor, cache_type)]
    storages = [storage_id(cache.packed) for cache in caches]
    if len(set(storages)) < len(storages):
        raise NotImplementedError(
            "a compiled graph writes to a packed cache, and one of its inputs is a view of a packed cache; pass the "
            "whole cache only, and slice it inside the compiled function"
        )
