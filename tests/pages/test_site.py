"""The documentation builds as a site without warnings, with a page for every file and every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcompile

pytest.importorskip("mkdocs", reason='pip install -e ".[docs]"')
pytest.importorskip("mkdocstrings")

from site_docstrings import as_markdown
from site_hooks import ELSEWHERE, public_names, with_site_links

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a warning of MkDocs is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    pages |= {Path(name).stem for name in ELSEWHERE.values()} | {"api"}
    assert pages <= {path.stem for path in site.glob("*.html")}
    navigation = (site / "index.html").read_text().partition('<nav class="md-nav md-nav--primary')[2]
    assert pages - {"index"} <= {Path(link).stem for link in re.findall(r'href="([\w.]+\.html)"', navigation)}


def test_the_api_page_has_every_public_name_with_its_docstring(site: Path) -> None:
    assert set(public_names()) == set(kvcompile.__all__)
    page = (site / "api.html").read_text()
    for name, full_name in public_names().items():
        assert f'id="{full_name}"' in page, name
    assert "Total size, in bytes, of the distinct storages" in page


def test_the_site_can_be_searched_and_asks_no_other_host(site: Path) -> None:
    assert "kvcompile.policy.policy.Policy" in (site / "search" / "search_index.json").read_text()
    assert not re.findall(
        r'(?:src|href)="https?://(?!squidfunk)[^"]*\.(?:js|css|woff2?)"', (site / "index.html").read_text()
    )


def test_links_between_files_become_links_between_pages() -> None:
    assert with_site_links("[a](docs/policy.md#fields)", "README.md") == "[a](policy.md#fields)"
    assert with_site_links("![p](docs/quality.svg)", "README.md") == "![p](quality.svg)"
    assert with_site_links("[start](../README.md)", "docs/policy.md") == "[start](index.md)"
    assert (
        with_site_links("[a](policy.md), [b](../kernels/ops.py)", "docs/formats.md")
        == "[a](policy.md), `kernels/ops.py`"
    )
    assert with_site_links("[a](https://example.org)", "README.md") == "[a](https://example.org)"
    assert with_site_links("x[rows][columns] and `y[a][b]`", "README.md") == "x[rows]\\[columns] and `y[a][b]`"


def test_docstrings_become_markdown() -> None:
    assert as_markdown("See :class:`~kvcompile.Policy`::\n\n    x") == "See `kvcompile.Policy`:\n\n    x"
    assert as_markdown("Text.\n\n>>> f(1)\n>>> g()") == "Text.\n\n```pycon\n>>> f(1)\n>>> g()\n```"
