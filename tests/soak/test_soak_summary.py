"""The figures and the seeds of the soak."""

from __future__ import annotations

from typing import Any

import pytest
from soak_plan import (
    DAY_S,
    ENDINGS,
    INCIDENTS_PER_JOB,
    KINDS,
    NEEDS_MOUNT,
    NEEDS_STORAGE,
    STRIPPED,
    clock_of,
    job_of,
)
from soak_summary import quantile, summary, table, wilson


def line(result: str, number: int, **other: Any) -> dict[str, Any]:
    found = {"seed": 1, "incident": number, "kinds": ["hang"], "problems": []}
    return {**found, "result": result, "seconds": float(number), "lost": number, **other}


def test_wilson_interval_is_that_of_the_tables() -> None:
    # Brown, Cai and DasGupta (2001) give these of Wilson's
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_quantile_is_one_of_the_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.95) == 1.0
    assert quantile([float(n) for n in range(1, 101)], 0.95) == 95.0


def test_summary_counts_what_could_be_recovered() -> None:
    found = summary(
        [line("recovered", n) for n in (1, 2, 2)]
        + [line("nothing left", 4, lost=None), line("wrong bytes", 5, problems=["wrong bytes: x"])]
        + [line("begun anew", 6, lost=None)]
    )
    assert (found["incidents"], found["recovered"], found["nothing_left"]) == (6, 3, 1)
    assert found["begun_anew"] == 1
    assert found["recovered_share"] == 0.75
    assert found["interval_95"] == [round(each, 5) for each in wilson(3, 4)]
    assert found["steps_lost"] == {"1": 1, "2": 2}
    assert found["seconds"] == {"median": 2.0, "p95": 2.0, "most": 2.0}
    assert (found["wrong_bytes"], found["hangs"]) == (1, 0)
    assert found["failures"] == [{"seed": 1, "incident": 5, "problems": ["wrong bytes: x"]}]


def test_table_has_a_row_for_each_kind_of_fault() -> None:
    other = {"kinds": ["hang", "notice"]}
    figures = summary([line("recovered", n, **(other if n == 7 else {})) for n in (1, 2, 7)])
    rows = table(figures).splitlines()
    assert rows[2] == "| hang | 3 | 3 of 3 | 2, 7 | 2.0, 7.0 |"
    assert rows[3:] == ["| notice | 1 | 1 of 1 | 7, 7 | 7.0, 7.0 |"]
    assert table(summary([line("nothing left", 3)])).splitlines()[2].endswith("| 0 of 0 | - | - |")


def test_summary_of_no_incidents_promises_nothing() -> None:
    found = summary([])
    assert (found["incidents"], found["interval_95"], found["failures"]) == (0, [0.0, 1.0], [])


def test_seed_gives_the_same_job_each_time() -> None:
    assert job_of(7, 3) == job_of(7, 3)
    assert job_of(7, 3) != job_of(8, 3)
    assert [i.number for i in job_of(7, 3).incidents] == list(
        range(3 * INCIDENTS_PER_JOB, 4 * INCIDENTS_PER_JOB)
    )


def test_every_kind_of_fault_occurs_and_each_life_ends() -> None:
    jobs = [job_of(1, number) for number in range(200)]
    incidents = [incident for job in jobs for incident in job.incidents]
    assert {kind for incident in incidents for kind in incident.kinds} == set(KINDS)
    assert all(len(ENDINGS.intersection(incident.kinds)) == 1 for incident in incidents)


def test_clocks_of_hosts_are_right_or_up_to_a_day_wrong() -> None:
    clocks = [clock_of(1, 2, life, host) for life in range(30) for host in range(6)]
    assert clock_of(1, 2, 3, 4) == clock_of(1, 2, 3, 4)
    values = [c.ahead_s for c in clocks]
    values += [c.ahead_s + c.jump[1] for c in clocks if c.jump is not None]
    assert all(abs(value) <= DAY_S for value in values)
    assert {0.0, -DAY_S, DAY_S} < set(values)
    assert 0 < sum(c.jump is not None for c in clocks) < len(clocks)


def test_storage_loses_each_sort_of_files_with_all_ram_often() -> None:
    incidents = [incident for number in range(300) for incident in job_of(1, number).incidents]
    stripped = [i for i in incidents if "storage_stripped" in i.kinds]
    assert {f.text for i in stripped for f in i.faults if f.kind == "storage_stripped"} == set(
        STRIPPED
    )
    assert sum("all_ram_wiped" in i.kinds for i in stripped) > len(stripped) / 2


def test_job_without_storage_or_mounts_has_no_fault_of_them() -> None:
    jobs = [job_of(1, number, may_mount=False) for number in range(100)]
    kinds = {kind for job in jobs for incident in job.incidents for kind in incident.kinds}
    assert not kinds & NEEDS_MOUNT
    without = [job for job in jobs if job.storage == "none"]
    assert without
    for job in without:
        assert not {k for incident in job.incidents for k in incident.kinds} & NEEDS_STORAGE
