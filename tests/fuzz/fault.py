"""A fault of the project: a function that replaces another one.

A fault drops a check, or changes a computation slightly. :mod:`fuzz.mutations` runs the fuzzer against each of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

Faulty = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        owner: the module, class or dict that holds the function.
        name: the name or key of the function in ``owner``.
        make: takes the function and returns the faulty one.
    """

    owner: Any
    name: Any
    make: Callable[[Faulty], Faulty]

    @property
    def title(self) -> str:
        return self.make.__name__.replace("_", " ")

    @property
    def place(self) -> str:
        """The function that is faulty, for a table."""
        path = self.original.__module__.removeprefix("kvcompile.").replace(".", "/")
        return f"{path}.py: {self.original.__qualname__}"

    @property
    def original(self) -> Faulty:
        held = self.owner[self.name] if isinstance(self.owner, dict) else vars(self.owner)[self.name]
        function: Faulty = held.fget if isinstance(held, property) else held
        return function

    def replaced_by(self, function: Faulty) -> contextlib.AbstractContextManager[Any]:
        """Inside the ``with`` block, ``function`` is in the place of the function."""
        if isinstance(self.owner, dict):
            return mock.patch.dict(self.owner, {self.name: function})
        held = vars(self.owner)[self.name]
        return mock.patch.object(self.owner, self.name, property(function) if isinstance(held, property) else function)

    def planted(self) -> contextlib.AbstractContextManager[Any]:
        """Inside the ``with`` block, the project has this fault."""
        return self.replaced_by(self.make(self.original))


def collecting(faults: list[Fault]) -> Callable[..., Any]:
    """A decorator, with the owner and the name of a function, that adds a fault of this function to ``faults``."""

    def fault(owner: Any, name: Any) -> Callable[[Callable[[Faulty], Faulty]], Callable[[Faulty], Faulty]]:
        def add(make: Callable[[Faulty], Faulty]) -> Callable[[Faulty], Faulty]:
            faults.append(Fault(owner, name, make))
            return make

        return add

    return fault


Event = tuple[str, str]
"""The title of a fault, and the outcome of a call of its function: raised, None, True, False or returned."""


@contextlib.contextmanager
def noting_calls(faults: Iterable[Fault]) -> Iterator[set[Event]]:
    """The calls of the functions of faults inside the block. A fault without a call cannot change the result."""
    called: set[Event] = set()
    with contextlib.ExitStack() as stack:
        for each in faults:
            stack.enter_context(each.replaced_by(_noting(each.original, each.title, called)))
        yield called


def _noting(function: Faulty, title: str, called: set[Event]) -> Faulty:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception:
            called.add((title, "raised"))
            raise
        called.add((title, str(result) if result is None or isinstance(result, bool) else "returned"))
        return result

    return noting


def nothing(original: Faulty) -> Faulty:
    """A function that does nothing, such as a check that is dropped."""
    return lambda *args, **kwargs: None
