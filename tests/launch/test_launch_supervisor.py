"""The supervisor, on real processes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from launch_support import (
    JobResult,
    JobSpec,
    MakeSpec,
    checked,
    run_job,
    state,
    supervisor_of,
    wait_until,
    wait_until_gone,
)

from emergency_ckpt.errors import ConfigError, DeadlineExceeded, JobFailed, LocalTierError
from emergency_ckpt.extras.event_log import LoggedEvent, read_events

TIMEOUT_S = 120


def first_lines(spec: JobSpec, life: int) -> list[str]:
    """What each process of a life printed first."""
    count = spec.slices * spec.hosts_per_slice
    return [spec.log_path(life, i).read_text().splitlines()[0] for i in range(count)]


def starts(spec: JobSpec, life: int) -> dict[str, int]:
    """The step from which each host went on in a life."""
    words = [line.split() for line in first_lines(spec, life)]
    return {line[5]: int(line[7]) for line in words}


def assert_ram_was_kept(spec: JobSpec, result: JobResult, host: int) -> None:
    """The host went on in life 1 where it was in life 0 (it may have died before it said so)."""
    [step] = [max(exit_.step, 0) for exit_ in result.lives[0].exits if exit_.host == host]
    assert starts(spec, 1)[f"host_{host:05d}"] in (step, step + 1)


def test_clean_end(make_spec: MakeSpec) -> None:
    spec = make_spec("train(5)", slices=2, hosts_per_slice=2)
    result = checked(run_job(spec))
    assert (result.exit_code, len(result.lives)) == (0, 1)
    [life] = result.lives
    assert (life.ending, life.step, life.first_death) == ("finished", 5, None)
    assert [(exit_.process, exit_.returncode) for exit_ in life.exits] == [(i, 0) for i in range(4)]
    names = [event.name for event in result.events]
    assert names[0] == "job.started"
    assert names[-1] == "job.finished"
    assert names.count("process.started") == names.count("process.exited") == 4
    assert not spec.local_root.exists()


@pytest.mark.parametrize(
    ("keep_ram", "program", "kept"),
    [
        ("after-failure", "sys.exit(1)", True),
        ("always", "train(0)", True),
        ("never", "sys.exit(1)", False),
    ],
)
def test_what_becomes_of_ram(make_spec: MakeSpec, keep_ram: str, program: str, kept: bool) -> None:
    spec = make_spec(program, keep_ram=keep_ram, max_restarts=0)
    run_job(spec)
    assert spec.ramdisk(0).exists() == kept


def test_ram_kept_is_there_for_the_next_job(make_spec: MakeSpec) -> None:
    checked(run_job(make_spec("train(7)", keep_ram="always")))
    spec = make_spec("train(8)")
    checked(run_job(spec))
    assert starts(spec, 0) == {"host_00000": 7, "host_00001": 7}


def test_variables_of_an_earlier_tpu_job_reach_no_process(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TPU's runtime would wait for the slices of then. What the job itself names stays."""
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "gone:8080")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "3")
    monkeypatch.setenv("KEPT_BY_THE_SITE", "yes")
    program = """
        names = [name for name in os.environ if name.startswith(("MEGASCALE_", "KEPT_"))]
        print(sorted(names))
    """
    given = {"PYTHONPATH": ":".join(sys.path), "MEGASCALE_PORT": "8081"}
    spec = make_spec(program, slices=2, env=given)
    checked(run_job(spec))
    for index in range(2):
        last = spec.log_path(0, index).read_text().splitlines()[-1]
        assert last == "['KEPT_BY_THE_SITE', 'MEGASCALE_PORT']"


def test_crash_restarts_all_with_ram_kept(make_spec: MakeSpec) -> None:
    spec = make_spec(
        """
        train(4)
        if env.restart_count == 0 and env.process_index == 1:
            sys.exit(7)
        start = max(start, 5)  # never back: what is in RAM is what was reported, or one more
        train(6)
        if env.restart_count == 0:
            time.sleep(600)
        """
    )
    result = checked(run_job(spec))
    assert len(result.lives) == 2
    death = result.lives[0].first_death
    assert death is not None
    assert (death.process, death.returncode, death.step) == (1, 7, 4)
    assert starts(spec, 1)["host_00001"] == 4
    assert_ram_was_kept(spec, result, host=0)


def test_slice_lost_with_its_ram(make_spec: MakeSpec) -> None:
    spec = make_spec("train(40)", slices=2, hosts_per_slice=2)
    result = checked(run_job(spec, "step=20 kill=slice:1 lose-ram exact"))
    assert len(result.lives) == 2
    went_on = starts(spec, 1)
    assert went_on["host_00002"] == went_on["host_00003"] == 0
    assert [exit_.step for exit_ in result.lives[0].exits[2:]] == [20, 20]
    assert_ram_was_kept(spec, result, host=0)
    assert_ram_was_kept(spec, result, host=1)
    [fired] = [event for event in result.events if event.name == "fault.fired"]
    assert fired.fields["processes"] == fired.fields["hosts"] == (2, 3)
    [lost] = [event for event in result.events if event.name == "ram.lost"]
    assert lost.fields["hosts"] == (2, 3)


def test_processes_are_renumbered_and_hosts_keep_their_ram(make_spec: MakeSpec) -> None:
    spec = make_spec(
        "train(30)\nif env.restart_count == 0: time.sleep(600)", slices=2, hosts_per_slice=2
    )
    result = checked(run_job(spec, "step=10 kill=host:0 lose-ram permute=1,2,3,0"))
    assert "process 1 on host_00000 from 0" in first_lines(spec, 1)[1]
    hosts = [line.split()[5] for line in first_lines(spec, 1)]
    assert hosts == ["host_00003", "host_00000", "host_00001", "host_00002"]
    for host in (1, 2, 3):
        assert_ram_was_kept(spec, result, host)


def test_several_faults_fire_in_order_once_each(make_spec: MakeSpec) -> None:
    spec = make_spec("train(40)\nif env.restart_count < 3: time.sleep(600)")
    faults = (
        "step=10 kill=process:0 permute=reverse",
        "step=5 kill=host:0 permute=reverse",
        "step=20 kill=all lose-ram signal=ABRT",
    )
    result = checked(run_job(spec, *faults))
    assert len(result.lives) == 4
    fired = [event for event in result.events if event.name == "fault.fired"]
    assert [event.life for event in fired] == [0, 1, 2]
    assert fired[1].fields["processes"] == (1,)
    assert fired[1].fields["hosts"] == (0,)
    assert starts(spec, 3) == {"host_00000": 0, "host_00001": 0}


def test_stopped_process_goes_on_after_its_time(make_spec: MakeSpec) -> None:
    pids: list[int] = []

    def on_event(event: LoggedEvent) -> None:
        if event.name == "process.started":
            pids.append(int(str(event.fields["pid"])))
        if event.name == "fault.fired":  # nothing wakes the process before this returns
            wait_until(lambda: state(pids[1]) == "T", "process 1 is stopped")

    # Exact: else all may have ended before the supervisor sees that step.
    fault = "step=5 kill=process:1 signal=STOP resume-after-s=0.3 exact"
    supervisor = supervisor_of(make_spec("train(40)"), fault, on_event=on_event)
    result = checked(supervisor.run(TIMEOUT_S))
    assert (len(result.lives), supervisor.faults_left) == (1, ())
    assert [exit_.step for exit_ in result.lives[0].exits] == [40, 40]
    [fired] = [event for event in result.events if event.name == "fault.fired"]
    assert fired.fields["processes"] == (1,)


def test_fault_that_never_came_is_reported(make_spec: MakeSpec) -> None:
    fault = "step=1000 kill=all"
    supervisor = supervisor_of(make_spec("train(3)"), fault)
    checked(supervisor.run(TIMEOUT_S))
    assert [str(left) for left in supervisor.faults_left] == [fault]


def test_crash_loop_ends_and_shows_the_log(make_spec: MakeSpec) -> None:
    spec = make_spec("raise RuntimeError('no such data set')", max_restarts=2)
    result = run_job(spec)
    assert (len(result.lives), result.exit_code) == (3, 1)
    with pytest.raises(JobFailed, match="the limit of 2 restarts") as caught:
        checked(result)
    assert "RuntimeError: no such data set" in str(caught.value)


def test_configuration_error_is_not_restarted(make_spec: MakeSpec) -> None:
    program = """
        from emergency_ckpt import errors
        raise errors.ConfigError(["keep_last_n must be at least 1"])
    """
    result = run_job(make_spec(program, max_restarts=5))
    assert (len(result.lives), result.exit_code) == (1, 1)
    with pytest.raises(JobFailed, match="a configuration error, which no restart mends") as caught:
        checked(result)
    assert str(caught.value).count("ConfigError: configure") == 1


def test_configuration_error_that_was_handled_is_no_reason(make_spec: MakeSpec) -> None:
    program = """
        import traceback
        from emergency_ckpt import errors
        try:
            raise errors.ConfigError(["handled"])
        except errors.ConfigError:
            traceback.print_exc()
        sys.exit(3)
    """
    assert len(run_job(make_spec(program, max_restarts=1)).lives) == 2


def test_limit_of_restarts(make_spec: MakeSpec) -> None:
    spec = make_spec("train(start + 2); os.abort()", max_restarts=2)
    result = run_job(spec)
    assert (len(result.lives), result.exit_code) == (3, 128 + 6)
    with pytest.raises(JobFailed, match=r"limit of 2 restarts.*SIGABRT"):
        checked(result)


def test_late_death_restarts_also_those_that_finished(make_spec: MakeSpec) -> None:
    spec = make_spec(
        """
        note = env.local_dir.parent / "pid"
        if env.process_index == 1:
            note.with_suffix(".tmp").write_text(str(os.getpid()))
            os.replace(note.with_suffix(".tmp"), note)
        elif env.restart_count == 0:
            while not note.exists() or os.path.exists(f"/proc/{note.read_text()}"):
                time.sleep(0.01)
            sys.exit(9)
        """
    )
    result = checked(run_job(spec))
    assert [exit_.returncode for exit_ in result.lives[0].exits] == [9, 0]
    assert len(result.lives) == 2


def test_timeout_ends_the_job(make_spec: MakeSpec) -> None:
    result = supervisor_of(make_spec("time.sleep(600)")).run(timeout_s=0.5)
    assert (result.exit_code, result.lives[0].ending) == (124, "timeout")
    with pytest.raises(DeadlineExceeded):
        checked(result)


def test_stop_from_another_thread_ends_all(make_spec: MakeSpec) -> None:
    pids: list[int] = []
    started = threading.Event()

    def on_event(event: LoggedEvent) -> None:
        if event.name == "process.started":
            pids.append(int(str(event.fields["pid"])))
        if event.name == "life.started":
            started.set()

    supervisor = supervisor_of(make_spec("time.sleep(600)"), on_event=on_event)

    def stop() -> None:
        assert started.wait(TIMEOUT_S)
        supervisor.stop()

    stopper = threading.Thread(target=stop, daemon=True)
    stopper.start()
    result = supervisor.run(TIMEOUT_S)
    assert (result.exit_code, result.lives[0].ending) == (128 + 15, "stopped")
    assert len(pids) == 2
    wait_until_gone(pids)
    stopper.join(TIMEOUT_S)


def test_sigterm_that_is_ignored_and_grandchildren_left_behind(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    spec = make_spec(
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note = f"{tmp_path}/child_{{env.restart_count}}_{{env.process_index}}"
        open(note + ".tmp", "w").write(str(child.pid))
        os.rename(note + ".tmp", note)
        if env.restart_count == 0:
            train(3)
            time.sleep(600)
        """
    )
    result = checked(run_job(spec, "step=3 kill=process:0"))
    assert len(result.lives) == 2
    notes = [tmp_path / f"child_{life}_{process}" for life in (0, 1) for process in (0, 1)]
    wait_until_gone([int(note.read_text()) for note in notes if note.exists()])
    assert notes[2].exists()


def test_lines_are_passed_on_with_their_process(make_spec: MakeSpec) -> None:
    lines: list[str] = []
    spec = make_spec("print('last line', end='')", echo=lines.append)
    checked(run_job(spec))
    assert sorted(line for line in lines if "last" in line) == [
        "[0.0] last line",
        "[0.1] last line",
    ]
    assert "[0.1] life 0 process 1 on host_00001 from 0" in lines


def test_two_supervisors_do_not_share_ramdisks(make_spec: MakeSpec) -> None:
    spec = make_spec("time.sleep(600)")
    first = supervisor_of(spec)
    thread = threading.Thread(target=first.run, args=(TIMEOUT_S,), daemon=True)
    thread.start()
    wait_until(lambda: spec.log_path(0, 1).exists(), "the first job runs")
    with pytest.raises(LocalTierError, match="another job runs with this local root"):
        supervisor_of(spec).run(TIMEOUT_S)
    first.stop()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"command": ()}, "no command"),
        ({"command": ("no-such-program-here",)}, "was not found"),
        ({"slices": 0}, "slices must be at least 1"),
        ({"hosts_per_slice": 1000}, "at most 256 hosts"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"grace_s": float("inf")}, "grace_s"),
        ({"local_root": Path("here")}, "absolute"),
    ],
)
def test_bad_job_is_refused(fields: dict[str, object], problem: str) -> None:
    good: dict[str, object] = {
        "command": ("true",),
        "slices": 2,
        "hosts_per_slice": 1,
        "devices_per_host": 1,
        "local_root": Path("/dev/shm/x"),
        "log_dir": Path("/tmp/x"),
    }
    with pytest.raises(ConfigError, match=problem):
        JobSpec(**{**good, **fields})  # type: ignore[arg-type]


def test_event_log_has_launcher_and_processes_of_all_lives(make_spec: MakeSpec) -> None:
    program = """
from emergency_ckpt.extras.event_log import read_events
from emergency_ckpt.extras.event_log import open_event_log

def launched():
    events = read_events(env.event_log).events
    return sum((e.name, e.life) == ("train.launched", env.restart_count) for e in events)

log = open_event_log(env.event_log, env.process_index, limit_bytes=1 << 20, life=env.restart_count)
log.note("train.launched", {"start": start})
while launched() < 2:  # the fault must not end a process whose line is not in the log yet
    time.sleep(0.01)
train(40)
log.close()
"""
    spec = make_spec(program, slices=2)
    checked(run_job(spec, "step=10 kill=process:1"))
    found = read_events(spec.event_log)
    assert found.bad_lines == 0
    launcher = [(each.name, each.life) for each in found.events if each.process is None]
    assert launcher[0] == ("job.started", 0)
    assert launcher[-1] == ("job.finished", 1)
    assert ("life.started", 1) in launcher
    mine = {(e.process, e.life) for e in found.events if e.name == "train.launched"}
    assert mine == {(0, 0), (1, 0), (0, 1), (1, 1)}
