"""Private names of Inductor's C++ code generation. Without one of them this file cannot be imported.

There is no fallback: generated code would leave elements of its results unwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.ir import ComputedBuffer
from torch.utils._sympy.functions import FloorDiv

from kvcompile.compat.replaced import ReplacedInside


def _complete_loops() -> Callable[[], None]:
    """Inductor splits a loop in C++ code only if the split leaves no remainder.

    To remove a division of a loop variable by 32, Inductor splits the loop into two. The inner one has 32 iterations.
    With 50 iterations before, it then drops the last 18, and their results are uninitialized memory
    (pytorch/pytorch#195582).
    """
    scheduling: Any = CppScheduling
    split = scheduling.try_loop_split

    def split_without_remainder(self: CppScheduling, nodes: list[Any]) -> list[Any]:
        return nodes if any(map(_has_remainder, nodes)) else split(self, nodes)

    def restore() -> None:
        scheduling.try_loop_split = split

    scheduling.try_loop_split = split_without_remainder
    return restore


complete_loops = ReplacedInside(_complete_loops)


def _has_remainder(node: Any) -> bool:
    """Whether a loop of ``node`` has iterations that are not known to be a multiple of a divisor of its variable."""
    if not isinstance(node.node, ComputedBuffer):
        return False
    (sizes, _), body, (variables, _) = node.node.get_default_sizes_body()
    size_of = dict(zip(variables, sizes, strict=False))
    divisions = (own for expr in body.indexing_exprs.values() for own in sympy.sympify(expr).find(FloorDiv))
    return any(
        base in size_of and sympy.Mod(size_of[base], divisor) != 0 for base, divisor in (d.args for d in divisions)
    )
