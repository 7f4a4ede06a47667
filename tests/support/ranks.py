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


def environment_of_ranks(store: dist.TCPStore, world_size: int) -> dict[str, str]:
    """The environment of processes that find each other in ``store``, a store of this process."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, str(SUPPORT)])), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def run_on_ranks(program: str, world_size: int, device: str, output: Path, *arguments: object) -> Any:
    """What ``program`` saves in ``output``, which is its last argument. It fails if the ranks wait for each other.

    Skips the test if there is no GPU for each rank.
    """
    if device == "cuda" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = environment_of_ranks(store, world_size)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, SUPPORT / "forked_ranks.py", world_size, SUPPORT / program, *arguments, output]
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(output, weights_only=False)
