"""A model's ``config.json``: the file, the part that describes the language model, and the fields of that part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcompile.errors import cut, shown
from kvcompile.files.reading import MAX_CONFIG, read_text_file
from kvcompile.planning.errors import PlanError
from kvcompile.planning.families import FAMILIES, Family

_LANGUAGE_PARTS = ("text_config", "thinker_config", "llm_config", "language_config")
"""Fields of multimodal configs that hold the language model; ``thinker_config`` holds another ``text_config``."""

MAX_INTEGER = 1 << 31
"""The largest integer in a config."""

MAX_NAME = 100
"""The maximum length of a model type, in characters."""

MAX_LAYERS = 1000
"""The maximum number of layers in a config."""

WHOLE_CONFIG = (
    "write the whole config with transformers: AutoConfig.from_pretrained(MODEL).to_json_file('config.json', False)"
)


@dataclass(frozen=True)
class Fields:
    """The fields of a language model's config. A field that is null counts as missing.

    Attributes:
        values: the fields.
        source: the file, for errors.
        part: the path of ``values`` in the file, e.g. ``text_config.``; empty at the top level.
        outer: the fields at the top level; the same object as ``values`` if that is the top level.
        defaults: the values of the model's class for fields that published configs omit.
    """

    values: Mapping[str, Any]
    source: str
    part: str = ""
    outer: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nested(self) -> bool:
        """Whether the language model is a part of a larger model."""
        return bool(self.part)

    @property
    def model_type(self) -> str:
        return str(self.get("model_type") or "")

    def get(self, *names: str) -> Any:
        """The value of the first given field of these names; None if all are missing."""
        for values in (self.values, self.defaults):
            for name in names:
                if values.get(name) is not None:
                    return values[name]
        return None

    def integer(self, *names: str, least: int = 1, most: int = MAX_INTEGER) -> int | None:
        """The first given field of these names, an integer from ``least`` to ``most``; None if all are missing.

        Raises:
            PlanError: the field is not such an integer.
        """
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            name = next(name for name in names if self.get(name) is not None)
            wanted = f"at most {most}" if isinstance(value, int) and value > most else f"an integer from {least}"
            raise self.error(name, f"expected {wanted}, got {shown(value)}")
        return value

    def require(self, *names: str, most: int = MAX_INTEGER) -> int:
        """As :meth:`integer`, but raises PlanError if all fields are missing."""
        value = self.integer(*names, most=most)
        if value is None:
            raise self.missing(*names)
        return value

    def error(self, name: str, text: str) -> PlanError:
        """An error about the field ``name``."""
        return PlanError(f"{self.source}: {self.part}{name}: {text}")

    def missing(self, *names: str) -> PlanError:
        """An error about a missing field; ``names`` are its possible names, the usual name first."""
        others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        model = f" of model_type {shown(self.model_type)}" if self.model_type else ""
        return PlanError(f"{self.source}: the config{model} has no field {self.part}{names[0]}{others}; {WHOLE_CONFIG}")


def read_config(path: Path) -> Fields:
    """The fields of the language model in ``path``, a ``config.json`` or a directory that holds one.

    Raises:
        PlanError: there is no such file, or it does not hold a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(read_text_file(file, MAX_CONFIG))
    except FileNotFoundError:
        raise PlanError(f"{file}: no such file; give a model's config.json or the directory that holds it") from None
    except json.JSONDecodeError as error:
        raise PlanError(f"{file}: line {error.lineno} is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise PlanError(f"{file}: too many levels are nested") from None
    except (OSError, ValueError) as error:  # ValueError: invalid path, not UTF-8, or a number of thousands of digits
        raise PlanError(f"{cut(str(file))}: cannot be read: {cut(str(error))}") from None
    if not isinstance(values, dict):
        raise PlanError(f"{file}: expected a JSON object with the fields of a config, got {type(values).__name__}")
    return _language_part(values, str(file))


def _language_part(values: Mapping[str, Any], source: str) -> Fields:
    outer, part = values, ""
    while True:
        name = next((name for name in _LANGUAGE_PARTS if isinstance(values.get(name), dict)), None)
        if name is None:
            family = FAMILIES.get(str(values.get("model_type")), Family())
            fields = Fields(values, source, part, outer, family.defaults)
            if not isinstance(values.get("model_type", ""), str | None) or len(fields.model_type) > MAX_NAME:
                raise fields.error("model_type", f"expected a name, got {shown(values['model_type'])}")
            return fields
        values, part = values[name], f"{part}{name}."
