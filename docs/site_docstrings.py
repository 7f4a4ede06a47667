"""An extension of griffe, which reads docstrings for the API page: reStructuredText becomes Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([^`]+)`")
SESSION = re.compile(r"^(?:>>>|\.\.\.).*(?:\n(?:>>>|\.\.\.).*)*$", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """A docstring with roles and interpreter sessions in Markdown."""
    text = ROLE.sub(r"`\1`", docstring)
    return SESSION.sub(lambda session: f"```pycon\n{session[0]}\n```", re.sub(r"::$", ":", text, flags=re.MULTILINE))


class Docstrings(griffe.Extension):
    """Rewrites every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object with a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
