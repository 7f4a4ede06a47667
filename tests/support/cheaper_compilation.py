"""Settings of a process that compiles many small graphs: tests, and the fuzzer."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import torch


def make_compilation_cheaper() -> None:
    """Skip work of a compilation that no test checks; compiled code stays the same.

    Compilation makes many objects and little garbage, so the collector runs less often, and not after each graph.
    Dynamo measures the time of a graph's guards only for its log, after it has flushed the processor's caches, and
    writes the whole stack of each change of an object into its log. PyTorch
    writes out each graph as soon as its trace logger has a handler, and pytest adds one to every logger that does not
    propagate: this logger propagates, to no parent.
    """
    gc.set_threshold(100_000, 20, 20)
    torch._dynamo.config.run_gc_after_compile = False
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):  # from PyTorch 2.11 on
        torch._dynamo.config.side_effect_replay_policy = "silent"
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    trace = logging.getLogger("torch.__trace")
    trace.propagate, trace.parent = True, None


def make_code_generation_cheaper() -> None:
    """Inductor writes the same code in less time, and the C++ compiler translates it without optimizing it.

    Inductor prepares its table of operators and dtypes anew for each line of a kernel.
    """
    from torch._inductor import cpp_builder
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    if hasattr(DtypePropagationOpsHandler.__init__, "__wrapped__"):
        return
    prepare = DtypePropagationOpsHandler.__init__

    @functools.wraps(prepare)
    def prepare_once(handler: Any) -> None:
        if not vars(handler):
            prepare(handler)

    DtypePropagationOpsHandler.__init__ = prepare_once
    flags_of = cpp_builder._get_optimization_cflags

    def without_optimization(*args: Any, **more: Any) -> tuple[list[str], list[str]]:
        cflags, ldflags = flags_of(*args, **more)
        return ["O0" if flag.startswith("O") else flag for flag in cflags], ldflags

    cpp_builder._get_optimization_cflags = without_optimization


def in_one_piece_of_stack(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose calls of further functions lie in one piece of memory.

    Python keeps frames in pieces of 16 KiB. A loop that calls a function at the end of a piece allocates and frees the
    next one in each turn, and compilation is deep enough to meet many ends. The frame of ``call`` needs half of a large
    piece, so that the other half is left for the frames above it.
    """

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        return function(*args, **more)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return call


_SLOTS = 2**17
"""The size of a frame that needs a piece of 2 MiB, in slots of 8 bytes; memory that is not used is never touched."""


def skip_present_objects_in_collections() -> None:
    """Exclude all present objects from garbage collection: imports made most of them, and they live to the end."""
    gc.collect()
    gc.freeze()
