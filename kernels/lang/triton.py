"""The one place that imports Triton; kernels in Gluon import Gluon beside it.

Triton is missing on a machine without Linux. Then ``triton`` and ``tl`` are None, :func:`jit` returns the plain
function, and only the plain-PyTorch paths can run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


INTERPRETED = triton is not None and triton.knobs.runtime.interpret


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """``triton.jit``, or the function itself where there is no Triton to run it."""
    if fn is None:
        return functools.partial(jit, **options)
    return fn if triton is None else triton.jit(fn, **options)


def constexpr_function(fn: Callable) -> Any:
    """``triton.constexpr_function``: callable in kernels, at compile time, on compile-time values."""
    return fn if triton is None else triton.constexpr_function(fn)
