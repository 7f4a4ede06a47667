"""``debug``: write everything that becomes of a program's graphs into a folder, to be read."""

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

from torch._inductor.codecache import PyCodeCache

from kvcompile.debugging import stages
from kvcompile.debugging.depyf import check_depyf, dumping_with_depyf
from kvcompile.debugging.folder import DEPYF, INDEX, DumpFolder
from kvcompile.debugging.recompile import compiling_anew
from kvcompile.errors import KVCompileError
from kvcompile.report.report import Report, collect_reports

log = logging.getLogger(__name__)

_REMARKS = [
    "Everything that ran compiled was compiled anew, whatever had been compiled before. That earlier code stays as it "
    "was and is used again after the block; what was compiled inside is dropped.",
    "Inductor's and AOTAutograd's caches of compiled graphs were off, in memory and on disk.",
]

_DEPYF_REMARK = "depyf decompiled what Dynamo made; that is for reading, and Dynamo's own bytecode is what ran."

_lock = threading.Lock()
_open_folder: Path | None = None


@contextlib.contextmanager
def debug(folder: str | os.PathLike[str], *, depyf: bool = True) -> Iterator[Report]:
    """Dump what is compiled inside the block, in all threads; ``index.md`` in the folder says what is where.

    For every graph that the backend compiles: the graph at each stage, with comments that name attention sites, and
    the code that Inductor generated, which runs from the file that is dumped. For the whole block: the report as text,
    page and data, the policies, and depyf's dump. The block runs for real: caches are written and packed.

    What was compiled before is compiled anew inside the block, with Inductor's and AOTAutograd's caches off, and is
    used again afterwards (:mod:`kvcompile.debugging.recompile`); results are those of the program without the block.

    >>> with kvcompile.debug("out/"):
    ...     model(input_ids, past_key_values=cache)

    Args:
        folder: where to write, one for each process. It is made, or must be empty, or holds an earlier dump, which is
            replaced.
        depyf: also dump functions, guards and bytecode with depyf (``pip install depyf``).

    Yields:
        the report of the block.

    Raises:
        KVCompileError: the folder cannot be written or holds something else; depyf is missing; another debug() is open.
    """
    path = Path(folder).expanduser().absolute()
    with _only_one(path):
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
            log.info("dumped %d graphs, compiled anew without caches, see %s", len(dump.graphs), path / INDEX)


@contextlib.contextmanager
def _dumping(dump: DumpFolder, depyf: bool) -> Iterator[None]:
    """Everything that is compiled inside the block goes to ``dump``."""
    write_depyf = dumping_with_depyf(dump.folder / DEPYF) if depyf else contextlib.nullcontext()
    with compiling_anew(), stages.watched_by(dump), _keeping_output_code(dump), write_depyf:
        yield


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """What the block changes in PyTorch holds for the process, so there can be one block only."""
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
    """Inductor's code is loaded from the dump, so that tracebacks and profiles lead there."""
    load = PyCodeCache.load_by_key_path

    def load_by_key_path(
        key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None, **kwargs: Any
    ) -> ModuleType:
        if attrs is not None:  # a graph with its constants; without, it is a kernel, which its graph's code contains
            path = str(dump.output_code(stages.current_graph(), Path(path).read_text(encoding="utf-8")))
        return load(key, path, linemap, attrs, **kwargs)

    with mock.patch.object(PyCodeCache, "load_by_key_path", load_by_key_path):
        yield
