"""The machine of a measurement: its device and the versions of its software."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name, compute capability and sizes of a CUDA device; name and threads of a CPU."""
    if device.type == "cpu":
        return {"name": cpu_name(), "threads": torch.get_num_threads(), "isa": torch.backends.cpu.get_cpu_capability()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
    }


def cpu_name() -> str:
    """The model name of the CPU."""
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Versions of Python, the packages, CUDA and the driver; None for a missing one."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "transformers": installed_version("transformers"),
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
    }


def installed_version(package: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
