"""``python -m tests.fuzz``: look for programs or files for some minutes, or plant the faults."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(_TESTS), str(_TESTS / "support")]  # as pytest has them

if __name__ == "__main__":
    from fuzz.command import main

    sys.exit(main())
