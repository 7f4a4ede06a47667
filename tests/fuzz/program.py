"""A decode program as a small tree: its caches, its writes and its attention, and the eager code between its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fuzz.twists import TWISTS

STATIC, SHIFTING, GROWING, WINDOW, SLOTS, PAGES = "static", "shifting", "growing", "window", "slots", "pages"
FUNCTIONAL, READ_ONLY = "functional", "read_only"
KINDS = (STATIC, SHIFTING, GROWING, WINDOW, SLOTS, PAGES, FUNCTIONAL, READ_ONLY)
POOLS = (SLOTS, PAGES)
EXTENDED = (GROWING, WINDOW)
RETURNED = (*EXTENDED, FUNCTIONAL)
"""Caches that a step returns; the caller may keep the cache that it has passed."""
OF_FIXED_SIZE = (STATIC, FUNCTIONAL)
WITH_POSITIONS = (*OF_FIXED_SIZE, READ_ONLY)
"""Caches in which queries have the positions of the new tokens."""

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Write:
    """How new tokens get into a cache.

    Attributes:
        form: a key of ``step_text.WRITES``, or a form of a cache that shifts or grows.
        positions: a key of ``step_text.POSITIONS``.
        through_view: whether the write goes through a view [batch, heads, tokens, head_dim] of the stored tensor.
        values: how the new vectors are computed, a key of ``step_text.VALUES``.
        mask: the tokens that are written, a key of ``masked_text.CHOSEN``; ``all`` for all of them.
        way: where the mask is, one of ``masked_text.WAYS``.
    """

    form: str
    positions: str = "given"
    through_view: bool = False
    values: str = "plain"
    mask: str = "all"
    way: str = "new"


@dataclass(frozen=True)
class Reorder:
    """How a layer reorders the sequences of its caches.

    Attributes:
        place: one of ``masked_text.PLACES``.
        form: a key of ``masked_text.REORDERS``.
        roles: ``kv``, ``k`` or ``v``: the caches that it reorders.
        of_stack: whether it reorders the tensor that holds keys and values, if there is one.
    """

    place: str
    form: str = "index_select"
    roles: str = "kv"
    of_stack: bool = False


@dataclass(frozen=True)
class Attention:
    """How queries attend.

    Attributes:
        form: ``sdpa``, ``rank_3``, ``written`` or ``grouped``.
        read: a key of ``step_text.READS``.
        repeat: how KV heads serve several query heads, a key of ``step_text.REPEATS``.
        mask: a key of ``step_text.MASKS``.
        mask_is_argument: whether the caller computes the mask.
        scale: None for the default.
        scores, softcap, softmax: the parts of written-out attention.
    """

    form: str = "sdpa"
    read: str = "whole"
    repeat: str = "gqa"
    mask: str = "bool"
    mask_is_argument: bool = False
    scale: float | None = None
    scores: str = "matmul"
    softcap: bool = False
    softmax: str = "softmax"


@dataclass(frozen=True)
class Layer:
    """One attention with its caches.

    Attributes:
        kind: one of KINDS.
        axes: the order of the dimensions of its caches.
        key, value: the writes.
        value_first: whether values are written before keys.
        attention: how its queries attend.
        twist: a key of ``twists.TWISTS``: something that a proof must see. ``none`` for no twist.
        reorder: how it reorders sequences; None for no reorder.
    """

    kind: str
    axes: str
    key: Write
    value: Write
    value_first: bool
    attention: Attention
    twist: str = "none"
    reorder: Reorder | None = None


@dataclass(frozen=True)
class Sizes:
    """The sizes of all layers; ``tokens`` is the capacity of a cache of fixed size."""

    batch: int
    kv_heads: int
    groups: int
    tokens: int
    head_dim: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups


@dataclass(frozen=True)
class Step:
    """A call of the compiled function with ``tokens`` new tokens, after eager code, a key of ``drive_text.BETWEEN``."""

    tokens: int
    before: str = "nothing"


@dataclass(frozen=True)
class Program:
    """A whole program.

    Attributes:
        operators: whether rewritten graphs have the operators of ``kvcompile::``, as on a GPU.
        dynamic: whether sizes that change between steps become symbols; otherwise each size is compiled.
        starts_packed: whether the caller packs the caches; otherwise the first step packs them.
        exact_prompts: whether attention to new tokens is exact, for few queries too.
        seed: of all numbers.
        again: further calls of the same compiled function, with other eager code between them, each on new caches.
        policy: the format of all caches.
        dtype: the dtype of queries and caches.
        holder: ``arguments``, ``dict`` or ``module``: who holds the caches.
        stack: how keys and values share a tensor, a key of ``step_text.STACKS``; ``none`` for separate tensors.
        memory: how the caches lie in memory, a key of ``drive_text.MEMORY``.
    """

    sizes: Sizes
    layers: tuple[Layer, ...]
    steps: tuple[Step, ...]
    holder: str = "dict"
    stack: str = "none"
    memory: str = "own"
    dtype: str = "float32"
    policy: str = "float32"
    operators: bool = True
    dynamic: bool = False
    starts_packed: bool = False
    exact_prompts: bool = False
    seed: int = 0
    again: tuple[tuple[Step, ...], ...] = ()

    @property
    def runs(self) -> list[Program]:
        """The program itself and a program for each of ``again``. All have the same compiled function."""
        runs = enumerate((self.steps, *self.again), start=self.seed)
        return [replace(self, steps=steps, seed=seed, again=()) for seed, steps in runs]

    @property
    def is_safe(self) -> bool:
        """Whether kvcompile should pack all its caches: nothing in it hinders a proof.

        Packed keys cannot serve as values, so steps after a ``swap`` are refused. Masked writes and reorders are packed
        in most forms, but not in all; ``tests/forms`` has the forms that must be packed.
        """
        swaps = any(step.before == "swap" for step in self.steps)
        plain = all(layer.reorder is None and layer.key.mask == layer.value.mask == "all" for layer in self.layers)
        return (
            plain and not swaps and self.memory == "own" and all(TWISTS[layer.twist].is_safe for layer in self.layers)
        )
