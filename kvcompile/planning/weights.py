"""The bytes of a model's weights: in memory, and read by one decode step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from kvcompile.errors import did_you_mean
from kvcompile.planning.config_file import Fields
from kvcompile.planning.errors import PlanError
from kvcompile.planning.model_caches import ModelCaches
from kvcompile.planning.parameters import ParameterCount, Role, count_parameters
from kvcompile.planning.storage import DTYPE_BYTES, of_dtype
from kvcompile.planning.units import SIZE_FORMS, parse_size

ROLES: tuple[Role, ...] = ("linear", "experts", "embedding", "other")


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights.

    Attributes:
        bits: bits of a packed parameter, including its share of a scale and a zero point.
        meaning: a description for the plan.
        packed: the parameters that are packed; all other parameters keep the model's dtype.
    """

    bits: Fraction
    meaning: str
    packed: tuple[Role, ...] = ("linear", "experts")


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    **{
        name: WeightFormat(Fraction(8 * nbytes), f"{8 * nbytes} bits for every parameter", ROLES)
        for name, nbytes in DTYPE_BYTES.items()
    },
    "fp8": WeightFormat(Fraction(8), "8 bits in linear layers, scales not counted"),
    "int8": WeightFormat(Fraction(8), "8 bits in linear layers, scales not counted"),
    "int4": WeightFormat(
        4 + Fraction(16 + 4, 128), "4 bits in linear layers, a 16-bit scale and a 4-bit zero point per group of 128"
    ),
    "mxfp4": WeightFormat(4 + Fraction(8, 32), "4 bits in linear layers, an 8-bit scale per group of 32"),
    "nvfp4": WeightFormat(4 + Fraction(8, 16), "4 bits in linear layers, an 8-bit scale per group of 16"),
}
"""The formats that ``--weights`` accepts. ``int4`` has the size of AWQ and GPTQ checkpoints with groups of 128."""


@dataclass(frozen=True)
class Weights:
    """The weights of a model.

    Attributes:
        name: a key of :data:`WEIGHT_FORMATS`, or the size as given.
        meaning: a description for the plan.
        nbytes: bytes in memory.
        parameters: the counted parameters; None if the size was given.
        bytes_of_role: ``nbytes`` by role; empty if the size was given.
    """

    name: str
    meaning: str
    nbytes: int
    parameters: ParameterCount | None = None
    bytes_of_role: Mapping[Role, Fraction] = field(default_factory=dict)

    def bytes_read(self, num_tokens: int) -> int:
        """Bytes of weights that a decode step over ``num_tokens`` tokens reads.

        A step reads neither embeddings (it looks up a row per token) nor experts without tokens. If only the size of
        the weights was given, all bytes count.
        """
        if self.parameters is None:
            return self.nbytes
        share = {"embedding": Fraction(0), "experts": self.parameters.experts_read(num_tokens)}
        return round(sum(nbytes * share.get(role, Fraction(1)) for role, nbytes in self.bytes_of_role.items()))


def read_weights(text: str | None, fields: Fields, caches: ModelCaches) -> Weights:
    """The weights of a model.

    Args:
        text: a key of :data:`WEIGHT_FORMATS`, a size, or None for the model's dtype.
        fields: the model's config.
        caches: the caches of the same model.

    Raises:
        PlanError: ``text`` is not valid, or the parameters cannot be counted.
    """
    if text is None:
        if fields.get("quantization_config") or fields.outer.get("quantization_config"):
            raise fields.error("quantization_config", "give the format or the size of these weights with --weights")
        text = of_dtype(caches.dtype).name
    if text in WEIGHT_FORMATS:
        return _counted(text, count_parameters(fields, caches), DTYPE_BYTES[of_dtype(caches.dtype).name])
    if text[:1].isdigit():
        return Weights(text, "as given", parse_size(text, "--weights"))
    hint = did_you_mean(text, WEIGHT_FORMATS)
    known = ", ".join(WEIGHT_FORMATS)
    raise PlanError(f"--weights: {text!r} is not a known format{hint} (write one of {known}, or {SIZE_FORMS})")


def _counted(name: str, parameters: ParameterCount, kept_bytes: int) -> Weights:
    weight_format = WEIGHT_FORMATS[name]
    packed_bytes = weight_format.bits / 8
    bytes_of_role = {
        role: parameters.count(role) * (packed_bytes if role in weight_format.packed else Fraction(kept_bytes))
        for role in ROLES
    }
    return Weights(name, weight_format.meaning, round(sum(bytes_of_role.values())), parameters, bytes_of_role)
