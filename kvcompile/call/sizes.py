"""Evaluate symbolic sizes of a compiled graph from the inputs of a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from kvcompile.compat.symbols import PythonPrinter

Size = int | torch.SymInt


@dataclass(frozen=True)
class SizeOfCall:
    """A size as a function of the run-time inputs of a graph. It can be pickled.

    Attributes:
        text: a Python expression.
        places: for each name in ``text``: the name, the position of an input, and the dimension that is read; None if
            the input itself is the number.
    """

    text: str
    places: tuple[tuple[str, int, int | None], ...] = ()

    def __call__(self, args: Sequence[Any]) -> int:
        numbers = (args[index] if dim is None else args[index].shape[dim] for _, index, dim in self.places)
        return self._evaluate(*map(int, numbers))

    @functools.cached_property
    def _evaluate(self) -> Callable[..., int]:
        # The text is safe: sympy's printer wrote it, and the shape environment named its symbols.
        return eval(f"lambda {', '.join(name for name, _, _ in self.places)}: {self.text}", {"math": math})

    def __reduce__(self) -> tuple[Any, ...]:
        return SizeOfCall, (self.text, self.places)


class SizeReader:
    """Turns sizes of a traced graph into functions of its run-time inputs."""

    def __init__(self, example_inputs: Sequence[Any]) -> None:
        """``example_inputs``: the graph's fake inputs. Each symbol must be an input or a dimension of an input."""
        self._places: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for index, value in enumerate(example_inputs):
            if isinstance(value, torch.SymInt):
                self._add(value, index, None)
            elif isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    self._add(size, index, dim)

    def _add(self, size: Size, index: int, dim: int | None) -> None:
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            self._places.setdefault(size.node.expr, (index, dim))

    def reader(self, size: Size) -> SizeOfCall:
        """A function from the graph's inputs to the value of ``size``."""
        if not isinstance(size, torch.SymInt):
            return SizeOfCall(str(size))
        expr = size.node.expr
        symbols = sorted(expr.free_symbols, key=str)
        return SizeOfCall(PythonPrinter().doprint(expr), tuple((str(s), *self._places[s]) for s in symbols))
