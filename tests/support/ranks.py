"""Run a program of this folder on several ranks, with gloo on a CPU or with NCCL and a GPU for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

SUPPORT = Path(__file__).parent

SECONDS = 300
"""Ranks that wait for each other end after this time."""


def save_results(result: Any, output: Path) -> None:
    """Save the results of all ranks in ``output``, a list, and leave the process group."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    if dist.get_rank() == 0:
        torch.save(gathered, output)
    dist.destroy_process_group()


def run_on_ranks(program: str, world_size: int, device: str, output: Path, *arguments: object) -> Any:
    """What ``program`` saves in ``output``, which is its last argument. It fails if the ranks wait for each other.

    Skips the test if there is no GPU for each rank.
    """
    if device == "cuda" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, str(SUPPORT)])), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [*torchrun, str(SUPPORT / program), *map(str, arguments), str(output)],
        env=environment, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return torch.load(output, weights_only=False)
