"""A life whose change of a bucket was held up takes nothing from the newer life's save."""

from __future__ import annotations

from typing import Any

import pytest
from programs import printed_beside_bucket

pytestmark = pytest.mark.timeout(900)


def overtaken(what: str, newer_life: str) -> list[dict[str, Any]]:
    """Return what came of it, for each request of ``what`` that storage held up meanwhile."""
    found = printed_beside_bucket("overtaken_program.py", what, newer_life, timeout_s=800.0)
    assert len(found) > 3
    return found[:-1]


@pytest.mark.parametrize(
    "what", ["removal", "clean_up", "place_needed", "rollback", "bring_back", "withdrawal"]
)
def test_change_that_was_overtaken_spoils_no_newer_save(what: str) -> None:
    """Whichever of its requests storage held up until a newer life had saved the step again."""
    for k, each in enumerate(overtaken(what, "save_as_newer_life")):
        for seen in (each["seen"], each["then"]):
            assert (k, seen["ours"], seen["value"]) == (k, [10, 20], 21)
            assert (k, seen["plain"]) == (k, [10, 20, 21])
            assert (k, seen["aside"]) in ((k, None), (k, 20)), "what was kept is whole"
        assert each["told"].partition(":")[0] in ("", "DirectoryInUse", "PersistentTierError")


@pytest.mark.parametrize("what", ["rollback", "bring_back"])
def test_change_that_was_overtaken_shows_no_unfinished_step(what: str) -> None:
    """The newer life ends before its commit of the step: plain Orbax must not see one."""
    for k, each in enumerate(overtaken(what, "begin_as_newer_life")):
        for seen in (each["seen"], each["then"]):
            # Without a complete save the newer life excludes nothing.
            assert (k, seen["ours"]) in ((k, [10]), (k, [10, 20]))
            assert (k, seen["plain"]) in ((k, [10]), (k, [10, 20, 20]))
