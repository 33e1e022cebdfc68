"""A save into a bucket and a second event: a crash, a twin, a removal."""

from __future__ import annotations

from typing import Any

import pytest
from bucket_pairs import PAUSES
from programs import printed_beside_bucket

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return printed_beside_bucket("bucket_pairs.py")


def test_save_ended_at_any_request_is_whole_or_absent(seen: dict[str, Any]) -> None:
    found = seen["ended"]
    # Claim, host state, documents, data, manifest, commits, checksums, marker, version.
    assert len(found) >= 9
    for each in found:
        assert each["plain"] in (None, 1)
        assert each["ours"] == (1 if each["marked"] else None)
        assert each["marked"] or each["error"]
        assert each["plain"] == 1 or each["ours"] is None
        assert each["again"] == ""
        assert each["then"] == {"plain": 2, "ours": 2}
    counted = [each["plain"] is not None for each in found]
    assert counted == sorted(counted), "Orbax's commit comes after all that it stands for"


@pytest.mark.parametrize("paused", PAUSES)
def test_twin_that_has_taken_the_place_stays_whole(seen: dict[str, Any], paused: str) -> None:
    """One cleared the place and wrote the step while the other one's upload stood still."""
    found = seen["twin"][paused]
    assert found["error"]
    assert found["error of the twin"] == ""
    assert (found["plain"], found["ours"]) == (2, 2)


@pytest.mark.parametrize("paused", PAUSES)
def test_older_twin_does_not_touch_a_save_under_way(seen: dict[str, Any], paused: str) -> None:
    found = seen["older_twin"][paused]
    assert "another job with this run's name" in found["error of the twin"]
    assert found["error"] == ""
    assert (found["plain"], found["ours"]) == (1, 1)


@pytest.mark.parametrize("paused", PAUSES)
def test_step_removed_while_written_is_not_committed(seen: dict[str, Any], paused: str) -> None:
    found = seen["removed"][paused]
    assert found["error"]
    assert (found["plain"], found["ours"]) == (None, None)
    assert found["again"] == ""
    assert found["then"] == {"plain": 2, "ours": 2}
