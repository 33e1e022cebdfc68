"""Notices of a metadata server: which values are one, and when maintenance is near."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from emergency_ckpt.extras.notices import (
    maintenance_event_notice,
    preempted_notice,
    upcoming_maintenance_notice,
)

NOW = datetime.datetime(2026, 1, 10, 12, 0, tzinfo=datetime.UTC)


def document(ahead_s: float, status: str = "PENDING") -> dict[str, str]:
    start = NOW + datetime.timedelta(seconds=ahead_s)
    return {"maintenance_status": status, "window_start_time": start.isoformat()}


@pytest.mark.parametrize(
    ("found", "is_notice"),
    [
        (document(6 * 86400), False),
        (document(91), False),
        (document(90), True),
        (document(-10), True),
        (document(6 * 86400, "ONGOING"), True),
        ({"error": "no notifications have been received yet, try again later"}, False),
    ],
)
def test_maintenance_is_a_notice_only_when_it_is_near(found: Any, is_notice: bool) -> None:
    assert bool(upcoming_maintenance_notice(found, NOW.timestamp())) == is_notice


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        {},
        {"maintenance_status": "PENDING"},
        {"maintenance_status": "PENDING", "window_start_time": "soon"},
        {"maintenance_status": "PENDING", "window_start_time": "2026-01-10T12:00:00"},
        {"maintenance_status": ["ONGOING"], "window_start_time": 7},
    ],
)
def test_maintenance_document_that_is_none_is_an_error(junk: Any) -> None:
    with pytest.raises(ValueError, match=r"upcoming-maintenance|isoformat"):
        upcoming_maintenance_notice(junk, NOW.timestamp())


def test_preempted_and_maintenance_event_are_read_strictly() -> None:
    assert preempted_notice("TRUE")
    assert not preempted_notice("FALSE")
    assert maintenance_event_notice("TERMINATE_ON_HOST_MAINTENANCE")
    assert not maintenance_event_notice("MIGRATE_ON_HOST_MAINTENANCE")
    for read in (preempted_notice, maintenance_event_notice):
        with pytest.raises(ValueError, match="instance/"):
            read("<html>")
