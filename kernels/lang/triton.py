"""The import of Triton for all other files. The files with kernels in Gluon also import Gluon.

Triton exists for Linux only. Without it ``triton`` and ``tl`` are None, and :func:`jit`, :func:`constexpr_function` and
:func:`constant` return stand-ins. Every file of kernels can then still be imported, and the plain-PyTorch paths run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvcompile.compat.triton_names import is_interpreted

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


INTERPRETED = is_interpreted()


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """``triton.jit``, or the function itself where there is no Triton to run it."""
    if fn is None:
        return functools.partial(jit, **options)
    return fn if triton is None else triton.jit(fn, **options)


def constexpr_function(fn: Callable) -> Any:
    """``triton.constexpr_function``: callable in kernels, at compile time, on compile-time values."""
    return fn if triton is None else triton.constexpr_function(fn)


def constant(value: Any) -> Any:
    """``tl.constexpr(value)``, which kernels may read as a global; ``value`` itself where there is no Triton."""
    return value if tl is None else tl.constexpr(value)
