"""Evaluate symbolic sizes of a compiled graph from the inputs of a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from kvcompile.compat.symbols import PythonPrinter

Size = int | torch.SymInt


class SizeReader:
    """Turns sizes of a traced graph into functions of its run-time inputs."""

    def __init__(self, example_inputs: Sequence[Any]) -> None:
        """``example_inputs``: the graph's fake inputs. Each symbol must be an input or a dimension of an input."""
        self._sources: dict[sympy.Symbol, Callable[[Sequence[Any]], int]] = {}
        for index, value in enumerate(example_inputs):
            if isinstance(value, torch.SymInt):
                self._add(value, functools.partial(_argument, index))
            elif isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    self._add(size, functools.partial(_dimension, index, dim))

    def _add(self, size: Size, read: Callable[[Sequence[Any]], int]) -> None:
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            self._sources.setdefault(size.node.expr, read)

    def reader(self, size: Size) -> Callable[[Sequence[Any]], int]:
        """A function from the graph's inputs to the value of ``size``."""
        if not isinstance(size, torch.SymInt):
            return lambda args: size
        expr = size.node.expr
        symbols = sorted(expr.free_symbols, key=str)
        sources = [self._sources[symbol] for symbol in symbols]
        names = ", ".join(str(symbol) for symbol in symbols)
        # The text is safe: sympy's printer wrote it, and the shape environment named its symbols.
        evaluate = eval(f"lambda {names}: {PythonPrinter().doprint(expr)}", {"math": math})
        return lambda args: evaluate(*(source(args) for source in sources))


def _argument(index: int, args: Sequence[Any]) -> int:
    return int(args[index])


def _dimension(index: int, dim: int, args: Sequence[Any]) -> int:
    return int(args[index].shape[dim])
