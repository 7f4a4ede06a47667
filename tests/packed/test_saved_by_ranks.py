"""Ranks save a cache together, and any number of ranks loads it bit by bit. Every rank gets every error."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from documented_commands import ROOT, blocks
from ranks import run_on_ranks

import kvcompile
from kvcompile.caches.division import head_dim_of, with_heads
from kvcompile.caches.source import names_of_parts

pytest.importorskip("transformers")

FIRST = "context-parallel rank 0, tensor-parallel rank 0"

ERRORS = {
    "an object of rank 3": "context-parallel rank 1, tensor-parallel rank 1: save_cache: seen is a builtins.set",
    "another length on rank 1": f"{FIRST} and context-parallel rank 0, tensor-parallel rank 1 have different caches",
    "another plain tensor on rank 2": "context-parallel ranks hold different values of lengths",
    "other metadata on rank 1": "have different metadata or models",
    "a whole cache": "cache is whole on every context-parallel rank",
    "nothing was saved": "or the folder of a completed save_cache of several ranks",
    "a file of another save": "is damaged, or belongs to another save than",
    "a missing file": "is missing, but the index of this cache names it",
    "a damaged file": "has another digest",
    "other metadata": "step is None in the file, and '7' was expected",
    "a damaged index": "its metadata have another digest",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which four ranks save their caches."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """The results of four ranks."""
    return list(run_on_ranks("saved_by_ranks_program.py", 4, "cpu", folder / "results.pt", folder))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("test", ["all_sizes", "few_blocks", "other_kinds", "repeated_heads", "transformers_cache"])
def test_every_rank_gets_the_bytes_of_its_tokens_and_heads(ranks: list[dict[str, Any]], test: str) -> None:
    assert [{case for case, fits in rank[test].items() if not fits} for rank in ranks] == [set()] * len(ranks)
    assert ranks[0][test], "rank 0 takes part in every grid"


@pytest.mark.parametrize(("case", "message"), ERRORS.items(), ids=ERRORS.keys())
def test_a_mistake_of_one_rank_is_the_same_error_on_all_of_them(
    ranks: list[dict[str, Any]], case: str, message: str
) -> None:
    found = {rank["errors"][case] for rank in ranks}
    assert len(found) == 1
    assert message in found.pop()


def test_a_part_is_not_saved_without_the_other_ranks(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert f"is part {number // 2} of 2 of a cache" in rank["errors"]["no ranks given"]


def test_the_reader_of_the_page_finds_every_block_in_the_files_of_the_ranks(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    """The reader of docs/cache_files.md uses nothing but numpy and safetensors."""
    assert ranks
    reader: dict[str, Any] = {}
    exec(blocks(ROOT / "docs" / "cache_files.md", "python")[0].partition("\nkeys = ")[0], reader)
    whole = kvcompile.load_cache(folder / "2x2")["layers"][0]
    content, _, pieces = reader["open_cache"](folder / "2x2")
    layer = dict(content["dict"])["layers"]["list"][0]["tuple"]
    for name, cache in zip((one["packed"] for one in layer), whole, strict=True):
        num_blocks, batch, heads, _ = cache.packed.shape
        for place in itertools.product(range(num_blocks), range(batch), range(heads)):
            assert reader["read_block"](pieces, name, *place).tolist() == cache.packed[place].tolist()
        with pytest.raises(IndexError, match="has no block"):
            reader["read_block"](pieces, name, num_blocks, 0, 0)


def test_one_process_notices_a_missing_file(ranks: list[dict[str, Any]]) -> None:
    assert all("is missing" in rank["errors"]["a missing file, one process"] for rank in ranks)


def test_a_save_that_fails_leaves_nothing_and_one_that_succeeds_replaces_the_last(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["errors"]["left over"] == ""
        assert rank["errors"]["replaced"] == "True"
        assert rank["errors"]["twice the same"] == ""
        assert rank["errors"]["a folder that cannot be flushed"] == ""


def test_a_save_deletes_only_files_that_ranks_have_written() -> None:
    names = [
        "0a1b-rank-0-of-2.safetensors",
        "notes.txt",
        "index.json",
        "../0a1b-rank-1-of-2.safetensors",
        "model.safetensors",
    ]
    assert names_of_parts({"files": [{"name": name} for name in names]}) == names[:1]


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [("bhtd", [2, 4, 70, 32], [2, 2, 70, 32]), ("btm", [2, 70, 128], [2, 70, 64]), ("btd", [2, 70, 32], None)],
)
def test_ranks_divide_the_heads_of_a_packed_tensor_also_where_they_share_a_dimension_with_channels(
    axes: str, shape: list[int], expected: list[int] | None
) -> None:
    layout = ["int8_per_token_head", "key", 32]
    content = {"packed": "keys", "layout": layout, "axes": axes, "start": 0, "growing": False, "shape": shape}
    divided = with_heads(content, lambda name, heads: heads // 2)
    assert divided["shape"] == (expected or shape)
    assert (head_dim_of(content, len(shape), "keys") is None) == (expected is None)
