"""A digest of the code of kvcompile, for keys of stored graphs: they contain operators that this code has chosen."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_digest(folder: Path = PACKAGE) -> str:
    """A digest of the Python files below ``folder``, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_sources(folder)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    """The Python files below ``folder``; ``rglob`` would not follow the links to passes and kernels."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path
