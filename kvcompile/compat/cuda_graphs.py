"""Errors of Inductor's CUDA graphs, by private names."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch._inductor import exc

# Raised if Inductor cannot compile a graph. Without the name, such an error is not told from others.
_INDUCTOR_ERROR: type[Exception] | tuple[()] = getattr(exc, "InductorError", ())

_TREES, _WITHOUT_RECORDING = "cudagraph_trees.py", "run_eager"
"""The file of Inductor that records and replays CUDA graphs, and its function that runs a step before it is recorded.

Without these names, fewer errors are told from others.
"""

_OVERWRITTEN = "output of CUDAGraphs that has been overwritten"
"""A part of the message on a tensor that was read after the next replay; C++ code raises it wherever it is read."""


def may_come_from_recording(error: Exception) -> bool:
    """Whether a step that is recorded as a CUDA graph may run without one although it raised ``error``.

    That is, Inductor could not compile the step, or a CUDA graph was not recorded or replayed, or the step read what an
    earlier step returned. An error of the step itself, or a lack of memory, comes back without CUDA graphs, too.
    """
    if isinstance(error, _INDUCTOR_ERROR) or _OVERWRITTEN in str(error):
        return True
    if isinstance(error, torch.OutOfMemoryError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    functions = {frame.name for frame in frames if Path(frame.filename).name == _TREES}
    return bool(functions) and _WITHOUT_RECORDING not in functions
