"""A hook of MkDocs: pages of the repository that lie outside of ``docs`` are pages of the site too.

The README is the home page; the others stand below ``repository/`` under their own paths. The same
Markdown is read on a code host, where links are relative to the file. So each link is resolved as
a code host would, then led to the page of the site. A link to a file without a page becomes the
file's path, since no public address of the repository is known here.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
HOME = "index.md"
PREFIX = "repository"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```.*?^```)", re.M | re.S)
# A second word names a block for the tests; the site's Markdown would take it for text.
_NAMED_FENCE = re.compile(r"^(```\w+) \w+$", re.M)


def on_files(files: Files, config: Any) -> Files:
    """Add the README and the pages that the navigation names below ``repository/``."""
    named = re.findall(rf"{PREFIX}/\S+\.md", str(config["nav"]))
    for name in [HOME, *(each.strip("'\"},]") for each in named)]:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / _source_of(name))))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead the links of a page, outside of code, to pages of the site."""
    del config
    name = page.file.src_uri
    if name.endswith(".ipynb"):
        return markdown
    pages = {_source_of(each.src_uri): each.src_uri for each in files}

    def led(match: re.Match[str]) -> str:
        image, text, target, fragment = match[1], match[2], match[3], match[4] or ""
        source = posixpath.normpath(posixpath.join(posixpath.dirname(_source_of(name)), target))
        for candidate in (source, f"{source}/README.md"):
            if candidate in pages:
                to = posixpath.relpath(pages[candidate], posixpath.dirname(name) or ".")
                return f"{image}[{text}]({to}{fragment})"
        return f"{text} (`{source}`)" if text.strip("`") != source else text

    parts = _FENCE.split(_NAMED_FENCE.sub(r"\1", markdown))
    return "".join(part if part.startswith("```") else _LINK.sub(led, part) for part in parts)


def _source_of(name: str) -> str:
    """Return the path in the repository of a file of the site."""
    if name == HOME:
        return "README.md"
    return name.removeprefix(f"{PREFIX}/") if name.startswith(f"{PREFIX}/") else f"docs/{name}"
