"""A digest of the code of kvcompile, for keys of compiled graphs."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path


@functools.cache
def code_digest() -> str:
    """Hash of the code of kvcompile, because a cached graph contains operators that the dispatch traced."""
    digest = hashlib.sha256()
    for folder, _, names in sorted(os.walk(Path(__file__).parents[1], followlinks=True)):
        for name in sorted(name for name in names if name.endswith(".py")):
            digest.update(Path(folder, name).read_bytes())
    return digest.hexdigest()
