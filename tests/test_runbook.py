"""The runbook has a section for each error, and leads to places that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from emergency_ckpt import errors

DOCS = Path(__file__).parents[1] / "docs"
RUNBOOK = (DOCS / "runbook.md").read_text("utf-8")
PUBLIC = sorted(
    name
    for name, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, errors.CheckpointError) and value.__module__ == errors.__name__
)


def sections() -> dict[str, str]:
    """Return the text below each heading of the part ``Errors``."""
    part = RUNBOOK.split("\n## Errors\n")[1].split("\n## ")[0]
    return {each.split("\n")[0]: each for each in part.split("\n### ")[1:]}


def anchor(heading: str) -> str:
    """Return the anchor that the code host makes of a heading."""
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def test_runbook_has_a_section_for_each_error() -> None:
    assert sorted(sections()) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_section_says_what_it_means_and_what_to_do(name: str) -> None:
    labels = re.findall(r"^- \*\*(.+?)\*\*: \S", sections()[name], re.M)
    assert labels == ["Means", "Look at", "Do"]


def test_links_of_the_runbook_lead_somewhere() -> None:
    for place in re.findall(r"\]\(([^)]+)\)", RUNBOOK):
        path, _, fragment = place.partition("#")
        target = DOCS / path if path else DOCS / "runbook.md"
        assert target.exists(), place
        if fragment:
            headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.M)
            assert fragment in {anchor(heading) for heading in headings}, place


def test_settings_that_the_runbook_names_exist() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    known = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    named = set(
        re.findall(r"`((?:\w+_)+(?:s|bytes|n|id|dir|file|holders|host|port|remap))`", RUNBOOK)
    )
    assert named - known <= {"get_state"}
    assert len(named & known) > 10
