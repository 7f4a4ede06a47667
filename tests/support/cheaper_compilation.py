"""Settings of a process that compiles many small graphs: tests, and the fuzzer."""

from __future__ import annotations

import gc
import logging

import torch


def make_compilation_cheaper() -> None:
    """Do without the work of a compilation that no test looks at; compiled code stays the same.

    Compilation makes many objects and little garbage, so the collector runs less often, and not after each graph.
    Dynamo measures the time of a graph's guards only for its log, after it has flushed the processor's caches. PyTorch
    writes out each graph as soon as its trace logger has a handler, and pytest adds one to every logger that does not
    propagate: this logger propagates, to no parent.
    """
    gc.set_threshold(20_000, 20, 20)
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    trace = logging.getLogger("torch.__trace")
    trace.propagate, trace.parent = True, None


def skip_present_objects_in_collections() -> None:
    """Exclude all present objects from garbage collection: imports made most of them, and they live to the end."""
    gc.collect()
    gc.freeze()
