"""The commands that look, at a bucket that is whole, that refuses, and that is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_gcs import FakeGcs, FaultRule
from places import JOBS
from programs import eckpt_json, printed

URL = "gs://bucket/run"


@pytest.fixture(scope="module")
def gcs() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"]) as server:
        printed(JOBS / "two_steps_program.py", env=server.environment())
        yield server


def test_looks_at_a_bucket_write_nothing(gcs: FakeGcs) -> None:
    gcs.clear_requests()
    status, found = eckpt_json("ls", "--dir", URL, env=gcs.environment())
    assert (status, found["faults"]) == (0, [])
    assert [(s["step"], s["state"], s["size_bytes"]) for s in found["steps"]] == [
        (20, "whole", 32),
        (10, "whole", 32),
    ]
    assert all(step["age_s"] is not None for step in found["steps"])
    status, checked = eckpt_json(
        "ls", "--check", "--dir", URL, "--read-data", env=gcs.environment()
    )
    assert (status, checked["checked"]["bytes"]) == (0, 64)
    status, shown = eckpt_json("ls", 10, "--dir", URL, env=gcs.environment())
    assert [each["value"] for each in shown["host_states"]] == [{"at": 10}]
    assert {record.method for record in gcs.requests()} == {"GET"}


def test_look_at_absent_bucket_is_a_fault(gcs: FakeGcs) -> None:
    status, found = eckpt_json("ls", "--dir", "gs://other/run", env=gcs.environment())
    assert (status, found["steps"]) == (1, [])
    (fault,) = found["faults"]
    assert fault["where"] == "gs://other/run"


def test_check_of_unreadable_marker_checks_the_others(gcs: FakeGcs) -> None:
    """A listing needs no marker: it goes by the log, and has both steps."""
    gcs.add_fault(FaultRule(kind="status", status_code=403, target="*host_state/20/marker.json*"))
    try:
        listed = eckpt_json("ls", "--dir", URL, "--timeout", 10, env=gcs.environment())
        status, found = eckpt_json(
            "ls", "--check", "--dir", URL, "--timeout", 10, env=gcs.environment()
        )
    finally:
        gcs.clear_faults()
    assert status == 1
    assert [(step["step"], step["state"]) for step in listed[1]["steps"]] == [
        (20, "whole"),
        (10, "whole"),
    ]
    assert (listed[0], found["checked"]["manifests"]) == (0, 1)
    assert [fault["step"] for fault in found["faults"]] == [20]


def test_look_at_a_bucket_that_is_away_is_a_fault() -> None:
    away = {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}
    status, found = eckpt_json("ls", "--dir", URL, "--timeout", 2, env=away)
    assert (status, found["steps"]) == (1, [])
    assert [fault["where"] for fault in found["faults"]] == [URL]
