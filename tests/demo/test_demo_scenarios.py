"""The table of scenarios: each one is a fault that the launcher takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from looks import USAGE_EXIT_CODE

from emergency_ckpt.errors import ConfigError
from examples.demo.__main__ import main
from examples.demo.scenarios import ALL, SCENARIOS, ScenarioJob, choose
from examples.faults.faults import parse_fault
from examples.faults.job_layout import JobLayout

JOB = ScenarioJob()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("slice-loss", "step=23 kill=slice:1 lose-ram exact"),
        ("preemption", "step=8 kill=process:3 signal=TERM exact"),
        ("all-ram-lost", "step=43 kill=all lose-ram exact"),
    ],
)
def test_faults_of_the_default_job(name: str, fault: str) -> None:
    assert SCENARIOS[name].fault(JOB) == fault


@pytest.mark.parametrize(("slices", "hosts_per_slice"), [(2, 2), (3, 2), (4, 3)])
def test_slice_loss_takes_the_hosts_of_one_slice(slices: int, hosts_per_slice: int) -> None:
    job = ScenarioJob(slices=slices, hosts_per_slice=hosts_per_slice)
    fault = parse_fault(SCENARIOS["slice-loss"].fault(job))
    topology = JobLayout.first(slices, hosts_per_slice)
    lost = fault.target.processes(topology)
    assert len(set(lost)) == hosts_per_slice
    assert {topology.slice_of(process) for process in lost} == {slices - 1}


def test_all_is_every_scenario() -> None:
    assert [scenario.name for scenario in choose(ALL, JOB)] == list(SCENARIOS)
    assert [scenario.name for scenario in choose("preemption", JOB)] == ["preemption"]


@pytest.mark.parametrize(
    ("name", "changes", "problems"),
    [
        ("meteor", {}, ["no scenario meteor"]),
        ("slice-loss", {"slices": 1}, ["slice-loss needs 2 slices, got 1"]),
        ("slice-loss", {"steps": 23}, ["slice-loss strikes at step 23, after the last of 23"]),
    ],
)
def test_what_cannot_be_shown_is_refused(
    name: str, changes: dict[str, int], problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(name, dataclasses.replace(JOB, **changes))
    assert len(caught.value.problems) == len(problems)
    for problem, line in zip(problems, caught.value.problems, strict=True):
        assert problem in line


def test_command_refuses_before_it_starts_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--out", f"{tmp_path}/out", "--slices", "1"])
    assert code == USAGE_EXIT_CODE
    assert "slice-loss needs 2 slices, got 1" in capsys.readouterr().err
    for name, value in (
        *(("--local-every", "0"), ("--hosts-per-slice", "-1")),
        *(("--seed", "-1"), ("--seed", "4294967296"), ("--seed", "1e3")),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["--out", f"{tmp_path}/out", name, value])
        assert ended.value.code == USAGE_EXIT_CODE
        assert f"argument {name}: " in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_command_removes_only_what_a_demo_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "runs" / "precious"
    precious.parent.mkdir()
    precious.write_text("keep me")
    assert main(["--out", str(tmp_path)]) == USAGE_EXIT_CODE
    assert "was not made by the demo" in capsys.readouterr().err
    assert precious.read_text() == "keep me"
