"""The example in plain JAX, run as it stands, by the supervisors that docs/operations.md names."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledgers import complete_in
from programs import printed
from readme_blocks import EXAMPLE, example_in, readme_block

LONG_S = 120.0
LAST_STEP = 600
LAUNCH = ["-m", "emergency_ckpt.tools.cli.main", "launch"]
SHELL = 'until "$0" "$1" & echo $! > "$2"; wait $!; do sleep 0.1; done'


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def program_in(directory: Path) -> Path:
    return example_in(directory, "plain_jax", ("last_step = 100\n", f"last_step = {LAST_STEP}\n"))


def results_of(output: str) -> set[str]:
    return set(re.findall(r"done: (.*)", output))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the output of the program in a run without faults."""
    program = program_in(tmp_path_factory.mktemp("readme") / "whole")
    told = printed(program)
    assert "start after step None" in told
    found = results_of(told)
    assert len(found) == 1
    return found


def test_readme_loop_is_part_of_the_example() -> None:
    example = iter(EXAMPLE.read_text().splitlines())
    missing = [line for line in readme_block("loop").splitlines() if line not in example]
    assert missing == []


@pytest.mark.core
def test_readme_loop_launched_resumes_after_a_lost_slice(root: Path, undisturbed: set[str]) -> None:
    program = program_in(root / "launched")
    told = printed(
        *("-m", "examples.faults"),
        *("--hosts-per-slice", "1", "--log-dir", root / "logs"),
        *("--fault", "step=23 kill=slice:1 lose-ram exact"),
        *("--", sys.executable, program),
    )
    # The first one to reach step 20 has waited for the save of step 10 by then.
    starts = re.findall(r"\[1\.\d\] start after step (\d+)", told)
    assert starts in (["10", "10"], ["20", "20"])
    assert results_of(told) == undisturbed
    persistent = root / "launched" / "persistent"
    assert [path.name for path in persistent.glob("[0-9]*")] == [str(LAST_STEP)]


def test_readme_loop_in_a_shell_resumes_after_a_kill(root: Path, undisturbed: set[str]) -> None:
    program = program_in(root / "shell")
    number = root / "pid"
    with subprocess.Popen(
        ["/bin/sh", "-c", SHELL, sys.executable, str(program), str(number)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            _wait_for_a_step(root / "shell" / "ram", shell)
            os.kill(int(number.read_text()), signal.SIGKILL)
            output, _ = shell.communicate(timeout=LONG_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    first, second = re.findall(r"start after step (\w+)", output)
    assert first == "None"
    assert int(second) > 0
    assert int(second) % 10 == 0
    assert results_of(output) == undisturbed


def _wait_for_a_step(ram: Path, shell: subprocess.Popen[str]) -> None:
    """Until the record of a whole step is there."""
    deadline_s = time.monotonic() + LONG_S
    while complete_in(ram) < 0:
        assert shell.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
