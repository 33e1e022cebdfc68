"""The figures of the soak, and the faults that its seeds draw."""

from __future__ import annotations

from typing import Any

from soak_plan import (
    ENDINGS,
    KINDS,
    NEEDS_MOUNT,
    NEEDS_STORAGE,
    STRIPPED,
    job_of,
)
from soak_summary import summary, table, wilson


def line(result: str, number: int, **other: Any) -> dict[str, Any]:
    found = {"seed": 1, "incident": number, "kinds": ["hang"], "problems": []}
    return {**found, "result": result, "seconds": float(number), "lost": number, **other}


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


def test_every_kind_of_fault_occurs_and_each_life_ends() -> None:
    jobs = [job_of(1, number) for number in range(200)]
    incidents = [incident for job in jobs for incident in job.incidents]
    assert {kind for incident in incidents for kind in incident.kinds} == set(KINDS)
    assert all(len(ENDINGS.intersection(incident.kinds)) == 1 for incident in incidents)


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
