"""Run a program of this folder on several ranks, with gloo on a CPU or with NCCL and a GPU for each rank."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import processor_times
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


_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONHASHSEED": "7"}
"""The environment of the server, whose hashes of texts are fixed. The hashes of this process are random."""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process whose forks are the ranks of all programs, ``forked_ranks.py``. It ends with this one."""
    search = os.pathsep.join(filter(None, [*sys.path, str(SUPPORT)]))
    server = subprocess.Popen(
        [sys.executable, str(SUPPORT / "forked_ranks.py")],
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": search},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    atexit.register(server.communicate)
    return server


def call_ranks(program: str, size: int, device: str, *arguments: object, log: Path, separate: bool = False) -> int:
    """Run ``program`` on ``size`` ranks, which find each other in a store of this process, as under torchrun.

    Args:
        program: the name of a file in this folder.
        size: the number of ranks.
        device: ``cpu`` or ``cuda``.
        arguments: what the program is called with.
        log: the file for what the ranks print, and for their errors.
        separate: whether the other ranks go on if one rank fails.

    Returns:
        The exit status, zero if no rank failed.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    call = {
        "size": size, "program": str(SUPPORT / program), "arguments": [*map(str, arguments)],
        "environment": environment, "output": str(log), "separate": separate,
    }  # fmt: skip
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print(json.dumps(call), file=server.stdin, flush=True)
        assert select.select([server.stdout], [], [], SECONDS)[0], f"ranks run for {SECONDS} s: {log.read_text()}"
        answer = json.loads(server.stdout.readline())
    except BaseException:  # a late answer would be taken for the answer to the next call
        os.killpg(server.pid, signal.SIGKILL)
        _server.cache_clear()
        raise
    processor_times.elsewhere[server.pid] = answer["seconds"]
    return int(answer["status"])


def run_on_ranks(program: str, world_size: int, device: str, output: Path, *arguments: object) -> Any:
    """The results that ``program`` saves in ``output``, its last argument. The test fails if ranks wait for each other.

    Skips the test if there is no GPU for each rank.
    """
    if device == "cuda" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    log = output.with_suffix(".log")
    status = call_ranks(program, world_size, device, *arguments, output, log=log)
    assert status == 0, log.read_text()
    return torch.load(output, weights_only=False)
