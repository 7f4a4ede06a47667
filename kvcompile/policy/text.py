"""YAML and JSON without their traps: ``2:10`` is a string, and a duplicate key is an error."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from kvcompile.errors import PolicyError

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """The safe loader with decimal integers only: plain YAML reads ``layers: 2:10`` as 130 (base 60)."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, regexp) for tag, regexp in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(_INT, re.compile(r"-?(0|[1-9][0-9]*)$"), list("-0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """YAML as plain Python data.

    Raises:
        PolicyError: ``text`` is not valid YAML, or has a duplicate key; the message names source, line and column.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise PolicyError(f"{source}{place}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise PolicyError(f"{source}: {' '.join(str(error).split())}") from None


def parse_json(text: str, source: str) -> Any:
    """JSON as plain Python data; errors as in :func:`parse_yaml`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        for name in data:
            if [key for key, _ in pairs].count(name) > 1:
                raise PolicyError(f"{source}: {name!r} is given twice")
        return data

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise PolicyError(f"{source}, line {error.lineno}, column {error.colno}: {error.msg}") from None
