"""Eager code reads the same values from a packed pool of blocks as from the plain pool, and writes quantize."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_caches import INT8, assert_same, quantized, values
from torch import Tensor

import kvcompile
from kvcompile.call.adoption import adopt
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("seed_without_grad")


def pair(layout: PackedLayout = INT8) -> tuple[PackedPool, Tensor]:
    """A packed pool, and the plain pool that must behave identically."""
    x = values(9, 5, 3, layout.head_dim)
    return PackedPool.from_dense(x, layout), quantized(x, layout)


def test_a_pool_looks_like_the_plain_one() -> None:
    pool, plain = pair()
    assert (pool.shape, pool.dtype, pool.device) == (plain.shape, plain.dtype, plain.device)
    assert torch.equal(pool.dequantize(), plain)
    assert torch.equal(pool + 1, plain + 1)
    assert torch.equal(pool[torch.tensor([[3, 0], [8, 3]])], plain[torch.tensor([[3, 0], [8, 3]])])
    assert torch.equal(pool.index_select(0, torch.tensor([4, 4])), plain.index_select(0, torch.tensor([4, 4])))
    assert "PackedPool" in repr(pool)
    assert pool.slots.packed.shape[:2] == (1, 1)  # 45 slots need one block of packed data, for any block_size


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "blocks and slots": lambda pool, x: pool.__setitem__(([1, 8, -1], [4, 0, -2]), x[:3, 0]),
    "blocks": lambda pool, x: pool.index_put_((torch.tensor([7, 2]),), x[:2]),
    "index_copy_": lambda pool, x: pool.index_copy_(0, torch.tensor([7, 2]), x[:2]),
    "slots of a view": lambda pool, x: pool.view(-1, *pool.shape[2:]).index_copy_(0, torch.tensor([44, 3]), x[0, :2]),
    "mask of slots": lambda pool, x: pool.__setitem__(torch.arange(45).view(9, 5) % 7 == 0, x[0, 0]),
    "one slot": lambda pool, x: pool[3, 2].copy_(x[0, 0]),
    "some blocks": lambda pool, x: pool[2:4].copy_(x[:2]),
    "another pool": lambda pool, x: pool.copy_(x),
    "other blocks": lambda pool, x: pool.view(3, 15, 3, -1).__setitem__((1, slice(2, 4)), x[0, :2]),
    "one number": lambda pool, x: pool.fill_(1.5),
    "zeros": lambda pool, x: pool[1:].zero_(),
}


def pair_with_heads_first() -> tuple[PackedPool, Tensor]:
    x = values(9, 3, 5, INT8.head_dim)
    return PackedPool.from_dense(x, INT8, heads_first=True), quantized(x, INT8)


def test_a_pool_with_heads_first_looks_like_the_plain_one() -> None:
    pool, plain = pair_with_heads_first()
    table = torch.tensor([[3, 0], [8, 3]])
    assert (pool.shape, pool.block_size) == (plain.shape, 5)
    assert torch.equal(pool.dequantize(), plain)
    assert torch.equal(pool[table], plain[table])
    assert torch.equal(pool[table, :, table % 5], plain[table, :, table % 5])
    assert_same(pool[4], plain[4])
    assert_same(pool.transpose(1, 2).flatten(0, 1), plain.transpose(1, 2).flatten(0, 1))
    assert pool.flatten(0, 1).equal(plain.flatten(0, 1))
    zeros = PackedPool.zeros(plain.shape, plain.dtype, INT8, heads_first=True)
    assert torch.equal(zeros.dequantize(), torch.zeros_like(plain))
    assert zeros.slots.shape == pool.slots.shape


WRITES_WITH_HEADS_FIRST: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "blocks and slots": lambda pool, x: pool.__setitem__(([1, 8, -1], slice(None), [4, 0, -2]), x[:3, :, 0]),
    "blocks": lambda pool, x: pool.index_put_((torch.tensor([7, 2]),), x[:2]),
    "blocks alike in all heads": lambda pool, x: pool.index_put_((torch.tensor([7, 2]),), x[0, 0]),
    "index_copy_": lambda pool, x: pool.index_copy_(0, torch.tensor([7, 2]), x[:2]),
    "exchanged": lambda pool, x: pool.transpose(1, 2).__setitem__(([1, 8], [4, 0]), x[:2, :, 0]),
    "exchanged block": lambda pool, x: pool.permute(0, 2, 1, 3)[2].copy_(x[0].transpose(0, 1)),
    "some slots": lambda pool, x: pool[3, :, 1:3].copy_(x[0, :, :2]),
    "some blocks": lambda pool, x: pool[2:4].copy_(x[:2]),
    "another pool": lambda pool, x: pool.copy_(x),
    "a packed pool": lambda pool, x: pool.copy_(PackedPool.from_dense(x.transpose(1, 2), INT8).transpose(1, 2)),
    "zeros": lambda pool, x: pool[1:].zero_(),
}


@pytest.mark.parametrize(
    ("make", "write"),
    [
        *(pytest.param(pair, write, id=name) for name, write in WRITES.items()),
        *(
            pytest.param(pair_with_heads_first, write, id=f"{name}, heads first")
            for name, write in WRITES_WITH_HEADS_FIRST.items()
        ),
    ],
)
def test_a_write_of_vectors_quantizes_them(
    make: Callable[[], tuple[PackedPool, Tensor]], write: Callable[[Tensor, Tensor], Any]
) -> None:
    pool, plain = make()
    x = quantized(values(*plain.shape), INT8)
    write(pool, x), write(plain, x)
    assert torch.equal(pool.dequantize(), quantized(plain, INT8))


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda pool: pool.mul_(2),
    "channels": lambda pool: pool[..., 0].zero_(),
    "a slot of all blocks": lambda pool: pool[:, 1].zero_(),
    "one vector": lambda pool: pool.__setitem__((torch.tensor([1]), torch.tensor([1])), 1.0),
    "the middle": lambda pool: pool.__setitem__((slice(None), slice(None), torch.tensor([2])), 1.0),
    "a flat view": lambda pool: pool.flatten(0, 1)[7].zero_(),
    "exchanged": lambda pool: pool.transpose(1, 2).add_(1),
    "a strided view": lambda pool: pool.as_strided((7, 16), (16, 1), 32).zero_(),
    "blocks of an exchanged view": lambda pool: pool.transpose(1, 2)[3, :2].mul_(2),
}


@pytest.mark.parametrize("make", [pair, pair_with_heads_first])
@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_any_other_write_reads_computes_and_stores(
    make: Callable[..., tuple[PackedPool, Tensor]], write: Callable[[Tensor], Any]
) -> None:
    _, x = make()
    lossless = PackedLayout("float32", "key", INT8.head_dim)
    pool = PackedPool.from_dense(x, lossless, heads_first=make is pair_with_heads_first)
    view, expected = pool.flatten(1, 2)[..., 3], x.flatten(1, 2)[..., 3]
    write(pool), write(x)
    assert torch.equal(pool.dequantize(), x)
    assert torch.equal(view.clone(), expected)


@pytest.mark.parametrize("make", [pair, pair_with_heads_first])
def test_indices_outside_of_a_pool_are_rejected(make: Callable[..., tuple[PackedPool, Tensor]]) -> None:
    pool, plain = make()
    with pytest.raises(IndexError):
        pool[torch.tensor([9])] = plain[:1]
    assert torch.equal(pool.dequantize(), plain)


@pytest.mark.parametrize("pool_and_plain", [pair, pair_with_heads_first])
def test_a_pool_is_copied_saved_and_loaded_packed(pool_and_plain: Callable[[], Any], tmp_path: Path) -> None:
    pool, plain = pool_and_plain()
    file = io.BytesIO()
    torch.save(pool, file)
    file.seek(0)
    kvcompile.save_cache({"keys": pool}, tmp_path / "pool.safetensors")
    copies = [
        copy.deepcopy(pool),
        pool.clone(),
        torch.load(file),
        kvcompile.load_cache(tmp_path / "pool.safetensors")["keys"],
    ]
    pool.zero_()
    for copied in copies:
        assert isinstance(copied, PackedPool)
        assert copied.heads_first == pool.heads_first
        assert torch.equal(copied.dequantize(), plain)


def test_slots_are_seen_as_blocks_and_back() -> None:
    pool, plain = pair()
    slots = pool.flatten(0, 1)
    assert isinstance(slots, PackedTensor)
    assert_same(slots, plain.flatten(0, 1))
    blocks = slots.unflatten(0, (9, 5))
    assert isinstance(blocks, PackedPool)
    blocks[0].zero_()
    assert torch.equal(pool[0], torch.zeros_like(plain[0]))
    assert torch.equal(pool[1:].dequantize(), plain[1:])


def test_adoption_leaves_a_pool_of_blocks_or_slots() -> None:
    x = values(9, 5, 3, INT8.head_dim)
    blocks, slots = x.clone(), x.flatten(0, 1).clone()
    adopt(blocks, INT8, "nthd"), adopt(slots, INT8, "thd")
    assert isinstance(blocks, PackedPool)
    assert isinstance(slots, PackedTensor)
    assert torch.equal(blocks.dequantize().flatten(0, 1), slots.dequantize())
