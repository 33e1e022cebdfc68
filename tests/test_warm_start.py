"""Programs of tests that are forks: each is alone, as if it had been started by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_start
from file_costs import Cost
from launch_support import alive, state, wait_until_gone
from places import JOBS
from programs import ended, printed, started

MIRROR = JOBS / "mirror_program.py"
PROGRAM = JOBS / "ending_program.py"
ENVIRONMENT = {
    "JAX_NUM_CPU_DEVICES": "3",
    "JAX_ENABLE_X64": "1",
    "FSSPEC_GCS_TOKEN": "anon",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "ODD": "a variable of this test\udc80",
}
OFFERS = """
import sys, time
import programs, warm_start
warm_start.offer()
with programs.started(*sys.argv[1:]) as program:
    print(program.line(), flush=True)
    print(*warm_start.servers(), flush=True)
    time.sleep(600)
"""


def seen(*words: object, cold: bool) -> dict[str, Any]:
    """What a program saw of its process."""
    with started(MIRROR, "mirror", *words, env=ENVIRONMENT, cold=cold) as program:
        said, _ = program.communicate(timeout=120)
    return json.loads(said)


def test_fork_sees_what_a_process_of_its_own_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert printed(MIRROR, "spoil") == "null\n", "the fork before changed all of it"
    fork, own = seen("a", "b", cold=False), seen("a", "b", cold=True)
    assert fork == own
    assert fork["folder"] == str(tmp_path)
    assert fork["devices"] == 3


def test_no_two_forks_draw_the_same_numbers() -> None:
    first, second = (json.loads(printed(MIRROR, "draw")) for _ in range(2))
    assert not set(first) & set(second)


@pytest.mark.parametrize("variable", ["PYTHONHASHSEED", "PYTHONPATH"])
def test_program_that_configures_its_interpreter_has_one(variable: str) -> None:
    value = {"PYTHONHASHSEED": "7", "PYTHONPATH": f"{os.environ['PYTHONPATH']}:/elsewhere"}
    env = {variable: value[variable]}
    told = printed(PROGRAM, "interpreter", env=env)
    with started(PROGRAM, "interpreter", env=env, cold=True) as cold:
        assert cold.communicate(timeout=120)[0] == told


@pytest.mark.parametrize(
    ("words", "status"), [(["0"], 0), (["3"], 3), (["raise"], 1), (["kill"], -signal.SIGKILL)]
)
def test_end_of_a_fork_is_told_as_it_was(words: list[str], status: int) -> None:
    done = ended(PROGRAM, "end", *words)
    assert (done.returncode, done.stdout) == (status, "at its end\n")
    if words == ["raise"]:
        assert done.stderr.endswith("ValueError: of the program\n")


def test_ended_fork_keeps_its_number_until_waited_for() -> None:
    with started(PROGRAM, "end", "0") as program:
        while state(program.pid) != "Z":
            pass
        os.kill(program.pid, signal.SIGTERM)  # reaches nobody else
        assert program.wait(60) == 0
        assert state(program.pid) == "X"


def test_wait_for_a_fork_has_a_deadline() -> None:
    with started(PROGRAM, "sleep") as program:
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.05)
        program.terminate()
        assert program.wait(60) == -signal.SIGTERM


def test_killed_run_leaves_no_process() -> None:
    variables = (warm_start.COLD_VARIABLE, warm_start.OFFER_VARIABLE)
    environment = {k: v for k, v in os.environ.items() if k not in variables}
    with subprocess.Popen(
        [sys.executable, "-c", OFFERS, PROGRAM, "sleep"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        (fork,) = map(int, run.stdout.readline().split())
        servers = [*map(int, run.stdout.readline().split())]
        assert alive(fork)
        assert len(servers) == 2
        run.kill()
    wait_until_gone([fork, *servers])


def test_fork_of_a_killed_worker_ends() -> None:
    environment = {k: v for k, v in os.environ.items() if k != warm_start.COLD_VARIABLE}
    with subprocess.Popen(
        [sys.executable, "-c", OFFERS, PROGRAM, "sleep"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        (fork,) = map(int, worker.stdout.readline().split())
        worker.kill()
    wait_until_gone([fork])
    assert printed(PROGRAM, "end", "0") == "at its end\n", "the servers go on"


@pytest.mark.skipif(warm_start.COLD_VARIABLE in os.environ, reason="there are no forks")
def test_time_of_a_fork_counts_when_it_was_waited_for() -> None:
    before_s = warm_start.cpu_s()
    assert printed(PROGRAM, "end", "0") == "at its end\n"
    assert warm_start.cpu_s() > before_s


@pytest.mark.skipif(warm_start.COLD_VARIABLE in os.environ, reason="there are no forks")
def test_time_of_forks_is_part_of_the_cost_of_a_file() -> None:
    while warm_start.cpu_s() < 0.5:
        assert printed(PROGRAM, "end", "0") == "at its end\n"
    of_kernel_s = sum(os.times()[:4])
    assert Cost.so_far().cpu_s - of_kernel_s == pytest.approx(warm_start.cpu_s(), abs=0.2)
