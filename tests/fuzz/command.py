"""The command line of the fuzzer."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
import warnings
from pathlib import Path

import torch
from cheaper_compilation import make_compilation_cheaper, skip_present_objects_in_collections

from fuzz.files import search_until
from fuzz.long_run import LongRun
from fuzz.mutations import mutation_table


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 1 if a program failed, or if a fault without an explanation was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to look for programs (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=cores, help="default: one for each core of this process")
    parser.add_argument("--inductor", action="store_true", help="run generated code, not node by node")
    parser.add_argument("--verify", action="store_true", help="compile with verify=True, too")
    parser.add_argument("--counts", type=Path, metavar="FILE.json", help="write the counts to a file, each minute")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--mutations", action="store_true", help="plant each fault, and print which are caught")
    parser.add_argument("--files", action="store_true", help="change files that users get from others, not programs")
    parser.add_argument("--kernels", action="store_true", help="call kernels with random sizes; no programs")
    parser.add_argument("--tries", type=int, default=20, help="programs for one fault at most (default: %(default)s)")
    parser.add_argument("--with-seeds", action="store_true", help="plant faults in the fixed seeds' programs, too")
    given = parser.parse_args(arguments)
    if given.mutations:
        with multiprocessing.get_context("spawn").Pool(given.processes, initializer=quiet, maxtasksperchild=8) as pool:
            return mutation_table(pool, given.tries, given.with_seeds)
    end = time.time() + 60 * given.minutes
    if given.files:
        return int(search_until(lambda: time.time() >= end, given.seed) > 0)
    if given.kernels:
        if given.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            parser.error("--kernels needs --device cuda, or TRITON_INTERPRET=1 for Triton's interpreter")
        from fuzz.kernel_calls import search_until as search_calls  # not above: it needs Triton

        return int(search_calls(end, given.seed, given.processes, given.device, quiet) > 0)
    how = {"device": given.device, "generate_code": given.inductor, "verify": given.verify}
    run = LongRun(given.seed, how, given.counts)
    run.until(end, given.processes, quiet)
    run.print()
    return int(run.failures > 0)


def quiet() -> None:
    """Settings of a process: one thread, no warnings about refused sites, and cheaper compilation."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("kvcompile").setLevel(logging.ERROR)
    make_compilation_cheaper()
    skip_present_objects_in_collections()
