"""A stack of packed caches reads like the plain stack, and a write to the stack writes its parts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from node_by_node import running_node_by_node
from packed_caches import INT8, quantized, values
from stack_forms import check_is_saved_and_loaded, plain, save_and_load
from torch import Tensor

import kvcompile
from kvcompile import cache_nbytes
from kvcompile.call.adoption import AdoptionError, adopt_stack
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.stack import PackedStack

pytestmark = pytest.mark.usefixtures("seed_without_grad")


def small_stack(role_dim: int = 1) -> tuple[PackedStack, Tensor]:
    """Layers of plain keys and packed values, and the plain tensor that must behave identically."""
    x = values(3, 2, 2, 2, 70, INT8.head_dim)
    stack = PackedStack.from_dense(x, {(layer, 1): (INT8, "bhtd") for layer in range(3)}, (0, role_dim))
    expected = x.clone()
    expected.select(role_dim, 1).copy_(quantized(x.select(role_dim, 1), INT8))
    return stack, expected


behind_layers_or_sequences = pytest.mark.parametrize("role_dim", [1, 2])


SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a plain part": lambda c: c[1, 0],
    "a packed part": lambda c: c[-1, 1],
    "one after the other": lambda c: c[2][1],
    "unbind": lambda c: c.unbind(1)[1][2],
    "parts of a layer": lambda c: c[1],
    "keys": lambda c: c[:, 0],
    "some layers": lambda c: c[1:],
    "every other layer": lambda c: c[::2, 1:],
    "no layer": lambda c: c[3:],
    "split": lambda c: c.split(2)[1],
    "tokens": lambda c: c[..., 3:9, :],
    "a head": lambda c: c[:, :, :, 1],
    "a copy": lambda c: c.clone(),
    "deepcopy": copy.deepcopy,
    "beams": lambda c: c.index_select(2, torch.tensor([0, 0])),
    "indexed tokens": lambda c: c[:, :, :, :, torch.tensor([3, 1])],
    "indexed layers": lambda c: c[torch.tensor([2, 0])],
    "another shape": lambda c: c.view(6, *c.shape[2:]),
    "sequences first": lambda c: c.permute(2, 4, 1, 0, 3, 5)[0],
    "tokens before heads": lambda c: c.transpose(3, 4)[..., 3, :, :],
    "another dtype": lambda c: c.to(torch.float64),
    "a sum": lambda c: c + 1,
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS.keys())
@behind_layers_or_sequences
def test_a_stack_reads_as_the_plain_tensor(role_dim: int, select: Callable[[Tensor], Tensor]) -> None:
    stack, expected = small_stack(role_dim)
    result = plain(select(stack))
    assert result.dtype == select(expected).dtype
    assert torch.equal(result + 0, select(expected))


def write_part(cache: Tensor, x: Tensor) -> None:
    cache[1, 1, :, :, 3:5] = x


def write_tokens_of_all(cache: Tensor, x: Tensor) -> None:
    cache[:, :, :, :, torch.tensor([4, 66])] = x


def index_copy_all(cache: Tensor, x: Tensor) -> None:
    cache.index_copy_(4, torch.tensor([0, 69]), x.expand(3, 2, 2, 2, 2, -1).contiguous())


def write_through_a_permutation(cache: Tensor, x: Tensor) -> None:
    cache.permute(2, 4, 1, 0, 3, 5)[:, torch.tensor([5])] = x[:, :, 0]


def write_per_sequence_and_head(cache: Tensor, x: Tensor) -> None:
    cache[..., torch.tensor([[0], [1]]), torch.tensor([[5, 6], [7, 8]]), :] = x[0]


def write_layer(cache: Tensor, x: Tensor) -> None:
    cache[0] = x[:, :, :1]


def copy_layer(cache: Tensor, x: Tensor) -> None:
    cache[0].copy_(cache[2])


def clear_layers(cache: Tensor, x: Tensor) -> None:
    cache[1:].zero_(), cache[0].fill_(2)


@pytest.mark.parametrize(
    "write",
    [
        write_part,
        write_tokens_of_all,
        index_copy_all,
        write_through_a_permutation,
        write_per_sequence_and_head,
        write_layer,
        copy_layer,
        clear_layers,
    ],
)
@behind_layers_or_sequences
def test_a_write_to_a_stack_writes_its_parts(role_dim: int, write: Callable[[Tensor, Tensor], None]) -> None:
    stack, expected = small_stack(role_dim)
    x = values(1, 2, 2, INT8.head_dim)
    write(stack, x)
    write(expected, x)
    expected.select(role_dim, 1).copy_(quantized(expected.select(role_dim, 1), INT8))
    torch.testing.assert_close(stack.dequantize(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "write",
    [
        lambda c: c.mul_(2),
        lambda c: c[0].add_(c[1]),
        lambda c: c.view(-1)[5:].zero_(),
        lambda c: c[..., 3].add_(1),
        lambda c: c[:, 1].mul_(2),
    ],
)
@behind_layers_or_sequences
def test_any_other_write_reads_computes_and_stores(role_dim: int, write: Callable[[Tensor], Any]) -> None:
    _, x = small_stack(role_dim)
    lossless = PackedLayout("float32", "value", INT8.head_dim)
    stack = PackedStack.from_dense(x, {(layer, 1): (lossless, "bhtd") for layer in range(3)}, (0, role_dim))
    view, expected = stack.flatten(0, 1)[..., 3], x.flatten(0, 1)[..., 3]
    write(stack), write(x)
    assert torch.equal(stack.dequantize(), x)
    assert torch.equal(view.clone(), expected)


@behind_layers_or_sequences
def test_a_single_stack_is_concatenated_with_nothing(role_dim: int) -> None:
    stack, expected = small_stack(role_dim)
    joined = torch.cat([stack], 4)
    assert isinstance(joined, PackedStack)
    torch.testing.assert_close(joined.dequantize(), expected, rtol=0, atol=1e-6)


@save_and_load
def test_a_stack_is_saved_packed_and_loaded(
    save: Callable[..., None], load: Callable[..., Any], tmp_path: Path
) -> None:
    check_is_saved_and_loaded(*small_stack(), save, load, tmp_path / "file")


def test_adoption_swaps_a_stack_for_all_holders_or_gives_a_reason() -> None:
    x = values(2, 1, 2, 70, INT8.head_dim)
    holders = [x, {"cache": x}]
    x.note = "mine"
    for unfit, reason in (
        (torch.zeros(1, 2, 70, INT8.head_dim), "not a 4-dimensional"),
        (x.int(), "floating-point"),
        (x[:1], "bytes of a storage of"),
    ):
        with pytest.raises(AdoptionError, match=reason):
            adopt_stack(unfit, {(0,): (INT8, "bhtd")})
    del unfit
    assert adopt_stack(x, {(0,): (INT8, "bhtd")}) is holders[0] is holders[1]["cache"]
    assert isinstance(x, PackedStack)
    assert x.note == "mine"
    assert cache_nbytes(holders) == cache_nbytes(x[0]) + x[1].nbytes


def test_slices_of_one_tensor_that_are_passed_one_by_one_are_packed_if_the_tensor_is_a_stack(fresh_compiler) -> None:
    """A model may select the cache of a layer outside of the compiled code, as nanochat does."""

    def step(query: Tensor, new: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
        for cache in (keys, values):
            cache[:, :, position : position + 1] = new
        return F.scaled_dot_product_attention(query, keys[:, :, : position + 1], values[:, :, : position + 1])

    plain = [torch.zeros(2, 1, 2, 70, 32) for _ in range(2)]
    expected, caches = [x.clone() for x in plain], list(plain)
    layouts = PackedLayout("float32", "key", 32), PackedLayout("float32", "value", 32)
    compiled = torch.compile(step, backend=kvcompile.kvquant(policy="float32"))
    for is_stack in (False, True):
        if is_stack:
            packed = zip(plain, layouts, strict=True)
            caches = [PackedStack.from_dense(x, {(i,): (layout, "bhtd") for i in range(2)}) for x, layout in packed]
        with running_node_by_node(), kvcompile.collect_reports() as report:
            for position, layer in itertools.product(range(3), range(2)):
                query, new = values(1, 2, 1, 32), values(1, 2, 1, 32)
                actual = compiled(query, new, caches[0][layer], caches[1][layer], position)
                wanted = step(query, new, expected[0][layer], expected[1][layer], position)
                torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
        assert (report.totals.plain_calls == 0) == is_stack
        assert is_stack or any("replace the larger tensor by PackedStack.from_dense" in note for note in report.notes)
