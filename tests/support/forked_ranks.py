"""Run programs on several ranks. Without GPUs they are forks of one process, which imports PyTorch once for all.

Each line of the standard input is a call, JSON with the fields of :class:`Call`. The answer to it is a line of JSON on
the standard output: ``status``, zero if all ranks ended well, and ``seconds``, the processor time of this process and
of all processes that it has waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.multiprocessing
from cheaper_compilation import in_one_piece_of_stack, make_compilation_cheaper
from decode_steps import step
from node_by_node import running_node_by_node
from processor_times import processor_seconds


@dataclass
class Call:
    """A program, its arguments and its environment.

    Attributes:
        output: the file for what the ranks print and for their errors.
        separate: whether the other ranks go on if one rank fails. Otherwise all ranks end, as under torchrun.
    """

    size: int
    program: str
    arguments: list[str]
    environment: dict[str, str]
    output: str
    separate: bool


def run_rank(rank: int, program: str, arguments: Sequence[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [program, *arguments]
    try:
        in_one_piece_of_stack(runpy.run_path)(program, run_name="__main__")
    except Exception as error:  # a fork must do what the interpreter does after an error
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        sys.exit(1)


def run_ranks(call: Call) -> None:
    os.environ |= call.environment
    output = os.open(call.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    gc.freeze()
    method = "spawn" if torch.cuda.is_available() else "fork"  # CUDA does not work in forks
    ranks = torch.multiprocessing.start_processes(
        run_rank, (call.program, call.arguments), call.size, join=not call.separate, start_method=method
    )
    if call.separate:
        for rank in ranks.processes:
            rank.join()


@functools.cache
def compile_once() -> None:
    """Compile a step once, so that the forks share the imports and preparations of a first compilation."""
    import kvcompile

    with running_node_by_node(operators=True), torch.no_grad():
        keys, values = torch.zeros(2, 1, 1, 64, 16).unbind()
        q, k, v = torch.zeros(3, 1, 1, 1, 16).unbind()
        compiled = torch.compile(step, backend=kvcompile.kvquant(policy="int8_per_token_head"), dynamic=False)
        compiled(q, k, v, keys, values, torch.tensor([0]))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def status_of(call: Call) -> int:
    """The exit status of a fork that starts the ranks."""
    for module in (Path(call.program).stem, "kvcompile.backend"):  # `import kvcompile` does not import the backend
        with contextlib.suppress(Exception):  # the ranks say what is wrong
            importlib.import_module(module)
    if not torch.cuda.is_available():
        compile_once()
    if fork := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    status = 1
    try:
        run_ranks(call)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    make_compilation_cheaper()
    for line in sys.stdin:
        status = status_of(Call(**json.loads(line)))
        print(json.dumps({"status": status, "seconds": processor_seconds()}), flush=True)
