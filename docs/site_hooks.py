"""Hooks of MkDocs: the pages of the repository as one site.

The README becomes the start page, and other pages outside docs/ get new names. A link between two files becomes a link
between their pages; a link to any other file becomes the file's name. The API page lists all public names; their text
comes from the docstrings.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]

ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/README.md": "results.md",
    **{
        f"benchmarks/results/{path.name}": f"results_{path.stem}.md"
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
        if path.name != "README.md"
    },
    "kernels/README.md": "kernels.md",
}
"""Maps pages outside docs/ to their names in the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)\s#]*)(#[^)\s]*)?\)")


def public_names() -> dict[str, str]:
    """Maps every public name to the full name of its definition, in the order of the package's imports."""
    tree = ast.parse((ROOT / "kvcompile" / "__init__.py").read_text(encoding="utf-8"))
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    imports = [node for body in blocks for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def api_page() -> str:
    """The Markdown of the API page: one directive for each public name."""
    head = (
        "# API\n\nAll public names of `kvcompile`. `import kvcompile` is cheap: a name is loaded when it is first used."
    )
    return "\n\n".join([head, *(f"::: {full_name}" for full_name in sorted(public_names().values(), key=_by_name))])


def _by_name(full_name: str) -> str:
    return full_name.rsplit(".", 1)[1].lower()


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/ and the API page."""
    for source, name in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page."""
    sources = {name: source for source, name in ELSEWHERE.items()}
    return with_site_links(markdown, sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))


def with_site_links(markdown: str, source: str) -> str:
    """The text of the file ``source`` with links that hold in the site.

    >>> with_site_links("[a](docs/policy.md#fields), [b](kernels/ops.py)", "README.md")
    '[a](policy.md#fields), `kernels/ops.py`'
    """

    def rewritten(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups(default="")
        if not target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path == "docs/README.md":
            return f"[{text}](index.md)"
        if path in ELSEWHERE:
            return f"{mark}[{text}]({ELSEWHERE[path]}{anchor})"
        if path.startswith("docs/") and not path.endswith(".py"):
            return f"{mark}[{text}]({path.removeprefix('docs/')}{anchor})"
        return f"`{path}`"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _prose(LINK.sub(rewritten, part)) for part in parts)


def _prose(text: str) -> str:
    """Text in which ``[a][b]`` outside of code is not a link, because it stands for dimensions of an array."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(part if part.startswith("`") else part.replace("][", "]\\[") for part in parts)
