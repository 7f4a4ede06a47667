"""The inputs and outputs of a packaged step, and their description in the metadata of the package.

The metadata maps strings to strings, so that a C++ program reads it without a parser for JSON::

    kvcompile.version   0.1.0
    device              cpu
    inputs              3
    input.0.name        tokens
    input.0.kind        argument
    input.0.dtype       int64
    input.0.shape       1,1
    input.1.name        layers[0].k_cache
    input.1.kind        cache
    input.1.dtype       uint8
    input.1.shape       8,1,2,4352
    input.1.format      int8_per_token_head
    ...
    outputs             1
    output.0.dtype      float32
    output.0.shape      1,1,256
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from kvcompile.errors import PackageError
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.version import VERSION

InputKind = Literal["argument", "cache", "state"]

_VERSION = "kvcompile.version"


@dataclass(frozen=True)
class TensorType:
    """The dtype and the shape of a tensor.

    Attributes:
        dtype: as PyTorch writes it, without ``torch.``: ``int64``.
        shape: its size in each dimension. The tensor is contiguous.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorType:
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]

    def zeros(self, device: str) -> Tensor:
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True)
class StepInput:
    """One input of a packaged step.

    Attributes:
        name: the name in the code of the model, such as ``input_ids`` or ``past_key_values.layers[0].keys``.
        kind: ``argument`` is a tensor that the caller passes at each step. ``cache`` is a packed cache, and ``state``
            another tensor that the step changes in place, such as the length of a cache. Both belong to the caller and
            begin as zeros.
        type: its dtype and shape. A cache is bytes: [num_blocks, batch, num_kv_heads, bytes of a block].
        format: for a cache, the name of its format.
        role: for a cache, ``key`` or ``value``.
        head_dim: for a cache, the channels of a vector.
        num_tokens: for a cache, its capacity in tokens, a multiple of 64.
    """

    name: str
    kind: InputKind
    type: TensorType
    format: str = ""
    role: str = ""
    head_dim: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class Signature:
    """The inputs of a packaged step, in the order in which it takes them, and its outputs.

    Attributes:
        inputs: all inputs.
        outputs: all outputs.
        device: the type of the device of all tensors, ``cpu`` or ``cuda``.
    """

    inputs: tuple[StepInput, ...]
    outputs: tuple[TensorType, ...]
    device: str = "cpu"

    def of_kind(self, *kinds: InputKind) -> list[StepInput]:
        return [one for one in self.inputs if one.kind in kinds]

    def metadata(self) -> dict[str, str]:
        """The description for the package, strings by name."""
        counts = {"inputs": str(len(self.inputs)), "outputs": str(len(self.outputs))}
        found = {_VERSION: VERSION, "device": self.device, **counts}
        for place, one in enumerate(self.inputs):
            own = asdict(one) | _described(one.type)
            found |= {f"input.{place}.{key}": str(value) for key, value in own.items() if key != "type" and value != 0}
        for place, output in enumerate(self.outputs):
            found |= {f"output.{place}.{key}": value for key, value in _described(output).items()}
        return found

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> Signature:
        """The signature that ``metadata`` describes.

        Raises:
            PackageError: the metadata are not from kvcompile, or are damaged.
        """
        if _VERSION not in metadata:
            raise PackageError("the package was not made by kvcompile.package: it has no description of its inputs")
        try:
            inputs = tuple(_read_input(metadata, f"input.{place}.") for place in range(int(metadata["inputs"])))
            outputs = tuple(_read_type(metadata, f"output.{place}.") for place in range(int(metadata["outputs"])))
            device = _read_device(metadata)
        except (KeyError, ValueError) as error:
            raise PackageError(f"the description of the package is damaged: {error}") from error
        return cls(inputs, outputs, device)


def _described(type: TensorType) -> dict[str, str]:
    return {"dtype": type.dtype, "shape": ",".join(map(str, type.shape))}


def _read_type(metadata: Mapping[str, str], prefix: str) -> TensorType:
    shape = tuple(int(size) for size in metadata[f"{prefix}shape"].split(",") if size)
    dtype = metadata[f"{prefix}dtype"]
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    return TensorType(dtype, shape)


def _read_device(metadata: Mapping[str, str]) -> str:
    device = metadata.get("device", "cpu")  # older packages have none
    if device not in ("cpu", "cuda"):
        raise ValueError(f"{device!r} is not a device of packages")
    return device


def _read_input(metadata: Mapping[str, str], prefix: str) -> StepInput:
    own: dict[str, Any] = {}
    for field in fields(StepInput):
        if field.name != "type" and (text := metadata.get(prefix + field.name)) is not None:
            own[field.name] = int(text) if field.type == "int" else text
    if own["kind"] not in ("argument", "cache", "state"):
        raise ValueError(f"{own['kind']!r} is not a kind of input")
    return StepInput(type=_read_type(metadata, prefix), **own)
