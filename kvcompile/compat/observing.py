"""Names through which PyTorch's tools get counters, times and traces. Stand-ins that do nothing replace missing names.

With a stand-in, one tool shows nothing. Compilation and results are the same.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
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

# Formats the graph only if depyf is active: depyf replaces the code of this function by code that dumps the graph.
lazy_format_graph_code = _found("torch._dynamo.utils", "lazy_format_graph_code", _nothing)


def depyf_is_active() -> bool:
    """Whether depyf writes the graphs that :func:`lazy_format_graph_code` gets."""
    code = getattr(lazy_format_graph_code, "__code__", None)
    return code is not None and "depyf" in code.co_filename


# The reasons of graph breaks. Without them, a message names the line after the break instead of the break.
graph_break_reasons = _found("torch._dynamo.utils", "graph_break_reasons", [])

OnRecompileLimit = Callable[[str, str, str], None]
"""Takes the name of the limit, the function, and the reason of the last recompilation, as Dynamo's log has them."""


class _RecompileLimits(logging.Filter):
    """Reads Dynamo's warnings that it stops compiling a function. It lets every record pass."""

    def __init__(self) -> None:
        super().__init__()
        self.tell: OnRecompileLimit | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        is_limit = str(record.msg).startswith("torch._dynamo hit config.")
        if self.tell is not None and is_limit and isinstance(record.args, tuple) and len(record.args) > 3:
            limit, _, function, reason, *_ = map(str, record.args)
            self.tell(limit, function, reason)
        return True


_recompile_limits = _RecompileLimits()


def on_recompile_limit(tell: OnRecompileLimit) -> None:
    """Call ``tell`` whenever Dynamo reaches a recompile limit and runs a function eagerly from then on.

    Dynamo has no hook for this event. It logs a warning.
    """
    _recompile_limits.tell = tell
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_recompile_limits)


_CompileContext = _found("torch._guards", "CompileContext", None)


def compile_id() -> str:
    """The identifier of the running compilation, as in PyTorch's logs."""
    current = _CompileContext.current_compile_id() if _CompileContext is not None else None
    return str(current or "outside of Dynamo")
