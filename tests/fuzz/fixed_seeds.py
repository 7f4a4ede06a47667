"""The programs that every run of the tests checks: the same programs each time, in groups of one kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis.strategies import SearchStrategy

from fuzz.draw import programs
from fuzz.drive_text import ALIASED, MEMORY
from fuzz.program import (
    EXTENDED,
    GROWING,
    OF_FIXED_SIZE,
    PAGES,
    POOLS,
    READ_ONLY,
    RETURNED,
    SHIFTING,
    SLOTS,
    STATIC,
    WINDOW,
    Attention,
    Layer,
    Program,
    Sizes,
    Step,
    Write,
)
from fuzz.step_text import MASKS, SCORES
from fuzz.twists import TWISTS
from fuzz.write_text import FORMS

SHARE_REWRITTEN = 0.8
"""The share of programs without a twist that must be packed, because the fuzzer tests nothing in a plain program."""


@dataclass(frozen=True)
class Group:
    """Programs of one kind.

    Attributes:
        name: a word for the test.
        strategy: draws them.
        count: how many are drawn.
        is_safe: whether they have no twist.
    """

    name: str
    strategy: SearchStrategy[Program]
    count: int
    is_safe: bool = True


GROUPS = (
    Group("static", programs((*OF_FIXED_SIZE, READ_ONLY), twisted=False), 18),
    Group("windows", programs((SHIFTING, *EXTENDED), twisted=False), 12),
    Group("pools", programs(POOLS, twisted=False), 8),
    Group("twisted", programs((*OF_FIXED_SIZE, READ_ONLY), twisted=True), 22, is_safe=False),
    Group("twisted_others", programs((SHIFTING, *EXTENDED, *POOLS), twisted=True), 12, is_safe=False),
    Group("lossy", programs((STATIC, *EXTENDED), twisted=False, lossy=True), 10),
)

SEED = 1

_WRITES = (
    "index_copy_",
    "slice",
    "per_sequence",
    "scatter_",
    "where",
    "sequence_by_sequence",
    "narrow_from_data",
    "select",
)

_SPECIAL = (
    *((STATIC, axes, "index_copy_") for axes in ("btm", "tbm", "bhdt", "hbdt")),
    *((GROWING, axes, "cat") for axes in ("btm", "bhdt")),
    (SHIFTING, "btm", "shift"),
    (READ_ONLY, "bhtd", "none"),
)
"""Kinds, orders of dimensions and writes that the other corner programs do not have."""


def corner_programs() -> list[Program]:
    """Small programs that are drawn rarely: each twist, each form of memory, and each way to write and to attend."""
    write = Write("index_copy_")
    layer = Layer(STATIC, "bthd", write, write, False, Attention())
    sizes, steps = Sizes(2, 2, 2, 9, 16), (Step(1), Step(1))
    first = Program(sizes, (layer,), steps)
    programs = [replace(first, layers=(replace(layer, twist=twist),)) for twist in TWISTS]
    programs += [replace(first, memory=memory) for memory in (*MEMORY, *ALIASED) if memory != "own"]
    for form in _WRITES:
        other = Write(form, "ring" if form in ("per_sequence", "scatter_") else "given")
        programs += [replace(first, layers=(replace(layer, axes="bhtd", key=other, value=other),))]
    negative = Write("assignment", "negative", values="one_head")
    programs += [replace(first, layers=(replace(layer, key=negative),))]
    attentions = [Attention(repeat=repeat) for repeat in ("expand", "interleave", "tile")]
    attentions += [Attention(mask=mask, scale=0.3) for mask in MASKS]
    attentions += [
        Attention(form="written", repeat="interleave", mask=mask, scale=0.3) for mask in MASKS if mask != "causal"
    ]
    attentions += [Attention(form="written", repeat="tile", scores=scores, softcap=True) for scores in SCORES]
    programs += [replace(first, layers=(replace(layer, attention=attention),)) for attention in attentions]
    moving = ((kind, "bhtd") for kind in (SHIFTING, *RETURNED))
    by_kind = (*moving, (SLOTS, "thd"), (PAGES, "pthd"), (PAGES, "phtd"))
    for kind, axes, form in (*((*each, form) for each in by_kind for form in FORMS[each[0]]), *_SPECIAL):
        other = replace(layer, kind=kind, axes=axes, key=Write(form), value=Write(form))
        programs += [replace(first, layers=(other,))]
    growing = replace(layer, kind=GROWING, axes="bhtd", key=Write("cat"), value=Write("cat"))
    window = replace(growing, kind=WINDOW, key=Write("read_the_last"), value=Write("read_the_last"))
    programs += [
        replace(first, layers=(growing, window)),
        replace(first, layers=(layer, layer), operators=False),
        replace(first, stack="first"),
        replace(first, stack="unbind"),
        replace(first, stack="ranges"),
    ]
    # Half of them begin with packed caches, so that one graph is compiled instead of two.
    return [replace(each, starts_packed=number % 2 == 0) for number, each in enumerate(programs)]
