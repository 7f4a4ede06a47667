"""Transforms: the numbers of calibrated formats for every layer and KV head, from a file.

``python -m kvcompile calibrate --output FILE.safetensors`` writes the file. It has three tensors for the keys and three
for the values of each module that computes attention, such as ``model.layers.0.self_attn.key.mean``:

- ``mean``, float32 [num_kv_heads, head_dim];
- ``to_stored``, float32 [num_kv_heads, head_dim, head_dim], a matrix for row vectors whose columns are ordered by
  importance;
- ``from_stored``, its inverse.

A file serves every calibrated format: formats with a mean use only the mean, and transform formats use as many columns
as they store. The metadata hold the origin (:class:`Origin`), and SHA-256 digests of all tensors and of the metadata.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvcompile.compat.tensors import without_modes
from kvcompile.errors import PolicyError, cut, one_line
from kvcompile.files import digests
from kvcompile.files.reading import status_of_tensors
from kvcompile.kernels.formats import bases, with_basis
from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.policy.modules import module_in

FORMAT, VERSION = "kvcompile.transforms", "1"

_PARTS = ("mean", "to_stored", "from_stored")


class Origin(BaseModel):
    """The origin of transforms.

    Attributes:
        model: the name of the model.
        fingerprint: :func:`kvcompile.files.digests.of_model` of the model.
        text: the name of the text file.
        text_digest: SHA-256 of the text file.
        windows: number of windows of the text.
        tokens: tokens of a window.
        positions: the least and the largest position of a token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    fingerprint: str
    text: str
    text_digest: str
    windows: int
    tokens: int
    positions: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Transforms:
    """The transforms of a model.

    Attributes:
        source: the file.
        origin: their origin.
        tensors: the tensors of the file by name.
    """

    source: str
    origin: Origin
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Transforms:
        """The transforms in a file.

        Raises:
            PolicyError: the file cannot be read, holds no transforms, or is damaged.
        """
        try:
            status = status_of_tensors(path)
        except OSError as error:
            raise PolicyError(f"transforms: {path} cannot be read: {error}") from None
        return _read(path, status.st_mtime_ns, status.st_size)

    def save(self, path: Path) -> None:
        """Write the file; OSError if that fails."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "origin": self.origin.model_dump_json(),
            "digests": json.dumps(digests.of_tensors(self.tensors)),
        }
        header["digest"] = digests.of_header(header)
        save_file({name: x.contiguous() for name, x in self.tensors.items()}, path, header)

    def calibrated(self, fmt: Format, role: Role, module: str, layer: int | None) -> Format:
        """The calibrated format ``fmt`` with the numbers for the keys or values of a layer.

        Args:
            fmt: a calibrated format without a basis.
            role: ``key`` or ``value``.
            module: qualified name of the module that calls attention.
            layer: its layer index, if it has one.

        Raises:
            PolicyError: the file has no transforms for this layer and role.
        """
        modules = list(dict.fromkeys(name.rsplit(".", 2)[0] for name in self.tensors))
        found = module_in(modules, module, layer)
        if found is None or f"{found}.{role}.mean" not in self.tensors:
            raise PolicyError(
                f"transforms: {cut(self.source, 80)} lacks the {role}s of {module or 'attention at top level'} "
                f"(it has: {one_line(', '.join(modules[:3]))}{', ...' if len(modules) > 3 else ''}); calibrate this "
                "model, or give the module another format in a rule"
            )
        return with_basis(fmt, self._reference(fmt, f"{found}.{role}"))

    def _reference(self, fmt: Format, place: str) -> str:
        """The reference to the basis of ``fmt`` for the keys or values at ``place``."""
        mean, to_stored, from_stored = (self.tensors[f"{place}.{part}"] for part in _PARTS)
        with without_modes():  # compilers call this within a fake mode
            if not fmt.has_matrices:
                return bases.register(bases.Basis(mean))
            stored = fmt.stored_dim(mean.shape[1])
            columns, rows = to_stored[:, :, :stored], from_stored[:, :stored]
            return bases.register(bases.Basis(mean, columns.contiguous(), rows.contiguous()))

    def check_model(self, model: nn.Module) -> None:
        """Raise PolicyError unless the transforms were measured on ``model``."""
        if digests.of_model(model) != self.origin.fingerprint:
            raise PolicyError(
                f"transforms: {self.source} was calibrated on another model ({self.origin.model}); calibrate this model"
            )


@functools.lru_cache(maxsize=16)
def _read(path: Path, modified: int, size: int) -> Transforms:
    """The transforms in a file. They are cached by its modification time in ns and its size."""
    try:
        with safe_open(path, framework="pt") as file:
            opened: Any = file
            header = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"transforms: {path} cannot be read: {one_line(error)}") from None
    if header.get("format") != FORMAT:
        raise PolicyError(
            f"transforms: {path} holds no transforms; `python -m kvcompile calibrate --output FILE.safetensors` writes "
            "them"
        )
    if header.get("version") != VERSION:
        raise PolicyError(
            f"transforms: {path} has version {one_line(header.get('version'))}, and this kvcompile reads {VERSION}; "
            "calibrate again"
        )
    try:
        damaged = header.get("digest") != digests.of_header(header)
        if damaged or digests.of_tensors(tensors) != json.loads(header["digests"]):
            raise PolicyError(f"transforms: {path} is damaged: its digests differ; calibrate again")
        origin = Origin.model_validate_json(header["origin"])
        _check_shapes(tensors)
    except PolicyError:
        raise
    except (KeyError, ValueError, RecursionError) as error:
        raise PolicyError(f"transforms: {path} is not valid: {one_line(error)}; calibrate again") from None
    return Transforms(str(path), origin, tensors)


def _check_shapes(tensors: Mapping[str, Tensor]) -> None:
    """Raise KeyError or ValueError unless each place has three tensors of matching shapes."""
    if not tensors:
        raise ValueError("it has no tensors")
    for name in tensors:
        place, _, part = name.rpartition(".")
        if part not in _PARTS or place.rpartition(".")[2] not in ("key", "value"):
            raise ValueError(f"the tensor {name} is unknown")
        basis = bases.Basis(*(tensors[f"{place}.{other}"] for other in _PARTS))
        if tensors[f"{place}.from_stored"].shape[1] != basis.head_dim:
            raise ValueError(f"the matrices of {place} are not square")
