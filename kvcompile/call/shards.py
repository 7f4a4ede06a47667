"""Distributed parameters: a compiled graph takes the local shards that this process owns.

AOTAutograd unwraps every tensor subclass among the inputs at each call, in Python. A DTensor parameter is one local
tensor and a description that never changes, because Dynamo guards it. The graph therefore takes the local tensor and
makes the DTensor itself. Tracing then decomposes it into local operators and collectives.

A graph may also change such an input: the DTensor shares the memory of its shard, as it does in eager code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.compat.distributed import local_shard
from kvcompile.compat.guards import remember_specs
from kvcompile.compat.tensors import is_distributed, is_traceable_wrapper_subclass
from kvcompile.compat.tracing import detect_fake_mode
from kvcompile.errors import OptionsError


class Distributed:
    """Makes a DTensor of its local shard: the target of a node in Dynamo's graph."""

    def __init__(self, example: Any) -> None:
        """Takes the mesh, placements, shape and strides of the DTensor ``example``."""
        self.__name__ = self.__qualname__ = "distributed"  # FX names the node and the function in its code
        self._from_local = type(example).from_local
        self._mesh, self._placements = example.device_mesh, example.placements
        self._shape, self._stride = example.shape, example.stride()

    def __call__(self, shard: Tensor) -> Any:
        return self._from_local(
            shard, self._mesh, self._placements, run_check=False, shape=self._shape, stride=self._stride
        )


class LocalShards:
    """The inputs of one graph that are passed as local shards.

    Attributes:
        example_inputs: the example inputs of the changed graph.
    """

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any], sources: Sequence[str]) -> None:
        """Let a copy of Dynamo's graph take the shards of its distributed parameters, in place.

        Args:
            gm: the copy, whose nodes are changed.
            example_inputs: its inputs.
            sources: Dynamo's names of its inputs.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._places = [
            place
            for place, (value, source) in enumerate(zip(example_inputs, sources, strict=True))
            if _is_distributed_parameter(value, source)
        ]
        self.example_inputs = list(self.of(example_inputs))
        for place in self._places:
            self.example_inputs[place] = shard = _fake_of(self.example_inputs[place], placeholders[place])
            _take_shard(placeholders[place], placeholders[-1], shard)
        if self._places:
            remember_specs()
            gm.recompile()

    @property
    def are_used(self) -> bool:
        """Whether the graph takes shards."""
        return bool(self._places)

    def of(self, args: Sequence[Any]) -> Sequence[Any]:
        """The inputs of a call, with each distributed parameter replaced by its local shard."""
        if not self._places:
            return args
        result = list(args)
        for place in self._places:
            result[place] = local_shard(args[place])
        return result


def explained_error(error: Exception, example_inputs: Sequence[Any]) -> OptionsError | None:
    """An error with a remedy if distributed inputs with symbolic sizes caused ``error``; otherwise None.

    DTensor caches the shardings of operators by the sizes of arguments, and a symbolic size has no hash.
    """
    has_no_hash = isinstance(error, TypeError) and "unhashable" in str(error) and "SymInt" in str(error)
    if not has_no_hash or not any(is_distributed(value) for value in example_inputs):
        return None
    return OptionsError(
        "DTensor does not support the symbolic sizes of this graph, whose parameters are distributed; pass "
        "dynamic=False to torch.compile, and pad inputs to few lengths"
    )


def _is_distributed_parameter(value: Any, source: str) -> bool:
    is_parameter = "._parameters[" in source
    return is_parameter and is_distributed(value) and not is_traceable_wrapper_subclass(local_shard(value))


def _fake_of(shard: Tensor, placeholder: Node) -> Tensor:
    """A fake tensor like ``shard``, whose sizes are numbers.

    AOTAutograd would make its own fake, with the symbols that Dynamo gives to sizes of shards. A shard keeps its size,
    because Dynamo guards the size of the DTensor.
    """
    fake_mode = detect_fake_mode([placeholder.meta["example_value"]])
    assert fake_mode is not None, "Dynamo traces in a fake mode"
    sizes, strides = [int(size) for size in shard.shape], [int(stride) for stride in shard.stride()]
    with fake_mode:
        return torch.empty_strided(sizes, strides, dtype=shard.dtype, device=shard.device)


def _take_shard(placeholder: Node, last: Node, shard: Tensor) -> None:
    """Make ``placeholder`` take ``shard``; its users get the DTensor, which is made after the ``last`` input."""
    graph, example = placeholder.graph, placeholder.meta["example_value"]
    with graph.inserting_after(last):
        whole = graph.call_function(Distributed(example), (placeholder,))
    whole.meta = {"example_value": example}
    placeholder.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    placeholder.meta["example_value"] = shard
