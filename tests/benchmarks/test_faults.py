"""What becomes of a job that meets a fault is judged by what its processes wrote down."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import incident
from benchmarks.faults.__main__ import CONTENDERS, table
from benchmarks.faults.worker import entries

RIGHT: dict[str, Any] = {"restored": 9, "right": True}
SAVED = [{"complete": 10}, {"complete": 11}]


@pytest.mark.parametrize(
    ("journals", "hung", "what"),
    [
        ([[RIGHT, *SAVED]] * 2, False, incident.NEWEST),
        ([[RIGHT | {"restored": 8}, *SAVED]] * 2, False, incident.OLDER),
        ([[{"restored": None}]] * 2, False, incident.NOTHING),
        ([[RIGHT, *SAVED], [RIGHT]], False, incident.REFUSED),
        ([[RIGHT, *SAVED], []], False, incident.REFUSED),
        ([[RIGHT, *SAVED], []], True, incident.HUNG),
        ([[RIGHT], [RIGHT | {"restored": 8}]], False, incident.WRONG),
        ([[RIGHT], [{"restored": None}]], False, incident.WRONG),
        ([[RIGHT, *SAVED], [RIGHT | {"right": False}, *SAVED]], False, incident.WRONG),
    ],
)
def test_start_is_judged_by_what_its_processes_wrote(
    journals: list[list[dict[str, Any]]], hung: bool, what: str
) -> None:
    restored = [entry for journal in journals for entry in journal if "restored" in entry]
    found, _, _ = incident.judge(journals, restored, 9, hung=hung, log="the end of a log")
    assert found == what


def test_journal_that_a_kill_cut_ends_before_the_cut(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_text('{"begun": 1}\n{"compl')
    assert entries(journal) == [{"begun": 1}]
    assert entries(tmp_path / "none") == []


@pytest.mark.parametrize("fault", incident.FAULTS)
def test_fault_is_the_same_for_each_contender(fault: str, tmp_path: Path) -> None:
    happens = incident.FAULTS[fault].happens
    found: list[dict[str, bytes]] = []
    for contender in ("one", "other"):
        root = tmp_path / contender
        hosts = [root / f"host_{host}" for host in range(3)]
        for folder in (*hosts, root / "storage" / "4", root / "storage" / "8"):
            folder.mkdir(parents=True)
            (folder / "data").write_bytes(bytes(range(200)))
        happens(incident.Down(hosts, root / "storage", random.Random("1")))
        found.append({
            str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("data")
        })  # fmt: skip
    assert found[0] == found[1]
    assert found[0]["storage/4/data"] == bytes(range(200))
    whole = [name for name, data in found[0].items() if data == bytes(range(200))]
    assert len(whole) == {"killed": 5, "a slice's RAM lost": 4, "all RAM lost": 2}.get(
        fault, 1 if fault.startswith("all RAM lost") else 4
    )


def test_table_counts_outcomes_by_fault_and_contender() -> None:
    outcomes = [
        incident.Outcome(contender, "killed", what, 9, step, "")
        for contender, what, step in [
            (CONTENDERS[0], incident.NEWEST, 9),
            (CONTENDERS[0], incident.NEWEST, 10),
            (CONTENDERS[1], incident.NEWEST, 9),
            (CONTENDERS[1], incident.OLDER, 8),
        ]
    ]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table(outcomes).split("\n")]
    assert rows[0] == ["fault", *CONTENDERS]
    assert rows[2] == ["killed", "2 of 2", "1 of 2, 1 older"]
    assert rows[3] == ["all", "2 of 2", "1 of 2, 1 older"]
