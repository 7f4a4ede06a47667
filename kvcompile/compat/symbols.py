"""Private names for symbolic sizes. Without one of them this file cannot be imported.

``PythonPrinter`` writes an expression as Python, and ``sympy_interp`` computes it operation by operation. ``check``
lets a compiled graph assert a trace's assumption about a number that depends on the data of a call.
"""

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.printers import PythonPrinter as PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis

check = torch._check


def expression_of(number: Any) -> sympy.Expr:
    """The expression of a SymInt without the cases that the assumptions of its trace exclude.

    ``narrow`` adds a case for a start of -1. PyTorch 2.11 cannot compute such an expression in a graph.
    """
    env, expression = number.node.shape_env, number.node.expr
    chosen = {}
    for cases in expression.atoms(sympy.Piecewise):
        possible = [(value, condition) for value, condition in cases.args if not _is_false(env, condition)]
        if possible and possible[0][1] == sympy.true:
            chosen[cases] = possible[0][0]
    return expression.xreplace(chosen)


def without_excluded_cases(number: Any) -> Any:
    """A SymInt with the expression of :func:`expression_of`; an int if the expression is a number."""
    expression = expression_of(number)
    return number if expression == number.node.expr else number.node.shape_env.create_symintnode(expression, hint=None)


def hint_of(size: int | torch.SymInt) -> int:
    """The value of a size in the trace; 1 for a symbol without a value."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def binding_replaced_symbols(inputs: Sequence[Any]) -> list[Any]:
    """``inputs`` of a graph, where a symbolic size also binds the symbol that a guard has found to be equal.

    A guard on equal numbers of tokens may replace the symbol of an input size by the one of another tensor. Inductor
    then reads the latter from that tensor's sizes. If the tensor is packed, only the input size is left.
    """
    bound = {x.node._expr for x in inputs if isinstance(x, torch.SymInt)}
    result = list(inputs)
    for place, x in enumerate(inputs):
        if isinstance(x, torch.SymInt) and x.node.expr not in bound and isinstance(x.node.expr, sympy.Symbol):
            bound.add(x.node.expr)
            result[place] = x.node.shape_env.create_symintnode(x.node.expr, hint=x.node.hint)
    return result


def _is_false(env: Any, condition: sympy.Basic) -> bool:
    if isinstance(condition, sympy.And):
        return any(_is_false(env, part) for part in condition.args)
    if condition in (sympy.true, sympy.false):
        return bool(condition == sympy.false)
    return statically_known_true(env.create_symboolnode(sympy.Not(condition)))
