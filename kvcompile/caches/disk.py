"""Atomic writes of files, and safetensors files with a checked header."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcompile.errors import CacheFileError, one_line, shown
from kvcompile.files import digests
from kvcompile.files.reading import header_size, is_folder

MAX_HEADER = 1 << 20
"""The maximum size of a file's header, in bytes: a cache of 100 layers has about 120,000."""


def check_replaceable(path: Path) -> None:
    """Raise CacheFileError if ``path`` exists and is not a regular file, or if its folder does not exist."""
    if "\0" in str(path):
        raise CacheFileError(f"save_cache: {shown(str(path))} is not a path; give one without a null character")
    if not is_folder(path.parent):
        raise CacheFileError(f"save_cache: {path.parent} is not a folder; make it first")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = "a symbolic link" if path.is_symlink() else "not a regular file"
        raise CacheFileError(f"save_cache: {path} is {kind} and is not replaced; give the path of a regular file")


def write_tensors(tensors: dict[str, Tensor], path: Path, header: dict[str, str]) -> None:
    """Write a safetensors file as :func:`write_file` does."""
    write_file(path, lambda complete: save_file(tensors, complete, header))


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: ``write`` makes it under another name, and it is renamed after a flush to the disk.

    No error follows the rename, so an error means that the earlier file is still there.

    Raises:
        OSError: the file cannot be written. The error names ``path``, whatever the other name is.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder:
            complete, mode = Path(folder, "complete"), Path(folder, "mode")
            write(complete)
            mode.touch()
            complete.chmod(stat.S_IMODE(mode.stat().st_mode))  # the umask's mode; safetensors makes private files
            _flush(complete)
            complete.replace(path)
            with contextlib.suppress(OSError):  # some file systems cannot flush a folder
                _flush(path.parent)
    except OSError as error:
        if error.filename is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _flush(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unreadable(path: Any, error: SafetensorError | str) -> CacheFileError:
    return CacheFileError(f"{path} is damaged or is not a safetensors file ({one_line(error)}); save the cache again")


class TensorFile:
    """A safetensors file, open for reading.

    Attributes:
        path: the file.
        header: its metadata.
        names: the names of its tensors.
    """

    def __init__(self, path: Any) -> None:
        """
        Raises:
            CacheFileError: ``path`` is not a safetensors file.
            OSError: the file cannot be read.
        """
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CacheFileError(f"{path} is not a regular file; load_cache reads the files of save_cache")
        if (size := header_size(path)) > MAX_HEADER:
            raise _unreadable(path, f"its header has {size} bytes, and at most {MAX_HEADER} are read")
        self.path = path
        try:
            self._file = safe_open(os.fspath(path), "pt", device="cpu")
            self._file.__enter__()
            self.header: dict[str, str] = self._file.metadata() or {}
            self.names: list[str] = list(self._file.keys())
        except SafetensorError as error:
            raise _unreadable(path, error) from error

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def shape(self, name: str) -> Sequence[int]:
        """The shape of a tensor; KeyError if the file lacks it."""
        if name not in self.names:
            raise KeyError(name)
        shape: list[int] = self._file.get_slice(name).get_shape()
        return shape

    def read(self, names: Sequence[str], expected: Mapping[str, str] | None) -> dict[str, Tensor]:
        """The tensors called ``names``, by name.

        Args:
            names: the names of the tensors.
            expected: the digests of all tensors of the file; None to read without a check.

        Raises:
            CacheFileError: a tensor has another digest, or the file has other tensors.
        """
        try:
            tensors: dict[str, Tensor] = {name: self._file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise _unreadable(self.path, error) from error
        if expected is not None:
            found = digests.of_tensors(tensors)
            for name in sorted({*self.names, *expected}):
                if (name in found and found[name] != expected.get(name)) or name not in self.names:
                    raise CacheFileError(
                        f"{self.path} is damaged: {one_line(name)} has another digest; compute it again from its prompt"
                    )
        return tensors
