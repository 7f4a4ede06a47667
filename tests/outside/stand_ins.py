"""Stand-ins for packages that other projects import and that their caches and attention do not use."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock


@contextlib.contextmanager
def stand_ins(*packages: str) -> Iterator[None]:
    """Inside the ``with`` block, importing one of the ``packages`` gives a stand-in if it is not installed."""
    missing = {name for name in packages if importlib.util.find_spec(name) is None}

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
            is_missing = name.split(".")[0] in missing
            return importlib.machinery.ModuleSpec(name, Finder, is_package=True) if is_missing else None

        @staticmethod
        def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
            return mock.MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

        @staticmethod
        def exec_module(module: ModuleType) -> None:
            """A stand-in has no code."""

    sys.meta_path.append(Finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)  # type: ignore[arg-type]
