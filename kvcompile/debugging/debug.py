"""``debug``: dump a program's graphs, from Dynamo's graph to the generated code, into a folder."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from kvcompile.compat.recompiling import code_loader, missing_names, recompiling
from kvcompile.debugging import stages
from kvcompile.debugging.depyf import check_depyf, dumping_with_depyf
from kvcompile.debugging.folder import DEPYF, INDEX, DumpFolder
from kvcompile.errors import KVCompileError
from kvcompile.report.report import Report, collect_reports

log = logging.getLogger(__name__)

_REMARKS = [
    "All compiled functions that the block called were compiled again. Code compiled before the block is kept and used "
    "again after it; code compiled inside the block is dropped.",
    "Inductor's and AOTAutograd's caches of compiled graphs were off, in memory and on disk.",
]

_DEPYF_REMARK = "depyf decompiled Dynamo's bytecode for reading only; the program ran Dynamo's own bytecode."

_lock = threading.Lock()
_open_folder: Path | None = None


@contextlib.contextmanager
def debug(folder: str | os.PathLike[str], *, depyf: bool = True) -> Iterator[Report]:
    """Dump everything that any thread compiles inside the ``with`` block; ``index.md`` in the folder lists the files.

    For every graph that the backend compiles, the dump holds the graph at each stage, with comments that name attention
    sites. It also holds the code that Inductor generated, and the program runs this dumped code. For the whole block
    the dump holds the report as text, page and data, the policies, and depyf's dump. The code in the block runs
    normally: caches are written and packed.

    Functions that were compiled before are compiled again inside the block, with Inductor's and AOTAutograd's caches
    off. Their earlier code is used again after the block (:mod:`kvcompile.compat.recompiling`). The results of the
    program are the same with and without the block.

    >>> with kvcompile.debug("out/"):
    ...     model(input_ids, cache=cache)

    Args:
        folder: the folder for the dump, one for each process. It is created if it does not exist. An existing folder
            must be empty or hold an earlier dump, which is replaced.
        depyf: also dump functions, guards and bytecode with depyf (``pip install depyf``).

    Yields:
        The report of the block.

    Raises:
        KVCompileError: the folder cannot be written or holds something else; depyf is missing; another debug() is open;
            this PyTorch lacks a private name that only debug() needs.
    """
    path = Path(folder).expanduser().absolute()
    with _only_one(path):
        if missing := missing_names():
            raise KVCompileError(
                f"debug() needs {', '.join(missing)}, which PyTorch {torch.__version__} lacks; `python -m kvcompile "
                "doctor` lists the tested releases. Nothing else needs these names"
            )
        if depyf:
            check_depyf()
        dump = DumpFolder(path)
        report, remarks = Report(), [*_REMARKS, *([_DEPYF_REMARK] if depyf else [])]
        try:
            with _dumping(dump, depyf), collect_reports() as report:
                yield report
        except BaseException as error:
            remarks.insert(0, f"The block ended with {type(error).__name__}: {error}")
            raise
        finally:
            dump.finish(report, remarks)
            log.info("dumped %d graphs, recompiled without caches, see %s", len(dump.graphs), path / INDEX)


@contextlib.contextmanager
def _dumping(dump: DumpFolder, depyf: bool) -> Iterator[None]:
    """Write everything that is compiled inside the ``with`` block to ``dump``."""
    write_depyf = dumping_with_depyf(dump.folder / DEPYF) if depyf else contextlib.nullcontext()
    with recompiling(), stages.watched_by(dump), _keeping_output_code(dump), write_depyf:
        yield


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Allow only one open block, because a block changes PyTorch for the whole process."""
    global _open_folder
    with _lock:
        if _open_folder is not None:
            raise KVCompileError(f"debug() is open already, for {_open_folder}; end that block first")
        _open_folder = folder
    try:
        yield
    finally:
        _open_folder = None


@contextlib.contextmanager
def _keeping_output_code(dump: DumpFolder) -> Iterator[None]:
    """Load Inductor's code from the dump, so that tracebacks and profiles name the dumped files."""
    load = code_loader().load_by_key_path

    def load_by_key_path(
        key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None, **kwargs: Any
    ) -> ModuleType:
        if attrs is not None:  # a graph; without attrs it is a kernel, which the graph's code contains
            path = str(dump.output_code(stages.current_graph(), Path(path).read_text(encoding="utf-8")))
        return load(key, path, linemap, attrs, **kwargs)

    with mock.patch.object(code_loader(), "load_by_key_path", load_by_key_path):
        yield
