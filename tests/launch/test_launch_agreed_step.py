"""A stop leaves a preemption save its time, and says what it cost when it had too little."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from launch_support import JobResult, JobSpec, MakeSpec, supervisor_of
from looks import eckpt_here

from emergency_ckpt.config import Config

# Each process agrees on a step after a notice, and says so as a checkpointer does.
PROGRAM = """
from emergency_ckpt.extras.event_log import LoggedEvent, encode_line
path = env.event_log / f"events_{{env.process_index:05d}}.jsonl"
path.parent.mkdir(exist_ok=True)

def tell(name, **fields):
    line = encode_line(LoggedEvent(
        time_s=time.time(), name=name, process=env.process_index, fields=fields,
        life=env.restart_count,
    ))
    with path.open("ab") as file:
        file.write(line)

def note(signum, frame):
    tell("preemption.reached", step=7, grace_s={grace_s})
    tell("save.started", step=7, tier="local")
    tell("save.complete", step=7)
    tell("save.started", step=7, tier="persistent")
    time.sleep({saves_s})
    tell("persistent.complete", step=7)
    sys.exit(143)

signal.signal(signal.SIGTERM, note)
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


def test_stop_waits_for_a_step_that_was_agreed(make_spec: MakeSpec) -> None:
    """For as long as the job's own grace, which the launcher has never been told."""
    spec = make_spec(PROGRAM.format(grace_s=30.0, saves_s=2.0), grace_s=0.3)
    result = stopped(spec)
    assert [each.returncode for each in result.lives[0].exits] == [143, 143]
    assert "ERROR" not in str(result.error)


def test_stop_without_time_names_what_is_not_saved(make_spec: MakeSpec) -> None:
    result = stopped(make_spec(PROGRAM.format(grace_s=-4.5, saves_s=600), grace_s=0.3))
    assert [each.returncode for each in result.lives[0].exits] == [-signal.SIGKILL] * 2
    assert "ERROR: all processes had agreed to save step 7" in str(result.error)
    assert "not in: persistent" in str(result.error)
    (event,) = (event for event in result.events if event.name == "preemption.lost")
    assert event.fields["step"] == 7


def test_second_stop_waits_no_longer(make_spec: MakeSpec) -> None:
    begin_s = time.monotonic()
    result = stopped(make_spec(PROGRAM.format(grace_s=600.0, saves_s=600)), signals=2, apart_s=1.0)
    assert time.monotonic() - begin_s < 60
    assert "not in: persistent" in str(result.error)


def test_grace_is_longer_than_a_preemption_save(
    make_spec: MakeSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    default_s = JobSpec.grace_s
    assert default_s >= Config.preemption_grace_s + 5
    with pytest.raises(SystemExit):
        eckpt_here("launch", "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "seconds from SIGTERM to SIGKILL when the job is stopped" in said
    assert f"ends all at once (default: {default_s})" in said
