"""``python -m tests.outside``: run the tests and reference models of other projects, and write docs/outside.json."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(_TESTS), str(_TESTS / "support")]  # as pytest has them
for _name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
    del sys.modules[_name]  # other projects have a package of this name, which their test modules import

if __name__ == "__main__":
    from outside.command import main

    sys.exit(main())
