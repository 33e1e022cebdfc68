"""The parts of a recovery, from made-up events."""

from pathlib import Path

import pytest

from benchmarks.recovery import phases
from benchmarks.recovery.phases import Moment


def _moments() -> list[Moment]:
    names = ["fault.fired", "process.exited", "process.exited", "life.ended"]
    first = [Moment(10.0 + at, name, 0) for at, name in zip((0, 1, 3, 4), names, strict=True)]
    # Two processes; the later one counts.
    second = [
        Moment(20.0 + 10 * at + late, name, 1)
        for at, name in enumerate(phases.MARKS)
        for late in (0, 1)
    ]
    before = [Moment(5.0, "process.exited", 0), Moment(6.0, phases.STEPPED, 0)]
    return [*before, *reversed(second), *first]


def test_phases_parts_add_up_to_the_recovery() -> None:
    found = phases.recovery(_moments(), hidden_s=0.5)
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


def test_phases_missing_mark_is_named() -> None:
    moments = [each for each in _moments() if each.name != phases.COMPILED]
    with pytest.raises(ValueError, match="no event compiled in life 1"):
        phases.recovery(moments, 0.0)


def test_phases_median_is_of_each_part() -> None:
    rounds = [
        phases.Recovery(dict.fromkeys(phases.NAMES, float(value)), value / 10)
        for value in (3, 1, 8)
    ]
    found = phases.median(rounds)
    assert set(found.parts.values()) == {3.0}
    assert found.hidden_s == 0.3


def test_phases_marks_are_read_back(tmp_path: Path) -> None:
    for process in range(2):
        marks = phases.MarkFile(tmp_path, process, life=1)
        marks.add(phases.OPENED)
        marks.add(phases.RESTORED, hidden_s=float(process))
    found = phases.read_marks(tmp_path)
    assert sorted((moment.name, moment.life, hidden_s) for moment, hidden_s in found) == [
        (phases.OPENED, 1, 0.0),
        (phases.OPENED, 1, 0.0),
        (phases.RESTORED, 1, 0.0),
        (phases.RESTORED, 1, 1.0),
    ]
