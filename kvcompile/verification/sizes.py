"""Values for the symbolic sizes of a graph: the sizes of its example inputs, and other values that its guards allow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

Symbols = Mapping[sympy.Symbol, int]

_TRIES = 30
_LENGTHS = (1, 2, 3, 5, 17, 63, 64, 65, 127, 128, 130)
"""Candidates for a size: small numbers, and numbers near a multiple of the block size."""


class Sizes:
    """The symbolic sizes of a graph's inputs.

    Attributes:
        hints: the value of each symbol in the example inputs.
    """

    def __init__(self, example_inputs: Sequence[Any]) -> None:
        self.hints: dict[sympy.Symbol, int] = {}
        self._shape_env: Any = None
        for size in _symbolic_sizes(example_inputs):
            self._shape_env = size.node.shape_env
            for symbol in size.node.expr.free_symbols:
                hint = self._shape_env.backed_var_to_val.get(symbol)
                if hint is not None:
                    self.hints[symbol] = int(hint)

    def drawn(self, rng: random.Random) -> Symbols:
        """Random values that the guards of the graph allow; the hints if none are found."""
        for _ in range(_TRIES if self.hints else 0):
            symbols = {symbol: rng.choice((hint, *_LENGTHS)) for symbol, hint in self.hints.items()}
            if self.allow(symbols):
                return symbols
        return self.hints

    def allow(self, symbols: Symbols) -> bool:
        """Whether the guards of the graph allow these sizes."""
        if symbols == self.hints:
            return True
        ranges = self._shape_env.var_to_range
        if any(not ranges[symbol].lower <= value <= ranges[symbol].upper for symbol, value in symbols.items()):
            return False
        return all(_holds(guard.expr, symbols) for guard in self._shape_env.guards)

    def __call__(self, size: Any, symbols: Symbols) -> int:
        """The value of a size."""
        return int(size.node.expr.xreplace(dict(symbols))) if isinstance(size, torch.SymInt) else int(size)

    def matching(self, shape: Sequence[Any], actual: Sequence[int]) -> dict[sympy.Symbol, int] | None:
        """The values of the symbols in ``shape`` that make it ``actual``; None if no values do."""
        found: dict[sympy.Symbol, int] = {}
        if len(shape) != len(actual):
            return None
        for size, value in zip(shape, actual, strict=True):
            expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if isinstance(expr, sympy.Symbol):
                if found.setdefault(expr, value) != value:
                    return None
            elif expr.xreplace(found) != value:
                return None
        return found


def _holds(expr: Any, symbols: Symbols) -> bool:
    result = expr.xreplace(dict(symbols))
    return bool(result) if result in (sympy.true, sympy.false) or result.is_number else bool(result.free_symbols)


def _symbolic_sizes(example_inputs: Sequence[Any]) -> Iterator[torch.SymInt]:
    for value in example_inputs:
        sizes = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        yield from (size for size in sizes if isinstance(size, torch.SymInt))
