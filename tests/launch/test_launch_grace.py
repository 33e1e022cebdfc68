"""A stop leaves a preemption save its time, and names the processes that it killed."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from launch_support import JobResult, JobSpec, MakeSpec, run_job, supervisor_of
from looks import eckpt_here

from emergency_ckpt.config import Config

# Each process saves after a notice, and leaves as a checkpointer's loop does.
PROGRAM = """
def note(signum, frame):
    time.sleep({saves_s} * env.process_index)
    (env.local_dir / "last").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, note)
(env.local_dir / "ready").touch()
while not all((host / "ready").exists() for host in env.local_dir.parent.glob("host_*")):
    time.sleep(0.01)
report_step(1)
time.sleep(600)
"""


def stopped(spec: JobSpec, signals: int = 1, apart_s: float = 0.0) -> JobResult:
    """The result of a job that is stopped when all its processes are ready."""
    supervisor = supervisor_of(spec)

    def stop() -> None:
        while any(not _reports(spec, process) for process in range(2)):
            time.sleep(0.01)
        for _ in range(signals):
            supervisor.stop(signal.SIGTERM)
            time.sleep(apart_s)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        return supervisor.run(120)
    finally:
        thread.join()


def _reports(spec: JobSpec, process: int) -> bool:
    path = spec.private_dir / "life_000" / f"progress_{process:05d}"
    return path.exists() and path.read_bytes()[:8] == (1).to_bytes(8, "little")


def test_stop_waits_for_a_preemption_save(make_spec: MakeSpec) -> None:
    result = stopped(make_spec(PROGRAM.format(saves_s=2.0), grace_s=30.0))
    assert [each.returncode for each in result.lives[0].exits] == [143, 143]
    assert "killed" not in str(result.error)


def test_process_that_leaves_after_a_notice_hurries_no_other(make_spec: MakeSpec) -> None:
    """An engine told one process, and all save: the others need longer than after a death."""
    spec = make_spec(PROGRAM.format(saves_s=2.0), grace_s=30.0, max_restarts=0)
    result = run_job(spec, "step=1 kill=process:0 signal=TERM exact")
    assert [each.returncode for each in result.lives[0].exits] == [143, 143]
    assert (spec.ramdisk(1) / "last").exists()


def test_stop_without_time_names_what_was_killed(make_spec: MakeSpec) -> None:
    result = stopped(make_spec(PROGRAM.format(saves_s=600), grace_s=0.3))
    assert [each.returncode for each in result.lives[0].exits] == [143, -signal.SIGKILL]
    assert "were killed: [1]" in str(result.error)


def test_second_stop_waits_no_longer(make_spec: MakeSpec) -> None:
    begin_s = time.monotonic()
    spec = make_spec(PROGRAM.format(saves_s=600), grace_s=300.0)
    result = stopped(spec, signals=2, apart_s=1.0)
    assert time.monotonic() - begin_s < 60
    assert "were killed: [" in str(result.error)


def test_grace_is_longer_than_a_preemption_save(
    make_spec: MakeSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    default_s = JobSpec.grace_s
    assert default_s >= Config.preemption_grace_s + 5
    with pytest.raises(SystemExit):
        eckpt_here("launch", "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "more than the job's preemption_grace_s" in said
    assert f"ends all at once (default: {default_s})" in said
