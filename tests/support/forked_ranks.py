"""Run a program on several ranks. Without GPUs they are forks of one process, which imports PyTorch once for all.

``python forked_ranks.py SIZE PROGRAM ARGUMENT...``: a rank that fails ends the others, as under torchrun. After the
option ``--separate`` it ends no other.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.multiprocessing
from cheaper_compilation import in_one_piece_of_stack, make_compilation_cheaper


def run_rank(rank: int, program: str, arguments: Sequence[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [program, *arguments]
    try:
        in_one_piece_of_stack(runpy.run_path)(program, run_name="__main__")
    except Exception as error:  # a fork ends without what the interpreter does at the end of a program
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        sys.exit(1)


if __name__ == "__main__":
    separate = sys.argv[1] == "--separate"
    size, program, *arguments = sys.argv[1 + separate :]
    make_compilation_cheaper()
    for module in (Path(program).stem, "kvcompile.backend"):  # `import kvcompile` alone does not import the backend
        importlib.import_module(module)
    gc.freeze()
    method = "spawn" if torch.cuda.is_available() else "fork"  # CUDA does not work in forks
    ranks = torch.multiprocessing.start_processes(
        run_rank, (program, arguments), int(size), join=not separate, start_method=method
    )
    if separate:
        for rank in ranks.processes:
            rank.join()
