"""Where PyTorch's tools look: counters, times, traces. Without one of these names, a stand-in does nothing.

A stand-in costs a release of PyTorch the view of one tool. Compilation and results are the same.
"""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from contextlib import nullcontext
from typing import Any


def _found(module: str, name: str, stand_in: Any) -> Any:
    """A name of a module, or ``stand_in`` where this release of PyTorch lacks it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return stand_in


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


# Counts of events, which reports and PyTorch's own tools read.
counters = _found("torch._dynamo.utils", "counters", defaultdict(Counter))

# Times of passes, in ``torch._dynamo.utils.compile_times()`` and in traces.
dynamo_timed = _found("torch._dynamo.utils", "dynamo_timed", nullcontext)

# Artifacts of ``TORCH_TRACE``, which tlparse shows.
trace_structured = _found("torch._logging", "trace_structured", _nothing)

# Formats nothing, unless depyf is active: depyf replaces its code by a dump of the graph.
lazy_format_graph_code = _found("torch._dynamo.utils", "lazy_format_graph_code", _nothing)


def depyf_is_active() -> bool:
    """Whether depyf writes the graphs that :func:`lazy_format_graph_code` gets."""
    code = getattr(lazy_format_graph_code, "__code__", None)
    return code is not None and "depyf" in code.co_filename


# The reasons of graph breaks. Without them, a message names the line after the break, and not the break.
graph_break_reasons = _found("torch._dynamo.utils", "graph_break_reasons", [])

_CompileContext = _found("torch._guards", "CompileContext", None)


def compile_id() -> str:
    """The identifier of the running compilation, as in PyTorch's logs."""
    current = _CompileContext.current_compile_id() if _CompileContext is not None else None
    return str(current or "outside of Dynamo")
