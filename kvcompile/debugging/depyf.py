"""depyf's dump, with as little influence on the program as possible.

``depyf.prepare_debug`` alone would run the decompiled code in place of Dynamo's, print a traceback for code that it
cannot decompile, and raise at its end if it cannot dump a function. Here decompiled code is only for reading, and
problems go to a file.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any
from unittest import mock

from kvcompile.compat.recompiling import code_loader
from kvcompile.errors import KVCompileError

PROBLEMS = "problems.txt"


def check_depyf() -> None:
    """Raise KVCompileError if depyf is missing, or if a dump of depyf is open already."""
    try:
        from depyf.explain.global_variables import data
    except ImportError as error:
        remedy = "pip install depyf, or pass depyf=False to skip its part of the dump"
        raise KVCompileError(f"debug() needs depyf ({error}): {remedy}") from error
    if data["is_inside_prepare_debug"]:
        raise KVCompileError("debug() runs depyf itself; end the block of depyf.prepare_debug, or pass depyf=False")


@contextlib.contextmanager
def dumping_with_depyf(folder: Path) -> Iterator[None]:
    """Dump everything that Dynamo compiles inside the ``with`` block into ``folder``, in depyf's form."""
    from depyf.explain import enable_debugging

    problems: list[str] = []
    try:
        with _without_side_effects(problems), enable_debugging.prepare_debug(str(folder)):
            problems.clear()  # drops depyf's warning on entry that the program should run all its branches
            yield
    finally:
        if problems:
            folder.joinpath(PROBLEMS).write_text("\n\n".join(problems) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _without_side_effects(problems: list[str]) -> Iterator[None]:
    """Keep depyf from changing the code that runs, from raising and from printing; append failures to ``problems``."""
    import depyf.explain
    from depyf.explain import enable_debugging, utils

    dump_src, cache_entries = depyf.explain.dump_src, utils._debug_get_cache_entry_list

    class ReadOnlyHook(enable_debugging.DebuggableHook):
        """Decompiles Dynamo's bytecode, and lets the bytecode itself run."""

        def __call__(self, code: CodeType, new_code: CodeType) -> None:
            with _noting(problems, code):
                super().__call__(code, new_code)

    def safe_dump_src(code: CodeType, module: dict[str, Any]) -> str:
        with _noting(problems, code):
            return str(dump_src(code, module))
        return f"# depyf could not dump {code.co_name}; {PROBLEMS} says why\n"

    def live_cache_entries(code: CodeType) -> list[Any]:
        return [entry for entry in cache_entries(code) if entry.code is not None]  # a dropped entry has no code

    def warn(message: object, *rest: object) -> None:
        problems.append(str(message))

    def print_exc() -> None:
        problems.append(traceback.format_exc())

    with (
        mock.patch.object(enable_debugging, "DebuggableHook", ReadOnlyHook),
        mock.patch.object(enable_debugging, "warnings", SimpleNamespace(warn=warn, warn_explicit=warn)),
        mock.patch.object(enable_debugging, "traceback", SimpleNamespace(print_exc=print_exc)),
        # The dump has the output code already, and PyTorch 2.13 passes arguments that depyf does not accept.
        mock.patch.object(enable_debugging, "patched_load_by_key_path", code_loader().load_by_key_path),
        mock.patch.object(depyf.explain, "dump_src", safe_dump_src),
        mock.patch.object(utils, "_debug_get_cache_entry_list", live_cache_entries),
    ):
        yield


@contextlib.contextmanager
def _noting(problems: list[str], code: CodeType) -> Iterator[None]:
    """Append an exception to ``problems`` with the name of the function; the exception ends the block only."""
    try:
        yield
    except Exception:
        problems.append(f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}\n{traceback.format_exc()}")
