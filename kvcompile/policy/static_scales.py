"""Static scales of caches in 8-bit floats, from a file: a number for the keys and a number for the values of a layer.

The file is one of

- JSON from ``python -m kvcompile calibrate``, with the largest magnitude of each layer's keys and values:
  ``{"version": 1, "largest": {"model.layers.0.self_attn": {"key": 12.5, "value": 1.75}}}``;
- a safetensors file, or a folder of them such as a checkpoint, with scales of ``fp8_e4m3``. The tensors have the names
  of llm-compressor, ModelOpt and vLLM: ``model.layers.0.self_attn.k_scale`` and ``.v_scale``, possibly below ``attn``,
  ``k_proj``, ``v_proj`` or ``qkv_proj``, or one ``.kv_scale`` for both.

A layer is found by the name of the module that calls attention. This name depends on which module of a model was
compiled. A name that is not in the file is therefore matched by its layer index, if the file has exactly one module
with that index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvcompile.errors import PolicyError, cut, one_line
from kvcompile.files.reading import is_folder, read_text_file, status_of_tensors
from kvcompile.kernels.formats import with_static_scale
from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.fp8 import FP8_FORMATS
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.graph.modules import layer_index
from kvcompile.policy.modules import module_in
from kvcompile.policy.text import parse_json

_SCALE_TENSOR = re.compile(r"(?:(?P<module>.+?)\.)?(?:(?:attn|[kv]_proj|qkv_proj)\.)?(?P<which>k|v|kv)_scale")
_ROLES: dict[str, tuple[Role, ...]] = {"kv": ("key", "value"), "k": ("key",), "v": ("value",)}

MAX_CALIBRATION = 1 << 22
"""The maximum size of a calibration, in bytes; a layer takes about a hundred."""

Numbers = dict[str, dict[Role, float]]
"""A number for the keys and a number for the values, by module."""


class CalibrationFile(BaseModel):
    """The content of a file that ``python -m kvcompile calibrate`` writes.

    Attributes:
        version: the version of this file format, 1.
        largest: the largest magnitude of keys and values, by the module that calls attention.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    largest: dict[str, dict[Role, Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]]]


@dataclass(frozen=True)
class StaticScales:
    """The scales of a model's caches.

    Attributes:
        source: the file or folder.
        numbers: largest magnitudes if ``calibrated``, otherwise scales of ``fp8_e4m3``.
        calibrated: whether the numbers come from a calibration.
    """

    source: str
    numbers: Numbers
    calibrated: bool

    @classmethod
    def read(cls, path: Path) -> StaticScales:
        """The scales in a file or folder.

        Raises:
            PolicyError: the file cannot be read, is malformed, or has no scales.
        """
        if is_folder(path):
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise PolicyError(
                    f"scales: {path} is a folder without safetensors files; give a checkpoint or a calibration"
                )
            return cls(str(path), _scales_in(files, path), calibrated=False)
        if path.suffix == ".safetensors":
            return cls(str(path), _scales_in([path], path), calibrated=False)
        try:
            data = parse_json(read_text_file(path, MAX_CALIBRATION), str(path))
            return cls(str(path), CalibrationFile.model_validate(data).largest, calibrated=True)
        except (OSError, UnicodeError) as error:
            raise PolicyError(f"scales: {cut(str(path))} cannot be read: {cut(str(error))}") from None
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            raise PolicyError(
                f"scales: {path} is not a calibration: {one_line('.'.join(map(str, fault['loc'])))}: {fault['msg']}; "
                "`python -m kvcompile calibrate` writes one"
            ) from None

    def scaled(self, fmt: Format, role: Role, module: str, layer: int | None) -> Format:
        """``fmt`` with the static scale of the keys or values of a layer.

        Args:
            fmt: a format of 8-bit floats without stored scales.
            role: ``key`` or ``value``.
            module: qualified name of the module that calls attention.
            layer: its layer index, if it has one.

        Raises:
            PolicyError: there is no scale for this layer and role, or no scale that suits the format.
        """
        number = self._of_module(module, layer).get(role)
        if number is None:
            raise PolicyError(
                f"scales: {self.source} has no scale of the {role}s of {module or f'layer {layer}'}; "
                "calibrate this model"
            )
        if self.calibrated:
            number = number / _largest(fmt) or 1.0  # if all numbers are zeros, any scale serves
        elif _largest(fmt) != _largest(FP8_FORMATS[0]):
            raise PolicyError(
                f"scales: {self.source} has scales for fp8_e4m3, not for {fmt.name}; give a calibration "
                "(`python -m kvcompile calibrate`)"
            )
        try:
            return with_static_scale(fmt, number)
        except ValueError as error:
            raise PolicyError(f"scales: {self.source}: {role}s of {module or f'layer {layer}'}: {error}") from None

    def _of_module(self, module: str, layer: int | None) -> dict[Role, float]:
        found = module_in(list(self.numbers), module, layer)
        if found is not None:
            return self.numbers[found]
        same_layer = [name for name in self.numbers if layer is not None and layer_index(name) == layer]
        known = one_line(", ".join(list(self.numbers)[:2])) + (", ..." if len(self.numbers) > 2 else "")
        raise PolicyError(
            f"scales: {cut(self.source, 80)} has no scales for {module or 'attention at top level'}"
            f"{f', and several modules in layer {layer}' if same_layer else ''} (it has: {known}); calibrate this "
            "model, or give another format in a rule"
        )


def _largest(fmt: Format) -> float:
    """The largest number of a format of 8-bit floats; PolicyError for any other format."""
    if (largest := getattr(fmt, "largest", None)) is None:
        raise PolicyError(f"scales: {fmt.name} is not a format of 8-bit floats; give fp8_e4m3 or fp8_e5m2")
    return largest


def _scales_in(files: list[Path], source: Path) -> Numbers:
    """The scales in safetensors files; PolicyError if the files have none."""
    numbers: Numbers = {}
    shared: Numbers = {}
    for name, tensor in _scale_tensors(files):
        match = _SCALE_TENSOR.fullmatch(name)
        assert match is not None
        if tensor.numel() != 1 or not tensor.is_floating_point():
            kind = f"{tensor.numel()} elements of {tensor.dtype}"
            raise PolicyError(f"scales: {source}: {cut(name)} has {kind}; a static scale is one float")
        found = shared if match["which"] == "kv" else numbers
        found.setdefault(match["module"] or "", {}).update(dict.fromkeys(_ROLES[match["which"]], tensor.float().item()))
    for module, scales in shared.items():
        numbers[module] = scales | numbers.get(module, {})
    if not numbers:
        raise PolicyError(
            f"scales: {source} has no tensors k_scale and v_scale; `python -m kvcompile calibrate` measures scales"
        )
    return numbers


def _scale_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of the scales in safetensors files; no other tensor is read."""
    for file in files:
        try:
            status_of_tensors(file)
            with safe_open(file, framework="pt") as tensors:
                opened: Any = tensors
                names = [name for name in opened.keys() if _SCALE_TENSOR.fullmatch(name)]  # noqa: SIM118 - not a dict
                yield from ((name, opened.get_tensor(name)) for name in names)
        except (OSError, SafetensorError) as error:
            raise PolicyError(f"scales: {file} cannot be read: {one_line(error)}") from None
