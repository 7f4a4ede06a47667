"""A private method of Gluon, Triton's experimental language for warpgroups.

Nothing takes over. Where Gluon lacks it, the kernel for Hopper does not compile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def reinterpreted(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory, seen with another dtype, shape and layout."""
    return memory._reinterpret(dtype, shape, layout)
