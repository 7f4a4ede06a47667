"""Replace parts of PyTorch while blocks of code run, in any number of threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class ReplacedInside:
    """A ``with`` block inside of which a part of PyTorch is replaced.

    All threads share the part. The first block that a thread enters replaces it, and the last block that ends restores
    it, so blocks of different threads may overlap in any order.
    """

    def __init__(self, replace: Callable[[], Callable[[], None]]) -> None:
        """Takes a function that replaces the part. It returns the function that restores it."""
        self._replace = replace
        self._lock = threading.Lock()
        self._blocks = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._blocks == 0:
                self._restore = self._replace()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._blocks == 0:
                    self._restore()
