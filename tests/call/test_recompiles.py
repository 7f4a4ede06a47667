"""How many graphs a function compiles: never more than under another backend.

docs/troubleshooting.md has the table of these counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decode_steps import growing_step, step
from tiny_llama import tiny_llama
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

HEADS, HEAD_DIM, MAX_LEN = 2, 32, 140
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

Run = Callable[..., Any]


def new(batch: int, tokens: int) -> Sequence[Tensor]:
    return torch.randn(3, batch, HEADS, tokens, HEAD_DIM).unbind()


def caches(batch: int, packed: bool) -> list[Tensor]:
    shape = (batch, HEADS, MAX_LEN, HEAD_DIM)
    if not packed:
        return [torch.zeros(shape) for _ in range(2)]
    layouts = (PackedLayout("int8_per_token_head", role, HEAD_DIM) for role in ("key", "value"))
    return [PackedTensor.zeros(shape, torch.float32, layout, "bhtd") for layout in layouts]


def decode(run: Run, packed: bool, lengths: Sequence[int], batch: int = 1) -> None:
    """Steps of these lengths on new caches."""
    own, first = caches(batch, packed), 0
    for length in lengths:
        run(*new(batch, length), *own, torch.arange(first, first + length))
        first += length


def grow(run: Run, lengths: Sequence[int], is_marked: bool = False) -> None:
    keys, values = torch.randn(2, 1, HEADS, 3, HEAD_DIM)
    for length in lengths:
        for cache in (keys, values) if is_marked else ():
            torch._dynamo.mark_dynamic(cache, 2)
        _, keys, values = run(*new(1, length), keys, values)


CASES: dict[str, tuple[Callable[..., Any], Callable[[Run, bool], Any], dict[str, Any]]] = {
    "steps on a packed static cache": (step, lambda run, packed: decode(run, packed, [1, 1, 1]), {}),
    "steps on a plain static cache of the caller": (step, lambda run, packed: decode(run, False, [1, 1, 1]), {}),
    "a prompt and steps on plain static caches, twice": (
        step,
        lambda run, packed: [decode(run, False, [7, 1, 1]) for _ in range(2)],
        {},
    ),
    "another packed cache of the same shape": (
        step,
        lambda run, packed: [decode(run, packed, [1, 1]) for _ in range(2)],
        {},
    ),
    "a prompt and steps": (step, lambda run, packed: decode(run, packed, [7, 1, 1]), {}),
    "prompts of three lengths, each with a step": (
        step,
        lambda run, packed: [decode(run, packed, [length, 1]) for length in (7, 9, 12)],
        {},
    ),
    "steps with 1, 2, 3 and 4 sequences": (
        step,
        lambda run, packed: [decode(run, packed, [1, 1], batch) for batch in (1, 2, 3, 4)],
        {},
    ),
    "steps on a growing cache": (growing_step, lambda run, packed: grow(run, [1] * 70), {}),
    "the same with `dynamic=True`": (growing_step, lambda run, packed: grow(run, [1] * 6), {"dynamic": True}),
    "the same after `mark_dynamic`": (growing_step, lambda run, packed: grow(run, [1] * 6, is_marked=True), {}),
    "a prompt and steps on a growing cache": (growing_step, lambda run, packed: grow(run, [7, 1, 1, 1]), {}),
}


def table_of_page() -> dict[str, tuple[int, int]]:
    rows = re.findall(r"^\| (.+?) \| (\d) \| (\d) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {name: (int(plain), int(packed)) for name, plain, packed in rows}


GENERATE = "`generate()` for prompts of three lengths"


def generate(is_packed: bool) -> None:
    """Requests for prompts of three lengths, whose decode steps ``generate()`` compiles."""
    model = tiny_llama(num_layers=1)
    how: dict[str, Any] = {"cache_implementation": "static"}
    if is_packed:
        kvcompile.compile(model, policy="int8_per_token_head")
    else:
        how["compile_config"] = transformers.CompileConfig(backend="eager")
        how["compile_config"]._compile_all_devices = True  # otherwise only on GPUs
    for length in (9, 29, 49):
        ids = torch.randint(97, (1, length))
        model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_the_page_has_the_number_of_graphs(name: str) -> None:
    function, drive, how = CASES[name]
    counts = []
    for backend, packed in (("eager", False), ("kvquant", True)):
        torch._dynamo.reset()
        counters.clear()
        drive(torch.compile(function, backend=backend, **how), packed)
        counts.append(counters["stats"]["unique_graphs"])
    assert table_of_page()[name] == tuple(counts)


@pytest.mark.slow
def test_the_page_has_the_number_of_graphs_of_generate() -> None:
    counts = []
    for is_packed in (False, True):
        torch._dynamo.reset()
        counters.clear()
        generate(is_packed)
        counts.append(counters["stats"]["unique_graphs"])
    assert table_of_page()[GENERATE] == tuple(counts)


def test_no_use_of_a_cache_costs_another_graph() -> None:
    table = table_of_page()
    assert table.keys() == {*CASES, GENERATE}
    assert all(packed <= plain for plain, packed in table.values())


@pytest.mark.slow
def test_two_thousand_steps_on_a_growing_cache_compile_twice_and_rarely_move_the_cache() -> None:
    run = torch.compile(growing_step, backend="kvquant")
    keys, values = torch.randn(2, 1, HEADS, 3, HEAD_DIM)
    addresses = []
    for _ in range(2000):
        _, keys, values = run(*new(1, 1), keys, values)
        addresses.append(keys.packed.untyped_storage().data_ptr())
    assert keys.shape[2] == 2003
    assert counters["stats"]["unique_graphs"] == 2
    assert sum(before != after for before, after in pairwise(addresses)) <= 10
