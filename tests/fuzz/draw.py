"""Hypothesis strategies of programs. Simple choices come first, so that failing programs shrink to them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fuzz.drive_text import ALIASED, CHANGES_SIZE, KEEPS_SIZE, MEMORY, OF_ANY
from fuzz.masked_text import CHOSEN, PLACES, REORDERS, WAYS
from fuzz.program import (
    EXTENDED,
    FUNCTIONAL,
    KINDS,
    OF_FIXED_SIZE,
    PAGES,
    POOLS,
    READ_ONLY,
    SHIFTING,
    SLOTS,
    STATIC,
    WINDOW,
    WITH_POSITIONS,
    Attention,
    Layer,
    Program,
    Reorder,
    Sizes,
    Step,
    Write,
)
from fuzz.step_text import (
    MASKS,
    POSITIONS,
    READS,
    REPEATS,
    SCORES,
    SOFTMAXES,
    STACKS,
    VALUES,
)
from fuzz.twists import OF_POOLS, SCATTERED, TWISTS
from fuzz.write_text import BY_INDEX, BY_START, FORMS, FROM_DATA, ONE_TOKEN, SHIFTS

ORDERS = (
    *("bhtd", "bthd", "tbhd", "btm", "bhdt", "htd", "thd", "btd"),
    *("bdt", "hdt", "tbm", "thbd", "htbd", "hbtd", "hbdt"),
)
AXES = {
    STATIC: ORDERS,
    FUNCTIONAL: ORDERS,
    READ_ONLY: ORDERS,
    SHIFTING: ("bhtd", "bthd", "tbhd", "btm", "bhdt", "tbm"),
    SLOTS: ("thd",),
    PAGES: ("pthd", "phtd"),
}
STEP_TOKENS = ((1, 1), (1, 1), (2, 2), (2, 2), (1, 1, 1), (3, 1), (2, 1, 1), (0, 1), (1, 0), (5, 2))

NOT_THROUGH_VIEWS = (*SHIFTS, "where", "functional", "sequence_by_sequence")
"""Writes that are refused if they go through a view of the stored tensor; only programs with a twist have them."""

NOT_DIVIDED = ("scatter_", "scatter", "index_put_", "index_put")
"""Writes of a cache with merged heads that are refused: by an index for each channel, or through a transposed view."""

TOKENS_FIRST = ("index_put_", "index_put")
"""Writes whose indexed value has the tokens in its first dimension. They are refused in a transposed cache."""

QUANTIZED_TWICE = ("where", "functional", "cat_twice")
"""Writes that quantize the whole cache again, either in compiled code (two ``cat`` in a step) or in eager code (all
others)."""

LOSSY = ("int8_per_token_head", "int4", "fp8_e4m3", "turboquant_4bit_nc", "int4_per_token_head")


def usually(first: object, others: object) -> st.SearchStrategy:
    """``first`` in half of all cases, else one of ``others``."""
    return st.one_of(st.just(first), st.sampled_from(list(others)))


@st.composite
def writes(draw: st.DrawFn, kind: str, axes: str, tokens: tuple[int, ...], twisted: bool, lossy: bool) -> Write:
    forms = [form for form in FORMS[kind] if set(tokens) == {1} or form not in ONE_TOKEN]
    forms = [form for form in forms if not lossy or form not in QUANTIZED_TWICE]
    forms = [form for form in forms if 0 not in tokens or form not in FROM_DATA]
    forms = [form for form in forms if twisted or "m" not in axes or form not in NOT_DIVIDED]
    forms = [form for form in forms if twisted or axes[-1] != "t" or form not in TOKENS_FIRST]
    form = draw(st.sampled_from(forms))
    positions = draw(usually("given", POSITIONS)) if kind in OF_FIXED_SIZE and form not in BY_START else "given"
    if (positions == "negative" and form not in BY_INDEX) or (positions == "from_data" and 0 in tokens):
        positions = "given"
    values = draw(usually("plain", VALUES))
    if values == "wide" and form not in (*BY_START, "shift"):
        values = "plain"  # PyTorch casts in copies only
    through_view = draw(st.booleans()) and "m" not in axes and (twisted or form not in NOT_THROUGH_VIEWS)
    mask, way = "all", "new"
    if kind in OF_FIXED_SIZE and not lossy and draw(st.integers(0, 3)) == 3:
        mask, way = draw(st.sampled_from(list(CHOSEN))), draw(st.sampled_from(WAYS))
    return Write(form, positions, through_view, values, mask, way)


@st.composite
def reorders(draw: st.DrawFn, axes: str, lossy: bool) -> Reorder | None:
    """A reorder in a quarter of all layers whose caches have sequences.

    In eager code ``take_along_dim`` is a read, whose result is quantized again.
    """
    if "b" not in axes or draw(st.integers(0, 3)) < 3:
        return None
    place, form = (
        draw(st.sampled_from(PLACES)),
        draw(st.sampled_from([name for name in REORDERS if not lossy or name != "take_along_dim"])),
    )
    return Reorder(place, form, draw(st.sampled_from(("kv", "k", "v"))), draw(st.booleans()))


@st.composite
def attentions(draw: st.DrawFn, kind: str, axes: str, sizes: Sizes) -> Attention:
    form = draw(st.sampled_from(("sdpa", "sdpa", "sdpa", "written", "grouped")))
    repeats = [name for name in REPEATS if name != "gqa" or form == "sdpa"] if sizes.groups > 1 else ["gqa"]
    masks = [mask for mask in MASKS if mask != "causal" or form == "sdpa"]
    if form != "sdpa" and sizes.groups == 1:
        repeats = ["gqa"]
    reads = [read for read in READS if kind in WITH_POSITIONS or read not in ("filled", "first", "narrow")]
    mask = draw(usually("bool", masks))
    is_rank_3 = kind not in POOLS and axes in ("htd", "thd", "hdt")
    if form == "sdpa" and is_rank_3 and sizes.groups == 1 and mask not in ("padding", "bool_4", "alibi", "lowest"):
        form = draw(st.sampled_from(("sdpa", "rank_3")))
    reads = [read for read in reads if form != "rank_3" or read != "sequences"]  # selected from a slice: refused
    return Attention(
        form=form,
        read=draw(usually("whole", reads)),
        repeat=draw(st.sampled_from(repeats)),
        mask=mask,
        mask_is_argument=kind in (*WITH_POSITIONS, *POOLS) and mask not in ("none", "causal") and draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.3))),
        scores=draw(st.sampled_from(list(SCORES))) if form == "written" else "matmul",
        softcap=form in ("written", "grouped") and draw(st.integers(0, 3)) == 3,
        softmax=draw(st.sampled_from(list(SOFTMAXES))) if form in ("written", "grouped") else "softmax",
    )


@st.composite
def all_sizes(draw: st.DrawFn, axes: str, kind: str) -> Sizes:
    batch = 1 if "b" not in axes and kind not in POOLS else draw(st.sampled_from((2, 1, 3)))
    kv_heads = draw(st.sampled_from((2, 3) if "m" in axes else (2, 1, 3))) if {"h", "m"} & {*axes} else 1
    tokens = draw(st.sampled_from((12, 9, 64, 65, 70)))
    return Sizes(batch, kv_heads, draw(st.sampled_from((1, 2))), tokens, draw(st.sampled_from((16, 32))))


@st.composite
def layers(
    draw: st.DrawFn,
    kind: str,
    axes: str,
    sizes: Sizes,
    tokens: tuple[int, ...],
    twisted: bool,
    has_twist: bool,
    lossy: bool,
) -> Layer:
    key = draw(writes(kind, axes, tokens, twisted, lossy))
    value = key if draw(st.booleans()) else draw(writes(kind, axes, tokens, twisted, lossy))
    if kind == WINDOW:
        value = replace(value, form=key.form)  # so that there are as many values as keys
    twists = [name for name in TWISTS if kind not in POOLS or name in OF_POOLS]
    twists = [name for name in twists if "m" not in axes or name not in SCATTERED]
    safe = [name for name in twists if TWISTS[name].is_safe and (name != "written_twice" or kind in OF_FIXED_SIZE)]
    twist = draw(st.sampled_from(twists)) if has_twist else draw(usually("none", safe))
    value_first, attention = draw(st.booleans()), draw(attentions(kind, axes, sizes))
    reorder = draw(reorders(axes, lossy)) if kind != READ_ONLY or twisted else None
    return Layer(kind, axes, key, value, value_first, attention, twist, reorder)


@st.composite
def programs(
    draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, twisted: bool | None = None, lossy: bool = False
) -> Program:
    """A program whose first layer has a cache of one of ``kinds``.

    Args:
        kinds: kinds of caches.
        twisted: whether it may have a twist or caches in unusual memory; None for either.
        lossy: whether its caches have a lossy format.
    """
    twisted = draw(st.booleans()) if twisted is None else twisted
    kind = draw(st.sampled_from(kinds))
    axes = draw(st.sampled_from(AXES.get(kind, AXES[SHIFTING])))
    tokens = draw(st.sampled_from(_steps_of(kind, twisted)))
    sizes = draw(all_sizes(axes, kind))
    count = draw(usually(1, [2]))
    stacks = [stack for stack in STACKS if stack != "ranges" or axes.endswith("d")]
    stack = draw(usually("none", stacks)) if kind == STATIC and len(axes) == 4 and not lossy else "none"
    # The result of attention has the rank of its query, so all layers of a program have one rank.
    memory = "own"
    if twisted and kind not in POOLS:
        memory = draw(usually("own", [*MEMORY, *ALIASED]))
    has_twist = twisted and memory == "own"
    kinds_of_others = EXTENDED if kind in EXTENDED else (kind,)
    first = draw(layers(kind, axes, sizes, tokens, twisted, has_twist, lossy))
    others = [draw(layers(draw(st.sampled_from(kinds_of_others)), axes, sizes, tokens, twisted, False, lossy))] * (
        count - 1
    )
    if any(layer.attention.mask_is_argument for layer in (first, *others)):
        others = [replace(other, attention=_with_mask_of(other.attention, first.attention)) for other in others]
    if memory != "own" or TWISTS[first.twist].needs_base:
        stack = "none"
    holder = draw(st.sampled_from(("dict", "arguments", "module")))
    actions = _actions(kind, axes, stack)
    before = ["nothing", *(draw(usually("nothing", actions)) for _ in tokens[1:])]
    steps = tuple(Step(n, action) for n, action in zip(tokens, before, strict=True))
    policy, dtype = "float32", "float32"
    if lossy:
        drops = any(layer.kind in (SHIFTING, WINDOW) for layer in (first, *others))
        policy = draw(st.sampled_from([name for name in LOSSY if not drops or name != "int4"]))
    elif draw(st.integers(0, 5)) == 5:
        policy = dtype = "bfloat16"
    return Program(
        sizes,
        (first, *others),
        steps,
        holder,
        stack,
        memory,
        dtype,
        policy,
        operators=draw(st.integers(0, 7)) < 7,  # traced specifications and symbols double the time
        dynamic=draw(st.integers(0, 3)) == 3,
        starts_packed=draw(st.integers(0, 3)) > 0,  # then no graph is compiled for plain caches
        exact_prompts=not lossy and draw(st.booleans()),
        again=tuple(draw(st.lists(_steps_with(tokens, actions), max_size=8))),
    )


def _steps_with(tokens: tuple[int, ...], actions: list[str]) -> st.SearchStrategy[tuple[Step, ...]]:
    """Steps of given numbers of tokens, which are compiled once, with any eager code between them."""
    between = st.tuples(*[st.sampled_from(actions)] * (len(tokens) - 1))
    return between.map(lambda before: tuple(map(Step, tokens, ("nothing", *before))))


def _steps_of(kind: str, twisted: bool) -> list[tuple[int, ...]]:
    """The numbers of new tokens that fit a cache. A growing cache is refused in a graph that appends no token."""
    never_empty = kind == SHIFTING or (kind in EXTENDED and not twisted)
    return [tokens for tokens in STEP_TOKENS if not never_empty or 0 not in tokens]


def _with_mask_of(attention: Attention, other: Attention) -> Attention:
    return replace(attention, mask=other.mask, mask_is_argument=other.mask_is_argument)


def _actions(kind: str, axes: str, stack: str) -> list[str]:
    """The eager code that fits a cache."""
    if kind in POOLS or stack != "none":
        return list(OF_ANY)
    actions = CHANGES_SIZE if kind in EXTENDED else KEEPS_SIZE
    by_sequence = ("reorder", "select", "copy_sequence", "fewer", "more")
    return [action for action in actions if "b" in axes or action not in by_sequence]
