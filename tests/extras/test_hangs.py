"""Jobs that hang: real processes under no supervisor of ours, one stopped or deadlocked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm_start
from launch_support import free_port
from programs import started
from running_jobs import HERE, job_root

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extras.hang import HangWatch

COUNT, LAST, AT = 3, 20, 9
LIFE_TIMEOUT_S = 120.0


Running = subprocess.Popen[bytes] | warm_start.WarmProcess


def begun(words: list[str], env: dict[str, str], log: int, *, server: int) -> Running:
    """Start a process with an empty input."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        fork = warm_start.start(words, env, (nothing, log, log), server=server)
        return fork or subprocess.Popen(
            [sys.executable, *words], env=env, stdin=nothing, stdout=log, stderr=log
        )
    finally:
        os.close(nothing)


class Life:
    """One life of the job: its processes, and what they wrote."""

    def __init__(self, root: Path, number: int, **settings: Any) -> None:
        self.root, self.logs = root, [root / f"log_{number}_{p}" for p in range(COUNT)]
        for process in range(COUNT):
            (root / f"host{process}").mkdir(exist_ok=True)
            (root / f"out_{process}.jsonl").unlink(missing_ok=True)
        port, env = str(free_port()), {**os.environ, "JAX_PLATFORMS": "cpu"}
        self.processes: list[Running] = []
        for process, path in enumerate(self.logs):
            arguments = [str(root), port, str(process), str(COUNT), str(LAST), json.dumps(settings)]
            words = [str(HERE / "hang_job.py"), *arguments]
            with path.open("wb") as log:
                self.processes.append(begun(words, env, log.fileno(), server=process))

    def codes(self, *, but: int | None = None) -> list[int | None]:
        """Wait for all processes but one; then kill what is left, as an engine does."""
        deadline_s = time.monotonic() + LIFE_TIMEOUT_S
        try:
            for process, each in enumerate(self.processes):
                if process != but:
                    each.wait(deadline_s - time.monotonic())
            return [each.poll() for each in self.processes]
        finally:
            for each in self.processes:
                each.kill()
                each.wait()

    def lines(self, process: int) -> list[dict[str, Any]]:
        whole = (self.root / f"out_{process}.jsonl").read_text().split("\n")[:-1]
        return [json.loads(line) for line in whole]

    def value(self, process: int, key: str) -> Any:
        return next((line[key] for line in self.lines(process) if key in line), None)


@pytest.mark.parametrize(
    ("process", "kind"),
    [(1, "stop"), (1, "iterator"), pytest.param(0, "stop", marks=pytest.mark.slow)],
)
def test_hung_job_ends_itself_and_resumes_where_it_was(process: int, kind: str) -> None:
    with job_root() as root:
        first = Life(root, 0, hang=(process, AT, kind), on_event="hang(4)")
        codes = first.codes(but=process if kind == "stop" else None)
        logs = [path.read_text() for path in first.logs]
        assert codes == [None if kind == "stop" and p == process else 124 for p in range(COUNT)], (
            logs
        )
        complete = {line["step"] for line in first.lines(2) if line.get("event") == "save.complete"}
        others = [p for p in range(COUNT) if codes[p] == 124]
        for p in others:
            assert first.value(p, "behind") == str(process)
            assert f"process {process}" in first.value(p, "reason")
            assert "the job hangs" in logs[p]
            assert "most recent call first" in logs[p], "all stacks"
        if kind == "iterator":
            assert "__next__" in first.value(process, "stacks")
        second = Life(root, 1, on_event="hang(60)")
        assert second.codes() == [0] * COUNT, [path.read_text() for path in second.logs]
        total = float(sum(range(1, LAST + 1)) * sum(range(1, COUNT + 1)))
        for p in range(COUNT):
            assert second.value(p, "restored") == second.value(0, "restored")
            assert max(complete, default=0) <= second.value(p, "restored") < AT
            assert second.value(p, "total") == [total] * 4
            assert second.value(p, "position") == LAST


TWO_JOBS = """
import sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.extras.hang import HangWatch

watch = HangWatch(2.0)

def opened(name):
    return EmergencyCheckpointer(run_id=name, local_dir=f"{sys.argv[1]}/{name}", on_event=watch)

first, second = opened("first"), opened("second")
for job in first, second:
    job.save(step=1, state={"w": jnp.zeros(4)})
    job.wait_until_finished()
first.stop()
time.sleep(float(sys.argv[2]))
"""


def test_watch_of_two_jobs_goes_on_when_one_ends() -> None:
    with job_root() as root:
        words = [HERE / "text_program.py", TWO_JOBS, root, LIFE_TIMEOUT_S]
        with started(*words, stderr=subprocess.PIPE) as process:
            code = process.wait(LIFE_TIMEOUT_S)
            assert process.stderr is not None
            assert code == 124, process.stderr.read()


NEVER_COMPUTED = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from configs import config_with
from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.config import OrbaxFace

root = sys.argv[1]
settings = {
    "dir": f"{root}/steps",
    "local_dir": f"{root}/ram",
    "local_save_every": 0,
    "save_every": 1,
    "save_timeout_s": 1.0,
    "orbax": OrbaxFace(waits_for_storage=True),
    "on_event": "hang(2)",
}
ckpt = EmergencyCheckpointer(config_with(settings))
started = jnp.ones(1 << 18)
ckpt.save(step=1, state={"w": started})
ckpt.wait_until_finished()
never = jax.jit(lambda w: jax.lax.while_loop(lambda w: w[0] > 0, lambda w: w + 1, w))(started)
ckpt.save(step=2, state={"w": never})
"""


def test_save_whose_arrays_never_come_is_a_hang() -> None:
    """The four hours of a save to storage counted for a save that waited for no storage."""
    with job_root() as root:
        words = [HERE / "text_program.py", NEVER_COMPUTED, root]
        with started(*words, stderr=subprocess.PIPE) as process:
            code = process.wait(LIFE_TIMEOUT_S)
            assert process.stderr is not None
            text = process.stderr.read()
            assert code == 124, text
            assert "all processes stand at step 2, in the checkpointer's save" in text


@pytest.mark.slow
def test_long_pause_before_first_and_after_last_step_is_no_hang() -> None:
    """Compiling takes longer than the timeout, and so does what comes after the last step."""
    with job_root() as root:
        life = Life(root, 0, on_event="hang(5)", pause_s=8.0)
        assert life.codes() == [0] * COUNT, [path.read_text() for path in life.logs]


@pytest.mark.slow
def test_process_stopped_for_a_time_goes_on() -> None:
    with job_root() as root:
        life = Life(root, 0, hang=(1, AT, "stop"), on_event="hang(60)")
        deadline_s = time.monotonic() + LIFE_TIMEOUT_S
        state = ""
        while state != "T" and time.monotonic() < deadline_s:
            time.sleep(0.1)
            stat = Path(f"/proc/{life.processes[1].pid}/stat").read_text()
            state = stat.rpartition(")")[2].split()[0]
        os.kill(life.processes[1].pid, signal.SIGCONT)
        assert life.codes() == [0] * COUNT, [path.read_text() for path in life.logs]


@pytest.mark.parametrize("timeout_s", ["600", None, 0, -1.0, float("nan"), float("inf")])
def test_timeout_that_is_none_is_a_config_error(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match="a hang watch needs a finite time above 0 s"):
        HangWatch(timeout_s)
