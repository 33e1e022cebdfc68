"""The README promises what docs/security.md explains, in the same words."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_readme_line_on_security_says_what_the_page_says() -> None:
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs/security.md").read_text()
    found = re.search(r"\| nobody gets in \| (.*?)\. What that leaves open: ", readme)
    assert found is not None
    assert found[1] in " ".join(page.split())
