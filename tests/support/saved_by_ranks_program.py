"""One rank of tests/packed/test_saved_by_ranks.py: caches that grids of ranks save and load.

``forked_ranks.py`` runs ``saved_by_ranks_program.py FOLDER OUTPUT.pt``; rank 0 writes the results of all ranks.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from packed_caches import HEAD_DIM, values
from ranks import save_results
from tiny_llama import tiny_llama
from torch import Tensor

import kvcompile
from kvcompile.caches import disk
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor
from kvcompile.parallel.context_parallel import shard_of

BATCH, HEADS, TOKENS = 2, 12, 200
LAYOUTS = [PackedLayout("int8_per_token_head", "key", HEAD_DIM), PackedLayout("int4_per_token_head", "value", HEAD_DIM)]
SAVES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
LOADS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2)]
"""Numbers of context-parallel and of tensor-parallel ranks."""


@dataclass
class Grid:
    """Process groups of ``rows`` times ``columns`` ranks. Only the first ranks of the program belong to it."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        self.row, self.column = divmod(dist.get_rank(), self.columns)
        columns, rows = range(self.columns), range(self.rows)
        tensor = [dist.new_group([row * self.columns + column for column in columns]) for row in rows]
        context = [dist.new_group([row * self.columns + column for row in rows]) for column in columns]
        if self.has_me:
            self.options = {"context_parallel": context[self.column], "tensor_parallel": tensor[self.row]}

    @property
    def has_me(self) -> bool:
        return self.row < self.rows

    def heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """The heads of this rank."""
        return x.chunk(self.columns, dim)[self.column]

    def packed(self, x: Tensor, layout: PackedLayout) -> Tensor:
        """The heads and tokens of this rank, packed."""
        shard = shard_of(self.options["context_parallel"])
        own = self.heads(x).contiguous()
        if shard is None:
            return PackedTensor.from_dense(own, layout)
        return kvcompile.PackedShard.from_dense(own, layout, shard)


def whole_values(tokens: int = TOKENS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [values(BATCH, HEADS, tokens, HEAD_DIM, generator=generator) for _ in LAYOUTS]


def cache_of(grid: Grid, tokens: int = TOKENS) -> dict[str, Any]:
    """The cache of this rank: packed keys and values, a plain tensor that all ranks hold, and a number."""
    keys, values = (grid.packed(x, layout) for x, layout in zip(whole_values(tokens), LAYOUTS, strict=True))
    return {"layers": [(keys, values)], "lengths": torch.arange(BATCH), "seen": tokens}


def same(one: Any, other: Any) -> bool:
    """Whether two caches have the same types, and the same bytes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, kvcompile.PackedShard):
        return one.shape == other.shape and one.shard == other.shard and same(one.local, other.local)
    if isinstance(one, PackedStack):
        return one.shape == other.shape and all(map(same, one.parts, other.parts))
    if isinstance(one, PackedPool):
        return one.shape == other.shape and one.heads_first == other.heads_first and same(one.slots, other.slots)
    if isinstance(one, PackedTensor):
        return one.cache_meta == other.cache_meta and one.shape == other.shape and torch.equal(one.packed, other.packed)
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def all_sizes(folder: Path, grids: dict[tuple[int, int], Grid]) -> dict[str, bool]:
    """Whether each grid of LOADS gets its cache bit by bit from the save of each grid of SAVES, or from one file."""
    result = {}
    saves = [folder / f"{rows}x{columns}" for rows, columns in SAVES]
    for path, size in zip(saves, SAVES, strict=True):
        if grids[size].has_me:
            kvcompile.save_cache(cache_of(grids[size]), path, {"prompt": "a"}, **grids[size].options)
    if dist.get_rank() == 0:
        shutil.copytree(saves[-1], folder / "copied")
        kvcompile.save_cache(cache_of(grids[1, 1]), folder / "file", {"prompt": "a"})
    dist.barrier()
    for path in (*saves, folder / "copied", folder / "file"):
        for size in LOADS:
            if grids[size].has_me:
                loaded = kvcompile.load_cache(path, metadata={"prompt": "a"}, **grids[size].options)
                result[f"{path.name} by {size}"] = same(loaded, cache_of(grids[size]))
        result[f"{path.name} whole"] = dist.get_rank() != 0 or same(kvcompile.load_cache(path), whole_cache(grids))
        dist.barrier()
    return result


def few_blocks(folder: Path, grids: dict[tuple[int, int], Grid]) -> dict[str, bool]:
    """Whether ranks without a block of a short cache save and load it, too."""
    result, sizes = {}, [(1, 1), (2, 1), (4, 1)]
    for saving in sizes:
        path = folder / f"few by {saving}"
        if grids[saving].has_me:
            kvcompile.save_cache(cache_of(grids[saving], 100), path, **grids[saving].options)
        dist.barrier()
        for loading in sizes:
            if grids[loading].has_me:
                loaded = kvcompile.load_cache(path, **grids[loading].options)
                result[f"{saving} to {loading}"] = same(loaded, cache_of(grids[loading], 100))
        dist.barrier()
    return result


def whole_cache(grids: dict[tuple[int, int], Grid]) -> dict[str, Any]:
    """The cache as one process holds it. Only rank 0 can compute it."""
    return cache_of(grids[1, 1])


def other_kinds(folder: Path, grids: dict[tuple[int, int], Grid]) -> dict[str, bool]:
    """Kinds of caches besides static ones, saved by two tensor-parallel ranks and loaded by one, two and four."""

    def cache(grid: Grid) -> dict[str, Any]:
        keys, values = whole_values()
        plain = transformers.DynamicCache()
        plain.update(grid.heads(keys).clone(), grid.heads(values).clone(), 0)
        recent = PackedLayout.parse("int4_per_channel[recent=1,sinks=0,float32]", "key", HEAD_DIM)
        pool = grid.heads(keys[0].transpose(0, 1)[:192].reshape(12, 16, HEADS, HEAD_DIM), 2).contiguous()
        stack = torch.stack([grid.heads(keys), grid.heads(values)])
        latent = PackedTensor.from_dense(keys[:, :1].contiguous(), LAYOUTS[0])
        return {
            "growing": PackedTensor.from_dense(grid.heads(keys).contiguous(), LAYOUTS[0], growing=True),
            "recent": PackedTensor.from_dense(grid.heads(keys).contiguous(), recent),
            "pool": PackedPool.from_dense(pool, LAYOUTS[0]),
            "stack": PackedStack.from_dense(stack, {(i,): (layout, "bhtd") for i, layout in enumerate(LAYOUTS)}),
            "latent": latent,
            "plain": [plain.layers[0].keys, plain.layers[0].values],
            "cache": plain,
        }

    def parts(cache: dict[str, Any]) -> dict[str, Any]:
        return {**cache, "cache": [cache["cache"].layers[0].keys, cache["cache"].layers[0].values], "plain": None}

    def saved(grid: Grid) -> dict[str, Any]:
        return {name: one for name, one in cache(grid).items() if name != "plain"}

    path, result = folder / "kinds", {}
    if grids[1, 2].has_me:
        kvcompile.save_cache(saved(grids[1, 2]), path, **grids[1, 2].options)
    dist.barrier()
    for size in [(1, 1), (1, 2), (1, 4)]:
        if grids[size].has_me:
            loaded, expected = parts(kvcompile.load_cache(path, **grids[size].options)), parts(cache(grids[size]))
            result |= {f"{name} by {size}": same(loaded[name], expected[name]) for name in loaded}
    dist.barrier()
    return result


def repeated_heads(folder: Path, grids: dict[tuple[int, int], Grid]) -> dict[str, Any]:
    """Two heads that four ranks hold in pairs: one copy is saved, and one, two and four ranks get their heads."""
    heads = values(BATCH, 2, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(4))

    def cache(columns: int, column: int) -> Tensor:
        first = column * 2 // columns
        return PackedTensor.from_dense(heads[:, first : first + max(2 // columns, 1)].contiguous(), LAYOUTS[0])

    path, result = folder / "repeated", {}
    kvcompile.save_cache(cache(4, dist.get_rank()), path, **grids[1, 4].options)
    for columns in (1, 2, 4):
        grid = grids[1, columns]
        if grid.has_me:
            loaded = kvcompile.load_cache(path, **grid.options)
            result[f"{columns} ranks"] = same(loaded, cache(columns, grid.column))
    dist.barrier()
    tensors = kvcompile.load_cache(path)
    result["saved once"] = tensors.shape[1] == 2
    return result


@torch.no_grad()
def transformers_cache(folder: Path, grids: dict[tuple[int, int], Grid]) -> dict[str, bool]:
    """A static cache of Transformers, half filled by eager code on two ranks, continued by one process and by three."""
    model = tiny_llama(num_layers=1)
    ids = torch.randint(0, 97, (1, 90), generator=torch.Generator().manual_seed(5))

    def continued(cache: Any) -> Tensor:
        logits: Tensor = model(ids[:, 80:], past_key_values=cache).logits
        return logits

    def filled(**options: Any) -> Any:
        cache = kvcompile.static_cache(model, 1, 150, "int8_per_token_head", **options)
        model(ids[:, :80], past_key_values=cache)
        return cache

    path, result, expected = folder / "transformers", {}, continued(filled())
    if grids[2, 1].has_me:
        ranks = grids[2, 1].options["context_parallel"]
        cache = filled(context_parallel=ranks)
        kvcompile.save_cache(cache, path, model=model, context_parallel=ranks)
        result["the saved cache goes on"] = torch.equal(continued(cache), expected)
    dist.barrier()
    result["one process"] = torch.equal(continued(kvcompile.load_cache(path, model=model)), expected)
    if grids[3, 1].has_me:
        ranks = grids[3, 1].options["context_parallel"]
        loaded = kvcompile.load_cache(path, model=model, context_parallel=ranks)
        result["three ranks"] = torch.equal(continued(loaded), expected)
        result["three ranks hold shards"] = isinstance(loaded.layers[0].keys, kvcompile.PackedShard)
    return result


def _only_files(path: Path, flush: Callable[[Path], None] = disk._flush) -> None:
    if path.is_dir():
        raise OSError(22, "Invalid argument")
    flush(path)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except kvcompile.CacheFileError as error:
        return str(error)
    return ""


def errors(folder: Path, grids: dict[tuple[int, int], Grid]) -> dict[str, str]:
    """The error of each mistake, on this rank."""
    grid, result = grids[2, 2], {}
    path, rank = folder / "faults", dist.get_rank()

    def save(cache: Any, to: Path = path, **more: Any) -> str:
        return error_of(lambda: kvcompile.save_cache(cache, to, **{**grid.options, **more}))

    def load(by: Grid = grid, **more: Any) -> str:
        result = error_of(lambda: kvcompile.load_cache(path, **{**by.options, **more}))
        dist.barrier()
        return result

    def on_rank_0(change: Callable[[], Any]) -> None:
        if rank == 0:
            change()
        dist.barrier()

    good = cache_of(grid)
    result["an object of rank 3"] = save({**good, "seen": {1} if rank == 3 else TOKENS})
    result["another length on rank 1"] = save({**good, "seen": rank == 1})
    result["another plain tensor on rank 2"] = save({**good, "lengths": torch.arange(BATCH) + (rank == 2)})
    result["other metadata on rank 1"] = save(good, metadata={"step": str(rank == 1)})
    result["a whole cache"] = save(grids[1, 4].packed(whole_values()[0], LAYOUTS[0]))
    result["no ranks given"] = error_of(lambda: kvcompile.save_cache(good, folder / f"{rank}.safetensors"))
    result["nothing was saved"] = load()
    result["left over"] = ", ".join(file.name for file in path.iterdir())
    dist.barrier()
    assert save(good) == ""
    first = sorted(file.name for file in path.iterdir())
    dist.barrier()
    on_rank_0(lambda: shutil.copytree(path, folder / "first"))
    assert save(good) == ""
    result["replaced"] = str(len(list(path.iterdir())) == 5 and not set(first[:-1]) & {f.name for f in path.iterdir()})
    dist.barrier()
    result["twice the same"] = load()
    dist.barrier()
    with mock.patch.object(disk, "_flush", _only_files):
        result["a folder that cannot be flushed"] = save(good) or load()
    own = sorted(file for file in path.iterdir() if file.suffix == ".safetensors")
    on_rank_0(lambda: shutil.copy(folder / "first" / first[-2], own[3]))
    result["a file of another save"] = load()
    on_rank_0(lambda: own[3].unlink())
    result["a missing file"] = load()
    result["a missing file, one process"] = error_of(lambda: kvcompile.load_cache(path))
    dist.barrier()
    on_rank_0(lambda: (shutil.rmtree(path), shutil.copytree(folder / "first", path), flip(path / first[2])))
    result["a damaged file"] = load()
    result["other metadata"] = load(metadata={"step": "7"})
    on_rank_0(lambda: (path / "index.json").write_text((path / "index.json").read_text().replace("200", "201")))
    result["a damaged index"] = load()
    return result


def flip(path: Path) -> None:
    """Change the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def main(folder: Path, output: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    grids = {size: Grid(*size) for size in LOADS}
    result = {
        test.__name__: test(folder, grids)
        for test in (all_sizes, few_blocks, other_kinds, repeated_heads, transformers_cache, errors)
    }
    save_results(result, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
