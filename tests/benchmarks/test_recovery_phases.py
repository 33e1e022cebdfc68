"""The parts of a recovery, from made-up events."""

import argparse
from pathlib import Path

import pytest

from benchmarks.recovery import phases, place
from benchmarks.recovery.phases import Mark, Moment


def _events() -> list[Moment]:
    names = ["fault.fired", "process.exited", "process.exited", "life.ended"]
    first = [Moment(10.0 + at, name, 0) for at, name in zip((0, 1, 3, 4), names, strict=True)]
    return [Moment(5.0, "process.exited", 0), *first]


def _marks() -> list[Mark]:
    # Two processes; the later one counts.
    marks = [
        Mark(Moment(20.0 + 10 * at + late, name, 1), cpu_s=at + late, hidden_s=late / 2)
        for at, name in enumerate(phases.MARKS)
        for late in (0, 1)
    ]
    return [*reversed(marks), Mark(Moment(6.0, phases.STEPPED, 0), cpu_s=100.0, hidden_s=0.0)]


def test_phases_parts_add_up_to_the_recovery() -> None:
    found = phases.recovery(_events(), _marks())
    assert found.parts == {
        "notice": 1.0,
        "stop": 3.0,
        "start": 7.0,
        "join": 10.0,
        "compile": 10.0,
        "restore": 20.0,
        "step": 10.0,
    }
    assert found.total_s == 71.0 - 10.0
    assert found.parts.keys() == phases.NAMES.keys()
    assert (found.hidden_s, found.cpu_s) == (0.5, 5.0 + 6.0)


def test_phases_missing_mark_is_named() -> None:
    marks = [each for each in _marks() if each.moment.name != phases.COMPILED]
    with pytest.raises(ValueError, match="no event compiled in life 1"):
        phases.recovery(_events(), marks)


def test_phases_median_is_of_each_part() -> None:
    rounds = [
        phases.Recovery(dict.fromkeys(phases.NAMES, float(value)), value / 10, value * 2.0)
        for value in (3, 1, 8)
    ]
    found = phases.median(rounds)
    assert set(found.parts.values()) == {3.0}
    assert (found.hidden_s, found.cpu_s) == (0.3, 6.0)


def test_phases_marks_are_read_back(tmp_path: Path) -> None:
    for process in range(2):
        marks = phases.MarkFile(tmp_path, process, life=1)
        marks.add(phases.OPENED)
        marks.add(phases.RESTORED, hidden_s=float(process))
    found = phases.read_marks(tmp_path)
    assert sorted((each.moment.name, each.moment.life, each.hidden_s) for each in found) == [
        (phases.OPENED, 1, 0.0),
        (phases.OPENED, 1, 0.0),
        (phases.RESTORED, 1, 0.0),
        (phases.RESTORED, 1, 1.0),
    ]


def test_place_under_slurm_counts_the_lives(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    options = argparse.Namespace(marks_dir=tmp_path / "marks", local_dir=tmp_path / "ram", slices=2)
    places = [place.find(options, {"SLURM_PROCID": process}) for process in ("0", "3", "3")]
    assert [(each.process, each.life) for each in places] == [(0, 0), (3, 0), (3, 1)]
    assert {(each.slices, each.local_dir) for each in places} == {(2, tmp_path / "ram")}
    assert list((tmp_path / "marks").iterdir()) == []
