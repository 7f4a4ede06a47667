"""Names of Gluon, Triton's experimental language for warpgroups, that Triton 3.9 changed.

There is no fallback. Where Gluon has neither the old nor the new name, the kernel for Hopper does not compile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

# Starts a copy from global to shared memory. Triton 3.9 renamed it, and the old name raises an error.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# The method that reinterprets shared memory is public since Triton 3.9.
_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpreted(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """A view of shared memory with another dtype, shape and layout."""
    if _IS_PUBLIC:
        return memory.reinterpret(dtype, shape, layout)
    else:  # noqa: RET505 - Triton compiles only one branch
        return memory._reinterpret(dtype, shape, layout)
