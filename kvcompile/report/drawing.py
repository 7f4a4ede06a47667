"""Draw the surroundings of an attention site as SVG; colours come from the page's style sheet."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from kvcompile.passes.notes.surroundings import Box, Surroundings
from kvcompile.report.layout import Cell, lay_out
from kvcompile.report.markup import Markup, element

_MARGIN = 4.0
_PADDING = 10.0
_LINE = 16.0
_CHARACTER = 6.9
"""Width of a character of the style sheet's monospaced 11.5 px; labels are bold."""

_MAX_CHARACTERS = 36
_MAX_LINES = 5
"""The maximum number of lines for a text in a box. Texts with spaces, such as calls, are broken."""


def draw(surroundings: Surroundings) -> tuple[Markup, float, float]:
    """The drawing for an ``svg`` or ``symbol`` element, its width and its height."""
    boxes = surroundings.boxes
    layout = lay_out([_size(box) for box in boxes], surroundings.edges)
    edges = (element("path", d=_curve(path), class_="edge", marker_end="url(#arrow)") for path in layout.edges)
    drawn = (_draw_box(box, cell) for box, cell in zip(boxes, layout.boxes, strict=True))
    moved = element("g", *edges, *drawn, transform=f"translate({_MARGIN:g} {_MARGIN:g})")
    return moved, layout.width + 2 * _MARGIN, layout.height + 2 * _MARGIN


def describe(surroundings: Surroundings) -> str:
    """The drawing in words, for screen readers."""
    sentences = []
    for place, box in enumerate(surroundings.boxes):
        used = [surroundings.boxes[source].label for source, target in surroundings.edges if target == place]
        what = f"{box.label} ({'; '.join(box.detail)})" if box.detail else box.label
        sentences.append(f"{what} uses {', '.join(used)}." if used else f"{what}.")
    return " ".join(sentences)


def _lines(box: Box) -> list[str]:
    return [*_broken(box.label), *(line for text in box.detail for line in _broken(text))]


def _broken(text: str) -> list[str]:
    lines = textwrap.wrap(text, _MAX_CHARACTERS, break_long_words=False, break_on_hyphens=False) or [text]
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 1], f"{lines[_MAX_LINES - 1]} …"]
    return [_shortened(line) for line in lines]


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


def _size(box: Box) -> tuple[float, float]:
    lines = _lines(box)
    return max(map(len, lines)) * _CHARACTER + 2 * _PADDING, len(lines) * _LINE + _PADDING


def _draw_box(box: Box, cell: Cell) -> Markup:
    num_labels = len(_broken(box.label))
    middle, top = cell.width / 2, _PADDING / 2 + _LINE * 0.75
    texts = [
        element("text", line, x=middle, y=top + _LINE * number, class_="label" if number < num_labels else None)
        for number, line in enumerate(_lines(box))
    ]
    whole = element("title", "\n".join((box.label, *box.detail)))
    frame = element("rect", width=cell.width, height=cell.height, rx=6)
    return element("g", whole, frame, *texts, class_=f"box {box.kind}", transform=f"translate({cell.x:g} {cell.y:g})")


def _curve(path: Sequence[Cell]) -> str:
    """From the right side of the first cell to the left side of the last, straight through the columns between."""
    source, target = path[0], path[-1]
    x, y = source.x + source.width, source.middle
    commands = [f"M{x:.1f} {y:.1f}"]
    for cell in path[1:]:
        end = cell.x - 1 if cell is target else cell.x
        bend = max(abs(end - x) / 2, 18.0)
        commands.append(f"C{x + bend:.1f} {y:.1f} {end - bend:.1f} {cell.middle:.1f} {end:.1f} {cell.middle:.1f}")
        x, y = cell.x + cell.width, cell.middle
        if cell is not target:
            commands.append(f"H{x:.1f}")
    return "".join(commands)


def arrow_head() -> Markup:
    """The arrow head, which all drawings share."""
    head = element("path", d="M0 0 8 4 0 8z", class_="arrow")
    return element(
        "marker", head, id="arrow", orient="auto", viewBox="0 0 8 8", refX=8, refY=4, markerWidth=7, markerHeight=7
    )
