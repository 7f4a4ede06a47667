"""Strict parsing of YAML and JSON: ``2:10`` is a string, a duplicate key is an error, and the size is bounded.

An alias in YAML counts as many values as it stands for. Otherwise a few lines with aliases of aliases could stand for
billions of values.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from kvcompile.errors import PolicyError, cut, shown

MAX_NODES = 10_000
"""The maximum number of values in a text; a rule has about five."""

MAX_DEPTH = 40
"""The maximum depth of nesting in a text."""

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """The safe loader with decimal integers only: plain YAML reads ``layers: 2:10`` as 130 (base 60)."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, regexp) for tag, regexp in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth, self._num_nodes = 0, 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark, is_alias, before = self.peek_event().start_mark, self.check_event(yaml.AliasEvent), self._num_nodes
        self._depth += 1
        if getattr(self.peek_event(), "tag", None) is not None:
            raise yaml.MarkedYAMLError(
                problem="a tag such as !!int is not read; write the value alone", problem_mark=mark
            )
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels are nested", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and node not in self._sizes:
            raise yaml.MarkedYAMLError(problem="an alias stands for a part that contains it", problem_mark=mark)
        self._num_nodes += self._sizes[node] if is_alias else 1
        self._sizes.setdefault(node, self._num_nodes - before)
        if self._num_nodes > MAX_NODES:
            raise yaml.MarkedYAMLError(problem=f"there are more than {MAX_NODES} values", problem_mark=mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{shown(key.value)} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(_INT, re.compile(r"-?(0|[1-9][0-9]*)$"), list("-0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """YAML as plain Python data.

    Raises:
        PolicyError: ``text`` is not valid YAML, has a duplicate key or too many values; the message names source, line
            and column.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise PolicyError(f"{source}{place}: {cut(str(error.problem))}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number or a date that Python does not accept
        raise PolicyError(f"{source}: {cut(' '.join(str(error).split()))}") from None


def parse_json(text: str, source: str) -> Any:
    """JSON as plain Python data; errors as in :func:`parse_yaml`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, value in pairs:
            if name in data:
                raise PolicyError(f"{source}: {shown(name)} is given twice")
            data[name] = value
        return data

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise PolicyError(f"{source}, line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise PolicyError(f"{source}: too many levels are nested") from None
    except ValueError as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"{source}: {cut(str(error))}") from None
