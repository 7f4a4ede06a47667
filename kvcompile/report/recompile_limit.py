"""The note that Dynamo has stopped compiling a function, so its further steps run in eager code.

Dynamo compiles a function again when its guards fail, at most ``torch._dynamo.config.recompile_limit`` times. A Python
attribute of the model that changes at each step, such as a counter, uses up this limit.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch.fx import Graph

from kvcompile.compat.observing import on_recompile_limit
from kvcompile.passes.graph.breaks import function_of
from kvcompile.report.report import note

_FUNCTION = re.compile(r"'(?P<function>.*)' \((?P<file>.*):(?P<line>\d+)\)$")
_GUARD = re.compile(r"(?:\d+/\d+: )?(?P<guard>.*?)(?:\s+# .*)?$")

_DYNAMIC_INTEGERS = "torch._dynamo.config.allow_unspec_int_on_nn_module"

_functions: set[tuple[str, str]] = set()
"""The files and names of the functions that contain attention."""


def watch(graph: Graph) -> None:
    """Write the note if Dynamo stops compiling the function of ``graph``, a graph with attention."""
    function = function_of(graph)
    if function is not None:
        _functions.add(function)
        on_recompile_limit(_tell)


def _tell(limit: str, function: str, reason: str) -> None:
    found = _FUNCTION.match(function)
    if found is None or (found["file"], found["function"]) not in _functions:
        return
    where = f"{found['function']} ({Path(found['file']).name}:{found['line']})"
    guard = _GUARD.match(reason.splitlines()[0] if reason else "")
    last = f"; the last recompilation was due to {guard['guard']}" if guard is not None and guard["guard"] else ""
    remedy = (
        f"set {_DYNAMIC_INTEGERS} = True, or keep the number that changes in a tensor"
        if _DYNAMIC_INTEGERS in reason
        else f"keep what changes from call to call in tensors, or raise torch._dynamo.config.{limit}"
    )
    note(
        f"{where} is not compiled again, and steps that need new code run in eager code, because Dynamo's {limit} is "
        f"reached{last}; {remedy}"
    )
