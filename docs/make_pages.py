"""Write the generated parts of these pages and of the README.

    python docs/make_pages.py            # after a change of formats, policy, refusals, passes or results of benchmarks
    python docs/make_pages.py --check    # change nothing; exit with 1 if a page is out of date

The text between ``<!-- made by MODULE.FUNCTION -->`` and ``<!-- end -->`` is the result of a function. All other text
is written by hand. ``tests/pages/test_docs.py`` fails if a page is out of date.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PART = re.compile(r"(<!-- made by (\w+)\.(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """The pages with generated parts, and the README."""
    found = [FOLDER.parent / "README.md", *sorted(FOLDER.glob("*.md"))]
    return [path for path in found if path.exists() and PART.search(path.read_text(encoding="utf-8"))]


def made(text: str) -> str:
    """The text of a page with all generated parts renewed."""

    def make(part: re.Match[str]) -> str:
        begin, module, function, end = part.groups()
        return f"{begin}\n{getattr(importlib.import_module(module), function)()}\n\n{end}"

    return PART.sub(make, text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    os.environ["COLUMNS"] = "100"  # pages do not depend on the terminal
    stale = 0
    for path in pages():
        old = path.read_text(encoding="utf-8")
        new = made(old)
        if new != old:
            stale += 1
            print(f"{path}: {'out of date' if check else 'written'}")
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
