"""Run a program on several ranks that are forks of one process, which imports PyTorch once for all of them.

``python forked_ranks.py SIZE PROGRAM ARGUMENT...``: a rank that fails ends the others, as under torchrun.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.multiprocessing
from cheaper_compilation import make_compilation_cheaper


def run_rank(rank: int, program: str, arguments: Sequence[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    size, program, *arguments = sys.argv[1:]
    make_compilation_cheaper()
    for module in (Path(program).stem, "kvcompile.backend"):  # `import kvcompile` alone does not import the backend
        importlib.import_module(module)
    gc.freeze()
    torch.multiprocessing.start_processes(run_rank, (program, arguments), int(size), start_method="fork")
