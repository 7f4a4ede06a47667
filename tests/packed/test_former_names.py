"""Caches that a former version saved with ``torch.save`` still load, although their modules have moved."""

from __future__ import annotations

import io
import pickletools
import zipfile

import pytest
import torch
from packed_caches import INT8, values
from torch import Tensor

from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor

FORMER = {name: f"kvcompile.packed_{name}" for name in ("tensor", "pool", "stack")}


def saved_by_a_former_version(value: object) -> io.BytesIO:
    """A file of ``torch.save`` with the names of the modules before the move."""
    present, former = io.BytesIO(), io.BytesIO()
    torch.save(value, present)
    with zipfile.ZipFile(present) as old, zipfile.ZipFile(former, "w", zipfile.ZIP_STORED) as new:
        for item in old.infolist():
            content = old.read(item)
            if item.filename.endswith("data.pkl"):
                for name, former_name in FORMER.items():
                    content = content.replace(f"ckvcompile.packed.{name}\n".encode(), f"c{former_name}\n".encode())
                named = [argument for opcode, argument, _ in pickletools.genops(content) if opcode.name == "GLOBAL"]
                assert any(argument.startswith("kvcompile.packed_") for argument in named)
                assert not any(argument.startswith("kvcompile.packed.") for argument in named)
            new.writestr(item, content)
    former.seek(0)
    return former


def caches() -> dict[str, Tensor]:
    head_dim = INT8.head_dim
    return {
        "cache": PackedTensor.from_dense(values(2, 3, 70, head_dim), INT8),
        "pool": PackedPool.from_dense(values(9, 5, 3, head_dim), INT8),
        "stack": PackedStack.from_dense(values(2, 2, 3, 70, head_dim), {(0,): (INT8, "bhtd")}),
    }


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_with_former_names_loads(weights_only: bool) -> None:
    expected = caches()
    loaded = torch.load(saved_by_a_former_version(expected), weights_only=weights_only)
    for name, cache in expected.items():
        assert type(loaded[name]) is type(cache)
        assert torch.equal(loaded[name].dequantize(), cache.dequantize())
