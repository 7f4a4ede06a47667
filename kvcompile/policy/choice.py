"""A policy's choice for one cache: the formats of its keys and values, by name or by their properties."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvcompile.errors import PolicyError, shown
from kvcompile.files.reading import expanded
from kvcompile.kernels.formats import get_format, with_rotation_seed, with_static_scale
from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.site import FormatPair
from kvcompile.policy import presets
from kvcompile.policy.static_scales import StaticScales
from kvcompile.policy.transforms import Transforms

Granularity = Literal["per_token_head", "per_channel", "per_group", "per_tensor"]


class Strict(BaseModel):
    """An immutable model that rejects unknown fields."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)


class _Elements(Strict):
    """The format of vectors.

    Attributes:
        granularity: the elements that share a scale: a vector (``per_token_head``), a channel of 64 tokens
            (``per_channel``, for keys), ``group_size`` channels of a vector (``per_group``), or all keys or all values
            of a layer (``per_tensor``, for 8-bit floats with known ``scales``).
        group_size: channels of a group: 32, 64 or 128. With ``per_channel`` the only valid size is 64.
        scales: the source of the scales of ``per_tensor``: a file that ``python -m kvcompile calibrate`` wrote; a
            checkpoint (a safetensors file, or a folder of them) with tensors ``k_scale`` and ``v_scale``; or a number.
            A number is the scale of all layers, 1 for plain 8-bit floats. In a policy file, paths are relative to its
            folder.
        transforms: the file with the numbers of calibrated formats (``transform_*``, ``*_mean``), which ``python -m
            kvcompile calibrate`` wrote. In a policy file, the path is relative to its folder.
        rotation_seed: the seed of random signs before the Hadamard matrix of a rotated format, from 1 to 999999999.
            Caches with different seeds have independent errors.
    """

    dtype: str | None = None
    granularity: Granularity | None = None
    group_size: int | None = None
    scales: Annotated[float, Field(strict=True)] | str | None = None
    rotation_seed: Annotated[int, Field(ge=1, le=999_999_999, strict=True)] | None = None
    transforms: str | None = None
    _scales_of_layers: StaticScales | None = PrivateAttr(None)
    _transforms_of_layers: Transforms | None = PrivateAttr(None)

    @field_validator("scales", mode="before")
    @classmethod
    def _number_or_text(cls, scales: Any) -> Any:
        if not isinstance(scales, float | str | None) and (type(scales) is not int or scales.bit_length() > 100):
            raise PolicyError(f"expected a number, or the path of a calibration or checkpoint, got {shown(scales)}")
        return scales

    @field_validator("scales")
    @classmethod
    def _number_or_absolute_path(cls, scales: float | str | None, info: ValidationInfo) -> float | str | None:
        if not isinstance(scales, str):
            return scales
        with contextlib.suppress(ValueError):
            if "_" not in scales:  # which float() accepts between digits
                return float(scales.encode("ascii"))  # parse_yaml leaves fractions as strings
        return _absolute(scales, info)

    @field_validator("transforms")
    @classmethod
    def _absolute_path(cls, transforms: str | None, info: ValidationInfo) -> str | None:
        return None if transforms is None else _absolute(transforms, info)

    @model_validator(mode="after")
    def _elements_fit(self) -> Self:
        if self.granularity is None and self.group_size is not None:
            raise PolicyError("group_size needs a granularity: per_group, or per_channel")
        if (self.granularity == presets.PER_TENSOR) != (self.scales is not None):
            raise PolicyError(
                "granularity: per_tensor and scales go together: give both, or neither; "
                "scales is a calibration, a checkpoint or a number"
            )
        if self.dtype is None and (self.granularity is not None or self.rotation_seed is not None):
            raise PolicyError("granularity, scales and rotation_seed need a dtype; give dtype")
        if isinstance(self.scales, str):
            self._scales_of_layers = StaticScales.read(Path(self.scales))
        if self.transforms is not None:
            self._transforms_of_layers = Transforms.read(Path(self.transforms))
        return self

    @property
    def transforms_of_layers(self) -> Transforms | None:
        """The content of the file ``transforms``."""
        return self._transforms_of_layers

    def format_name(
        self, role: Role, module: str = "", layer: int | None = None, transforms: Transforms | None = None
    ) -> str:
        """The format of the keys or values of a layer; PolicyError if there is no such format.

        Args:
            role: ``key`` or ``value``.
            module: qualified name of the module that calls attention.
            layer: its layer index, if it has one.
            transforms: the transforms of a calibrated format, if this object names none. Without transforms, the result
                has sizes only.
        """
        fmt = self.format_of_all_layers(role)
        known = self._transforms_of_layers or transforms
        if fmt.is_calibrated and known is not None:
            fmt = known.calibrated(fmt, role, module, layer)
        if self._scales_of_layers is not None:
            fmt = self._scales_of_layers.scaled(fmt, role, module, layer)
        return fmt.name

    def format_of_all_layers(self, role: Role) -> Format:
        """The format without the static scales of single layers; PolicyError if there is no such format."""
        assert self.dtype is not None
        if self.granularity is not None:
            fmt = get_format(presets.described(self.dtype, self.granularity, self.group_size))
        else:
            formats = presets.resolve(self.dtype)
            if formats is None:
                raise PolicyError(
                    "dtype: auto is for whole caches; give the rule `dtype: auto` and neither key nor value"
                )
            fmt = get_format(formats.format_name(role))
        try:
            if isinstance(self.scales, float):
                fmt = with_static_scale(fmt, self.scales)
            return fmt if self.rotation_seed is None else with_rotation_seed(fmt, self.rotation_seed)
        except ValueError as error:
            raise PolicyError(str(error)) from None


def _absolute(path: str, info: ValidationInfo) -> str:
    """A path in a policy as an absolute path. In a policy file, paths are relative to its folder."""
    return str(Path((info.context or {}).get("folder", ".")).absolute() / expanded(Path(path)))


class RoleFormat(_Elements):
    """The format of the keys, or of the values, of a cache.

    Attributes:
        dtype: a format or a preset. A preset means its format of keys or of values, without its tokens in full
            precision. With ``granularity``, the type of the elements: ``int8``, ``int4``, ``int2``, ``fp8_e4m3``,
            ``turboquant_4bit``, ...
    """

    dtype: str

    @model_validator(mode="after")
    def _exists(self) -> RoleFormat:
        self.format_of_all_layers("key")
        return self


class Choice(_Elements):
    """The formats of a cache: ``dtype`` for keys and values; ``key`` and ``value`` take precedence over it.

    Attributes:
        dtype: a preset or a format for keys and values, or ``auto`` to leave the cache unpacked. With ``granularity``,
            the type of the elements of both. A preset may also keep tokens in full precision.
        key: the format of keys, in place of ``dtype``.
        value: the format of values, in place of ``dtype``.
    """

    key: RoleFormat | None = None
    value: RoleFormat | None = None

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str | None) -> str | None:
        if dtype is not None and dtype not in presets.element_dtypes():
            presets.resolve(dtype)
        return dtype

    @model_validator(mode="after")
    def _complete(self) -> Choice:
        missing = [name for name in ("key", "value") if getattr(self, name) is None]
        if missing and self.dtype is None:
            raise PolicyError(f"no format for the {' and the '.join(missing)}; give dtype, or key and value")
        if self.dtype == presets.AUTO and len(missing) < 2:
            raise PolicyError("dtype: auto leaves the whole cache unpacked; drop it, or drop key and value")
        if self._is_auto:
            if self.transforms is not None:
                raise PolicyError("dtype: auto leaves the whole cache unpacked; drop transforms")
            return self
        key, value = (element.format_of_all_layers(role) for role, element in self._elements)
        if self.transforms is not None and not (key.is_calibrated or value.is_calibrated):
            raise PolicyError(
                f"neither {key.name} nor {value.name} uses transforms; drop transforms, or give a calibrated format"
            )
        if value.granularity == "channel":
            raise PolicyError(
                f"values cannot have scales per channel ({value.name}), only keys can; give values scales per token, "
                f"e.g. value: {{dtype: int4_unrotated}}"
            )
        return self

    @property
    def _is_auto(self) -> bool:
        return self.dtype == presets.AUTO and self.granularity is None and self.rotation_seed is None

    @property
    def without_transforms(self) -> str | None:
        """The first calibrated format for which no file of transforms is named; None if there is none."""
        if self._is_auto:
            return None
        for role, element in self._elements:
            fmt = element.format_of_all_layers(role)
            if fmt.is_calibrated and not fmt.basis and self.transforms is None and element.transforms is None:
                return fmt.name
        return None

    @property
    def _elements(self) -> tuple[tuple[Role, _Elements], tuple[Role, _Elements]]:
        """What describes the keys and the values."""
        return ("key", self.key or self), ("value", self.value or self)

    def formats(self, module: str = "", layer: int | None = None) -> FormatPair | None:
        """The formats of keys and values of the attention in ``module``; None leaves the cache unpacked.

        Raises:
            PolicyError: the policy has static scales, but none for this module.
        """
        if self._is_auto:
            return None
        transforms = self._transforms_of_layers
        key, value = (element.format_name(role, module, layer, transforms) for role, element in self._elements)
        tokens = presets.exact_tokens(self.dtype) if self.granularity is None else (0, 0)
        return FormatPair(key, value, *tokens)
