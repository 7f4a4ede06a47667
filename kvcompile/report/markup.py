"""Safe HTML and SVG: text and attributes are always escaped, and only elements are markup."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is already HTML. Only :func:`element`, :func:`join` and a page's own script and style make it."""

    __slots__ = ()


def join(parts: Iterable[str]) -> Markup:
    """The concatenated parts; plain text is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


_VOID = frozenset(("meta", "input", "wbr"))


def element(name: str, /, *children: str, **attributes: str | int | float | bool | None) -> Markup:
    """``<name attribute="...">children</name>``.

    Args:
        name: the name of the element.
        children: markup is inserted unchanged, other text is escaped.
        attributes: ``class_`` and ``for_`` lose their underscore, other underscores become hyphens. True gives a bare
            attribute; None and False give no attribute.
    """
    given = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            given.append(f" {key}")
        elif value is not None and value is not False:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            given.append(f' {key}="{html.escape(text)}"')
    start = f"<{name}{''.join(given)}>"
    return Markup(start if name in _VOID else f"{start}{join(children)}</{name}>")
