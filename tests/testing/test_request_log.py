"""What is counted in a log of requests."""

from __future__ import annotations

import pytest
from fake_gcs import RequestRecord, round_trips


def record(begin_s: float, end_s: float) -> RequestRecord:
    return RequestRecord(
        index=0,
        time_s=begin_s,
        seconds=end_s - begin_s,
        method="GET",
        path="/",
        operation="objects.get",
        target="bucket/x",
        status=200,
        bytes_in=0,
        bytes_out=0,
        range_header="",
        client="",
        user_agent="",
        fault=None,
    )


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(1, 2), (2, 3), (3, 4)], 3),
        ([(1, 2), (1, 2), (1, 4)], 1),
        ([(1, 9), (2, 3), (4, 5)], 2),
    ],
)
def test_round_trips_do_not_overlap(spans: list[tuple[float, float]], expected: int) -> None:
    assert round_trips([record(*span) for span in spans]) == expected
