"""The command line of the fuzzer."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
import warnings
from collections import Counter
from typing import Any

import torch

from fuzz.draw import programs
from fuzz.mutations import mutation_table
from fuzz.search import Failure, Statistics, search

_BATCH = 10
"""Programs of one seed."""

_MAX_SEEDS = 100_000
"""More seeds than a run reaches."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 1 if a program failed, or if a fault without an explanation was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to look for programs (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    parser.add_argument("--inductor", action="store_true", help="run generated code, not node by node")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--mutations", action="store_true", help="plant each fault, and print which are caught")
    parser.add_argument("--tries", type=int, default=12, help="programs for one fault at most (default: 12)")
    parser.add_argument("--with-seeds", action="store_true", help="plant faults in the fixed seeds' programs, too")
    given = parser.parse_args(arguments)
    with multiprocessing.get_context("spawn").Pool(given.processes, initializer=quiet, maxtasksperchild=8) as pool:
        if given.mutations:
            return mutation_table(pool, given.tries, given.with_seeds)
        return _search_for(given, pool)


def quiet() -> None:
    """Settings of a process: one thread, no warnings about refused sites, and less collection of garbage."""
    import gc

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("kvcompile").setLevel(logging.ERROR)
    gc.set_threshold(20_000, 20, 20)
    trace = logging.getLogger("torch.__trace")
    trace.propagate, trace.parent = True, None


def _search_for(given: argparse.Namespace, pool: Any) -> int:
    begin = time.time()
    how = {"device": given.device, "generate_code": given.inductor}
    tasks = ((number, begin + 60 * given.minutes, how) for number in range(given.seed, given.seed + _MAX_SEEDS))
    total, failures, last = Statistics(), 0, given.seed
    for number, found, failure in pool.imap_unordered(_batch, tasks):
        total.add(found)
        last = max(last, number if found.programs else last)
        if failure:
            failures += 1
            print(f"seed {number}:\n{failure}\n", flush=True)
    _print(total, failures, given.seed, last, time.time() - begin)
    return int(failures > 0)


def _batch(task: tuple[int, float, dict[str, Any]]) -> tuple[int, Statistics, str]:
    """The number of a seed, the counts of its programs, and the first failure as text; nothing after the end."""
    number, end, how = task
    found = Statistics()
    try:
        if time.time() < end:
            search(programs(), number, _BATCH, found=found, **how)
    except Failure as failure:
        return number, found, str(failure)
    return number, found, ""


def _print(total: Statistics, failures: int, first: int, last: int, seconds: float) -> None:
    rate = total.programs / seconds
    print(f"{total.programs} programs of seeds {first} to {last} in {seconds:.0f} s: {rate:.2f} a second")
    print(f"{failures} failures; {_counts(total.verdicts)}")
    print(f"{total.safe} programs without a twist, {100 * total.share_rewritten:.0f} % of them packed")
    print(f"sites: {_counts(total.outcomes)}")
    print(f"calls that ran plain: {sum(total.plain_calls.values())}")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
