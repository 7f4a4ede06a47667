"""Bounded reading of files that users name: a pipe, a device or a huge file raises an error at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

MAX_TEXT = 1 << 18
"""The maximum size of a policy, in bytes."""

MAX_CONFIG = 1 << 22
"""The maximum size of a model's config, in bytes."""

MAX_TENSOR_NAMES = 1 << 23
"""The maximum size of a safetensors header with the names of a checkpoint's tensors, in bytes."""


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file.

    Args:
        path: the file.
        most: its maximum size, in bytes.

    Raises:
        OSError: the file does not exist, is not readable, is not a regular file or is too large.
    """
    # A pipe without a writer would block here; O_NONBLOCK has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(content) > most:
        raise OSError(f"it has {status.st_size} bytes, and at most {most} are read")
    return content


def status_of_file(path: Path) -> os.stat_result:
    """The status of a regular file, for code that opens it itself; OSError as in :func:`read_file`."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is not a regular file")
    return status


def status_of_tensors(path: Path) -> os.stat_result:
    """The status of a safetensors file with a header of bounded size; OSError as in :func:`read_file`."""
    status = status_of_file(path)
    if (size := header_size(path)) > MAX_TENSOR_NAMES:
        raise OSError(f"its header has {size} bytes, and at most {MAX_TENSOR_NAMES} are read")
    return status


def header_size(path: Path) -> int:
    """The size of a safetensors header, which the first 8 bytes of the file give."""
    with open(path, "rb") as file:
        return int.from_bytes(file.read(8), "little")


def check_file(path: Path, most: int) -> None:
    """Raise OSError unless a regular file of at most ``most`` bytes is at ``path``."""
    if (size := status_of_file(path).st_size) > most:
        raise OSError(f"it has {size} bytes, and at most {most} are read")


def read_text_file(path: Path, most: int = MAX_TEXT) -> str:
    """The text of a regular file in UTF-8, with or without a byte order mark.

    Raises OSError as :func:`read_file`, and UnicodeError.
    """
    return read_file(path, most).decode("utf-8-sig")


def is_file(path: Path) -> bool:
    """Whether ``path`` is a regular file; False for an impossible path."""
    return _found(path.is_file)


def is_path(path: Path) -> bool:
    """Whether ``path`` exists; False for an impossible path."""
    return _found(path.exists)


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; False for an impossible path."""
    return _found(path.is_dir)


def _found(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def expanded(path: Path) -> Path:
    """``path`` with ``~`` replaced by the home directory; unchanged if there is no such user."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path
