"""The README promises what docs/security.md explains, in the same words."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_readme_line_on_security_says_what_the_page_says() -> None:
    readme, page = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/security.md")
    )
    found = re.search(
        r"- (Peers exchange nothing.*?\.) \[docs/security.md\]", " ".join(readme.split())
    )
    assert found is not None
    assert found[1] in page
