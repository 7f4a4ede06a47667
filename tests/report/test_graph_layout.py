"""Drawings are readable: boxes do not overlap, edges point to the right, and all text is escaped."""

from __future__ import annotations

import itertools
from random import Random
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.passes.notes.surroundings import Box, Surroundings
from kvcompile.report.drawing import describe, draw
from kvcompile.report.layout import GAP_X, GAP_Y, lay_out
from kvcompile.report.markup import Markup, element, join

SIZES = st.tuples(st.floats(20, 300), st.floats(20, 60))


@st.composite
def graphs(draw_from: st.DrawFn) -> tuple[list[tuple[float, float]], list[tuple[int, int]]]:
    sizes = draw_from(st.lists(SIZES, min_size=1, max_size=14))
    ends = st.integers(0, len(sizes) - 1)
    pairs = draw_from(st.lists(st.tuples(ends, ends), max_size=25, unique=True))
    return sizes, [pair for pair in pairs if pair[0] != pair[1]]


@settings(deadline=None, max_examples=150)
@given(graphs())
def test_boxes_lie_apart_and_edges_that_follow_the_order_lead_right(
    graph: tuple[list[tuple[float, float]], list[tuple[int, int]]],
) -> None:
    sizes, edges = graph
    layout = lay_out(sizes, edges)
    tolerance = 1e-6
    for one, other in itertools.combinations(layout.boxes, 2):
        beside = max(one.x, other.x) - min(one.x + one.width, other.x + other.width) >= GAP_X - tolerance
        under = max(one.y, other.y) - min(one.y + one.height, other.y + other.height) >= GAP_Y - tolerance
        assert beside or under
    for box, (width, height) in zip(layout.boxes, sizes, strict=True):
        assert (box.width, box.height) == (width, height)
        assert -tolerance <= box.x <= layout.width - width + tolerance
        assert -tolerance <= box.y <= layout.height - height + tolerance
    for (source, target), path in zip(edges, layout.edges, strict=True):
        assert (path[0].box, path[-1].box) == (source, target)
        if source < target:
            assert all(one.x + one.width < other.x for one, other in itertools.pairwise(path))


@settings(deadline=None, max_examples=50)
@given(graphs(), st.randoms())
def test_all_edges_of_a_graph_without_cycles_lead_right_whatever_the_order_of_the_boxes(
    graph: tuple[list[tuple[float, float]], list[tuple[int, int]]], random: Random
) -> None:
    """The first node of attention, such as a conversion of its mask, may come before the reads of its cache."""
    sizes, edges = graph
    order = list(range(len(sizes)))
    random.shuffle(order)
    edges = [(order[min(edge)], order[max(edge)]) for edge in edges]
    for path in lay_out(sizes, edges).edges:
        assert all(one.x + one.width < other.x for one, other in itertools.pairwise(path))


@settings(deadline=None, max_examples=50)
@given(graphs())
def test_edges_do_not_run_through_boxes_of_columns_they_pass(
    graph: tuple[list[tuple[float, float]], list[tuple[int, int]]],
) -> None:
    layout = lay_out(*graph)
    for path in layout.edges:
        for passed in path[1:-1]:
            for box in layout.boxes:
                same_column = passed.x <= box.x and box.x + box.width <= passed.x + passed.width
                assert not same_column or not box.y < passed.middle < box.y + box.height


def test_a_row_of_boxes_is_drawn_straight() -> None:
    layout = lay_out([(50, 20)] * 4, [(0, 1), (1, 2), (2, 3)])
    assert len({box.middle for box in layout.boxes}) == 1


def test_a_box_without_inputs_stands_right_before_its_first_user() -> None:
    for edges in ([(0, 1), (1, 2), (3, 2)], [(0, 1), (1, 3), (2, 3)]):
        layout = lay_out([(50, 20)] * 4, edges)
        assert layout.boxes[5 - edges[1][1]].x == layout.boxes[1].x


def test_a_drawing_is_well_formed_whatever_the_names() -> None:
    boxes = (Box("<script>", ("a & b", 'x"y' * 30), "cache"), Box("]]>", (), "output"))
    drawing, width, height = draw(Surroundings(boxes, ((0, 1),)))
    root = ElementTree.fromstring(str(drawing))
    assert [text.text for text in root.iter("text")] == ["<script>", "a & b", 'x"y' * 11 + 'x"…', "]]>"]
    assert next(title.text for title in root.iter("title")) == f"<script>\na & b\n{boxes[0].detail[1]}"
    assert width > 0
    assert height > 0


def test_a_drawing_in_words_says_what_uses_what() -> None:
    boxes = (Box("key cache", ("uint8 [4]",), "cache"), Box("attention", (), "attention"))
    assert describe(Surroundings(boxes, ((0, 1),))) == "key cache (uint8 [4]). attention uses key cache."


def test_text_and_attributes_are_escaped_and_markup_is_not() -> None:
    inner = element("b", "<i>", title='"&')
    assert inner == '<b title="&quot;&amp;">&lt;i&gt;</b>'
    assert element("p", inner, "&", hidden=True, id=None, data_x=1.5, class_="c") == (
        f'<p hidden data-x="1.5" class="c">{inner}&amp;</p>'
    )
    assert isinstance(join(["<", inner]), Markup)
