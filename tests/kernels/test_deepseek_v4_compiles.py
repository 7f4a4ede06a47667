"""The DeepSeek-V4 kernels compile for sm_80 and sm_90 with Triton's own compiler; no GPU is needed."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from deepseek_v4_cases import Requests, empty_cache, poisoned_output, random_tokens
from formats_of_every_kind import in_turn

from kvcompile.kernels.deepseek_v4 import kernels
from kvcompile.kernels.lang.triton import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")

CPU = torch.device("cpu")


def instructions(kernel):
    """How often each machine instruction occurs in a kernel, by its name without operands."""
    names = re.findall(r"\t(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]+)\b", kernel.asm["sass"])
    return {name: names.count(name) for name in set(names)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("block_size", "capability"), in_turn([2, 5, 64], [90, 80]), indirect=["capability"])
def test_the_kernels_compile_to_wide_accesses_without_spills(block_size, compiled):
    requests = Requests.on_shuffled_pages([130, 4], [70, 4], block_size)
    k_cache = empty_cache(requests.num_blocks, block_size)
    kernels.quantize_and_insert_k_cache(random_tokens(100), k_cache, torch.arange(100), block_size)
    kernels.dequantize_and_gather_k_cache(poisoned_output(requests, 3), k_cache, *requests.to(CPU), 3)
    (insert,), (gather,) = (map(instructions, compiled[name]) for name in ("insert", "gather_of_pages"))
    for kernel in (insert, gather):
        assert not {"LDL", "STL"} & {name.split(".")[0] for name in kernel}
        accesses = {name: count for name, count in kernel.items() if name.startswith(("LDG", "STG"))}
        narrow = {name: count for name, count in accesses.items() if not name.endswith((".64", ".128"))}
        assert sum(narrow.values()) <= 5  # positions, lengths and pages
        assert not [name for name in narrow if name.startswith("STG")]
    assert "LDG.E.128" in insert
    assert "STG.E.128" in gather
    assert not [name for name in gather if name.startswith(("LDS", "STS"))]  # nothing passes through shared memory
