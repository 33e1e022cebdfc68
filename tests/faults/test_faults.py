"""The text form of faults, and whom they hit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.errors import ConfigError
from examples.faults.__main__ import main
from examples.faults.faults import (
    Fault,
    Target,
    check_faults,
    new_indices,
    parse_fault,
)
from examples.faults.job_layout import JobLayout

TWO_BY_TWO = JobLayout.first(2, 2)


@pytest.mark.parametrize(
    ("text", "step", "target", "others"),
    [
        ("step=23 kill=slice:1", 23, Target("slice", (1,)), {}),
        ("step=23 kill=slice:1 lose-ram", 23, Target("slice", (1,)), {"lose_ram": True}),
        ("lose-ram  kill=all\tstep=0", 0, Target("all"), {"lose_ram": True}),
        ("step=1 kill=process:3", 1, Target("process", (3,)), {}),
        ("step=1 kill=host:2 signal=TERM", 1, Target("host", (2,)), {"signal": "TERM"}),
        ("step=1 kill=hosts:3,1", 1, Target("host", (1, 3)), {}),
        ("step=1 kill=all exact", 1, Target("all"), {"exact": True}),
        ("step=1 kill=all permute=3,2,1,0", 1, Target("all"), {"permute": "3,2,1,0"}),
        ("step=1 kill=all permute=seed:7", 1, Target("all"), {"permute": "seed:7"}),
        (
            "step=1 kill=process:0 signal=STOP resume-after-s=1.5",
            1,
            Target("process", (0,)),
            {"signal": "STOP", "resume_after_s": 1.5},
        ),
        (
            "step=1 kill=process:0 signal=STOP resume-after-s=1000000.000000",
            1,
            Target("process", (0,)),
            {"signal": "STOP", "resume_after_s": 1_000_000.0},
        ),
    ],
)
def test_parses(text: str, step: int, target: Target, others: dict[str, Any]) -> None:
    fault = parse_fault(text)
    assert fault == Fault(" ".join(text.split()), step, target, **others)
    assert str(fault) == fault.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "step=... is missing"),
        ("kill=all", "step=... is missing"),
        ("step=3", "kill=... is missing"),
        ("step=-1 kill=all", "step=-1: expected a whole number"),
        ("step=1.5 kill=all", "step=1.5: expected a whole number"),
        ("step=1_0 kill=all", "step=1_0: expected a whole number"),
        ("step=1234567890123456 kill=all", "expected a whole number"),
        ("step=1 kill=rack:1", "kill=rack:1: expected process:N"),
        ("step=1 kill=slice", "kill=slice: expected process:N"),
        ("step=1 kill=slice:", "kill=slice:: expected a whole number"),
        ("step=1 kill=slice:1,2", "kill=slice:1,2: expected a whole number"),
        ("step=1 kill=hosts:1,1", "kill=hosts:1,1: a number is given twice"),
        ("step=1 kill=all:1", "kill=all:1: expected process:N"),
        ("step=1 kill=all step=2", "step is given twice"),
        ("step=1 kill=all lose-ram lose-ram", "lose-ram is given twice"),
        ("step=1 kill=all lose-ram=1", "unknown word 'lose-ram=1'"),
        ("step=1 kill=all lose_ram", "unknown word 'lose_ram'"),
        ("step=1 kill=all permute=rotate", "permute=rotate: expected reverse"),
        ("step=1 kill=all permute=1,1", "permute=1,1: a number is given twice"),
        ("step=1 kill=all signal=HUP", "signal=HUP: expected one of KILL"),
        ("step=1 kill=all resume-after-s=1", "resume-after-s needs signal=STOP"),
        ("step=1 kill=all signal=STOP resume-after-s=nan", "expected seconds"),
    ],
)
def test_refuses_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault(text)
    assert problem in str(caught.value)


def test_names_every_problem_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault("step=x kill=y zap")
    assert len(caught.value.problems) == 3


@given(st.text(max_size=60))
def test_any_text_is_a_fault_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_fault(text)


@pytest.mark.parametrize(
    ("target", "topology", "processes"),
    [
        ("all", TWO_BY_TWO, (0, 1, 2, 3)),
        ("process:3", TWO_BY_TWO, (3,)),
        ("slice:1", TWO_BY_TWO, (2, 3)),
        ("hosts:0,3", TWO_BY_TWO, (0, 3)),
        ("host:3", TWO_BY_TWO.renumbered((3, 2, 1, 0)), (0,)),
        ("process:3", TWO_BY_TWO.renumbered((3, 2, 1, 0)), (3,)),
        ("hosts:0,1", TWO_BY_TWO.renumbered((1, 2, 3, 0)), (1, 2)),
    ],
)
def test_whom_it_hits(target: str, topology: JobLayout, processes: tuple[int, ...]) -> None:
    assert parse_fault(f"step=1 kill={target}").target.processes(topology) == processes


@pytest.mark.parametrize(
    ("permutation", "slices", "hosts_per_slice", "host_of_process"),
    [
        ("reverse", 2, 2, (3, 2, 1, 0)),
        ("swap-slices", 2, 2, (2, 3, 0, 1)),
        ("swap-slices", 3, 2, (4, 5, 2, 3, 0, 1)),
        # Host 0 becomes process 1, host 1 process 2, host 2 process 0.
        ("1,2,0", 3, 1, (2, 0, 1)),
    ],
)
def test_permutations(
    permutation: str, slices: int, hosts_per_slice: int, host_of_process: tuple[int, ...]
) -> None:
    topology = JobLayout.first(slices, hosts_per_slice)
    permute = parse_fault(f"step=1 kill=all permute={permutation}").permute
    assert permute is not None
    assert topology.renumbered(new_indices(permute, topology)).host_of_process == host_of_process


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**15 - 1))
def test_every_permutation_keeps_every_host(slices: int, hosts: int, seed: int) -> None:
    topology = JobLayout.first(slices, hosts)
    for word in ("reverse", "swap-slices", f"seed:{seed}"):
        permute = parse_fault(f"step=1 kill=all permute={word}").permute
        assert permute is not None
        assert new_indices(permute, topology) == new_indices(permute, topology)
        after = topology.renumbered(new_indices(permute, topology))
        assert sorted(after.host_of_process) == list(range(slices * hosts))
        for host in range(slices * hosts):
            assert after.host_of_process[after.process_on(host)] == host


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("step=1 kill=process:4", "no process 4, there are 4"),
        ("step=1 kill=slice:2", "no slice 2, there are 2"),
        ("step=1 kill=hosts:1,7", "no host 7, there are 4"),
        ("step=1 kill=all permute=1,0", "must name each of 0..3"),
        ("step=1 kill=all permute=1,2,3,4", "must name each of 0..3"),
    ],
)
def test_faults_must_fit_the_job(text: str, problem: str) -> None:
    [found] = check_faults([parse_fault(text)], TWO_BY_TWO)
    assert problem in found


def test_local_root_that_cannot_be_made_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["--local-root", str(tmp_path / "file" / "root"), "--log-dir", str(tmp_path / "logs")]
    assert main([*words, "--slices", "2", "--", "true"]) == 1
    assert "examples.faults: " in capsys.readouterr().err
