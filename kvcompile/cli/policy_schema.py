"""The JSON schema of policy files, made from the policy's classes.

Pydantic gives the structure. Descriptions come from the ``Attributes:`` of the classes' docstrings, so each field is
described only where it is defined. Names of formats and presets become enumerations.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from pydantic import BaseModel

from kvcompile.policy import choice, policy, presets


def policy_schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12) of the files that ``Policy.from_file`` reads."""
    schema = policy.Policy.model_json_schema()
    parts = {"Policy": schema, **schema["$defs"]}
    for name, part in parts.items():
        _describe(part, getattr(policy, name))
        if "dtype" in part["properties"]:
            _allow(part["properties"], "dtype", {"enum": _dtypes(name)})
    layer_range = {"type": ["string", "integer"]}
    layers = {"anyOf": [layer_range, {"type": "array", "items": layer_range}]}
    _allow(parts["Match"]["properties"], "layers", layers)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _dtypes(name: str) -> list[str]:
    """The valid values of ``dtype`` in the class called ``name``.

    ``auto`` leaves a whole cache unpacked and is not valid for keys or values alone.
    """
    dtypes = [*presets.known_names(), *presets.element_dtypes()]
    return [dtype for dtype in dtypes if name != choice.RoleFormat.__name__ or dtype != presets.AUTO]


def _describe(part: dict[str, Any], policy_class: type[BaseModel]) -> None:
    """Put the docstrings of a class into its part of the schema."""
    part["description"] = _plain((inspect.getdoc(policy_class) or "").split("\n\n")[0])
    described = field_descriptions(policy_class)
    for name, field in part["properties"].items():
        field.pop("title", None)
        if name in described:
            field.setdefault("description", described[name])


def field_descriptions(policy_class: type[BaseModel]) -> dict[str, str]:
    """The ``Attributes:`` in the docstrings of a class and of its base classes, by field."""
    descriptions: dict[str, str] = {}
    for base in reversed(policy_class.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        _, _, attributes = text.partition("\nAttributes:\n")
        for match in re.finditer(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
            for name in match[1].split(", "):
                descriptions[name] = _plain(match[2])
    return descriptions


def _plain(text: str) -> str:
    """A docstring's text as a sentence, without markup and line breaks."""
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text).replace("``", "`")
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def _allow(properties: dict[str, Any], name: str, values: dict[str, Any]) -> None:
    """Set the valid values of a field, in place of pydantic's own description."""
    field = properties[name]
    optional = any(option.get("type") == "null" for option in field.pop("anyOf", ()))
    field.pop("type", None)
    field.update({"anyOf": [values, {"type": "null"}]} if optional else values)
