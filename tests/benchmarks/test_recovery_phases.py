"""The parts of a recovery, from made-up events."""

import argparse
from pathlib import Path

import pytest
from benchmark_runs import refusal

from benchmarks.recovery import __main__ as recovery
from benchmarks.recovery import phases, worker
from benchmarks.recovery.phases import Mark


def _events() -> list[Mark]:
    names = ["fault.fired", "process.exited", "process.exited", "life.ended"]
    first = [Mark(10.0 + at, name, life=0) for at, name in zip((0, 1, 3, 4), names, strict=True)]
    return [Mark(5.0, "process.exited", life=0), *first]


def _marks(restored_step: int) -> list[Mark]:
    # Two processes; the later one counts.
    marks = [
        Mark(
            20.0 + 10 * at + late,
            name,
            life=1,
            process=late,
            cpu_s=at * (1.0 + late),
            main_cpu_s=at / 2,
            step=restored_step if name == phases.RESTORED else 0,
            spent_s={"plan": 0.5 + late} if name == phases.RESTORED else {},
        )
        for at, name in enumerate(phases.MARKS)
        for late in (0, 1)
    ]
    return [*reversed(marks), Mark(6.0, phases.STEPPED, life=0, cpu_s=100.0)]


def test_phases_parts_add_up_to_the_recovery() -> None:
    found = phases.recovery([*_events(), *_marks(phases.RESTORE_STEP)])
    assert found.parts == {
        "notice": 1.0,
        "stop": 3.0,
        "start": 7.0,
        "join": 10.0,
        "describe": 10.0,
        "open": 10.0,
        "compile": 10.0,
        "restore": 10.0,
        "step": 10.0,
    }
    assert found.total_s == 81.0 - 10.0
    assert list(found.parts) == list(phases.PARTS)
    assert (found.cpu_s, found.save_s) == (6.0 + 12.0, 10.0)
    assert found.ours_s == 20.0
    assert found.leader_cpu_s["restore"] == 1.0
    assert found.main_cpu_s["restore"] == 0.5
    assert found.mean_cpu_s[phases.SAVE] == 1.5
    assert phases.median([found, found]) == found


def test_recovery_of_another_step_does_not_count() -> None:
    with pytest.raises(RuntimeError, match="restored step 5"):
        phases.recovery([*_events(), *_marks(5)])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--processes", "4,x"], "invalid"),
        (["--processes", "4,5"], "5 processes do not divide into 2 slices"),
        (["--processes", "4", "--engine", "slurm"], "--processes needs --engine launch"),
        (["--processes", "1000000"], "1000000 processes take about"),
    ],
)
def test_processes_that_cannot_run_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert problem in refusal(recovery.main, arguments, capsys)


def test_place_under_slurm_counts_the_lives(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    options = argparse.Namespace(marks_dir=tmp_path / "marks", local_dir=tmp_path / "ram")
    places = [worker.find_place(options, {"SLURM_PROCID": process}) for process in ("0", "3", "3")]
    assert [(each.process, each.life) for each in places] == [(0, 0), (3, 0), (3, 1)]
    assert {each.local_dir for each in places} == {tmp_path / "ram"}
    assert list((tmp_path / "marks").iterdir()) == []
