"""One life's processes, and that none of them outlives its supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launch_support import (
    MakeSpec,
    ProcessSet,
    alive,
    wait_for_end,
    wait_until,
    wait_until_gone,
)

TIMEOUT_S = 60


def janitors_of(pid: int) -> list[int]:
    """The janitors among the children of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"janitor.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_start_watch_kill_wait(make_spec: MakeSpec) -> None:
    spec = make_spec("train(10); time.sleep(600)")
    with ProcessSet(spec) as processes:
        wait_until(lambda: max(processes.steps) == 10, "a process has reached the last step")
        assert processes.running == (0, 1)
        processes.signal([1], signal.SIGKILL)
        wait_until(lambda: bool(processes.poll()), "the killed process's end is seen")
        [death] = processes.exits
        assert (death.process, death.returncode) == (1, -signal.SIGKILL)
        assert str(death) == "process 1 on host 1 ended with signal SIGKILL"
        assert processes.running == (0,)
    assert processes.exits[0].returncode == -signal.SIGTERM
    assert list(spec.private_dir.glob("life_*")) == [], "a life leaves nothing in RAM"


def test_hold_is_there_before_the_process_is(make_spec: MakeSpec) -> None:
    with ProcessSet(make_spec("train(6)"), holds={1: 3}) as processes:
        wait_until(lambda: processes.poll() != () or processes.exits != (), "process 0 has ended")
        wait_until(lambda: processes.steps[1] == 3, "process 1 is where it is held")
        assert (processes.steps[0], processes.running) == (6, (1,))
        processes.hold_at([1], -1)
        assert [each.returncode for each in wait_for_end(processes)] == [0, 0]
        assert processes.steps == (6, 6)


def test_process_0_ends_last(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(
        f"""
        def note(signum, frame):
            time.sleep(0.1 * env.process_index)
            with open("{tmp_path}/order", "a") as file:
                file.write(str(env.process_index))
            sys.exit(0)
        signal.signal(signal.SIGTERM, note)
        report_step(1)
        time.sleep(600)
        """,
        slices=1,
        hosts_per_slice=3,
        grace_s=30.0,
    )
    with ProcessSet(spec) as processes:
        wait_until(lambda: min(processes.steps) == 1, "all are ready for the signal")
    order = (tmp_path / "order").read_text()
    assert len(order) == 3
    assert order.endswith("0")


def test_stopped_processes_are_ended_too(make_spec: MakeSpec) -> None:
    # A stopped process gets the signal when it runs again; until then it must not be killed.
    with ProcessSet(make_spec("train(1); time.sleep(600)", grace_s=30.0)) as processes:
        wait_until(lambda: min(processes.steps) == 1, "all run")
        processes.signal([0, 1], signal.SIGSTOP)
    assert [exit_.returncode for exit_ in processes.exits] == [-signal.SIGTERM] * 2


def test_failed_start_leaves_nothing_behind(make_spec: MakeSpec) -> None:
    spec = make_spec("time.sleep(600)")
    spec.life_dir(0).mkdir(parents=True)
    spec.log_path(0, 1).mkdir()  # the second process cannot be given a log file
    events: list[int] = []
    with pytest.raises(IsADirectoryError):
        ProcessSet(spec, on_event=lambda event: events.append(int(str(event.fields.get("pid", 0)))))
    assert events[0] > 0
    assert not alive(events[0])


def test_processes_have_no_way_to_the_janitor(make_spec: MakeSpec) -> None:
    """Else a process that outlives its supervisor would keep the janitor's pipe open."""
    spec = make_spec("print(os.readlink('/proc/self/fd/0'), len(os.listdir('/proc/self/fd')))")
    with ProcessSet(spec) as processes:
        wait_for_end(processes)
    # Standard input, output and error, and the listing's own.
    assert spec.log_path(0, 0).read_text().splitlines()[1] == "/dev/null 4"


def test_lost_janitor_does_not_keep_processes_alive(make_spec: MakeSpec) -> None:
    names: list[str] = []
    spec = make_spec("train(0); time.sleep(600)")
    with ProcessSet(spec, on_event=lambda event: names.append(event.name)) as processes:
        wait_until(lambda: min(processes.steps) == 0, "all run")
        [janitor] = janitors_of(os.getpid())
        os.kill(janitor, signal.SIGKILL)
        wait_until(lambda: not alive(janitor), "the janitor is dead")
    assert "janitor.lost" in names
    wait_until_gone(processes.pids)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_no_process_outlives_the_supervisor(
    make_spec: MakeSpec, tmp_path: Path, signum: int
) -> None:
    """Children, and what they started, that ignore SIGTERM."""
    spec = make_spec(
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note = f"{tmp_path}/pids_{{env.process_index}}"
        open(note + ".tmp", "w").write(f"{{os.getpid()}} {{child.pid}}")
        os.rename(note + ".tmp", note)
        time.sleep(600)
        """
    )
    arguments = ["launch", "--slices=2", "--hosts-per-slice=1", "--grace-s=0.2"]
    arguments += [f"--local-root={spec.local_root}", f"--log-dir={spec.log_dir}", "--"]
    hearing = ["env", "--default-signal=HUP", sys.executable]  # nohup has it ignored
    supervisor = subprocess.Popen(
        [*hearing, "-m", "emergency_ckpt.tools.cli.main", *arguments, *spec.command],
        env={**os.environ, **spec.env},
        start_new_session=True,
    )
    try:
        notes = [tmp_path / f"pids_{process}" for process in (0, 1)]
        wait_until(lambda: all(note.exists() for note in notes), "all processes run")
        pids = [int(word) for note in notes for word in note.read_text().split()]
        assert all(alive(pid) for pid in pids)
        supervisor.send_signal(signum)
        returncode = supervisor.wait(TIMEOUT_S)
    finally:
        supervisor.kill()
        supervisor.wait(TIMEOUT_S)
    wait_until_gone(pids)
    assert returncode == (-signum if signum == signal.SIGKILL else 128 + signum)


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT])
def test_signal_that_the_caller_ignores_ends_no_job(
    make_spec: MakeSpec, tmp_path: Path, signum: int
) -> None:
    """SIGHUP as of ``nohup``, at a logout; SIGINT as of ``&`` in a script, at another's Ctrl-C."""
    spec = make_spec(
        f"""
        open("{tmp_path}/runs", "w").close()
        while not os.path.exists("{tmp_path}/may_end"):
            time.sleep(0.01)
        """,
        slices=1,
    )
    arguments = ["launch", "--slices=1", "--hosts-per-slice=1", "--grace-s=0.2"]
    arguments += [f"--local-root={spec.local_root}", f"--log-dir={spec.log_dir}", "--"]
    ignoring = ["/bin/sh", "-c", f"trap '' {int(signum)} && exec \"$@\"", "sh", sys.executable]
    launcher = subprocess.Popen(
        [*ignoring, "-m", "emergency_ckpt.tools.cli.main", *arguments, *spec.command],
        env={**os.environ, **spec.env},
        start_new_session=True,
    )
    try:
        wait_until((tmp_path / "runs").exists, "the process runs")
        launcher.send_signal(signum)
        (tmp_path / "may_end").touch()
        assert launcher.wait(TIMEOUT_S) == 0
    finally:
        launcher.kill()
        launcher.wait(TIMEOUT_S)


def test_supervisor_killed_at_once_leaves_nothing_behind(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    """Killed right after its first process was started: the shim's registration has no gap."""
    spec = make_spec(f"open('{tmp_path}/ran_' + str(os.getpid()), 'w'); time.sleep(600)")
    program = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from emergency_ckpt.tools.launch.job import JobSpec
        from emergency_ckpt.tools.launch.process_set import ProcessSet

        def die(event):
            print(event.fields["pid"], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        spec = JobSpec({spec.command!r}, 2, 1, 1, Path({str(spec.local_root)!r}),
                       Path({str(spec.log_dir)!r}), {spec.env!r})
        ProcessSet(spec, on_event=die)
        """
    )
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **spec.env},
            stdout=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        wait_until_gone([int(done.stdout)])


@pytest.mark.parametrize("given", [None, "glibc.malloc.tcache_count=7"])
def test_processes_get_large_pages_unless_told_otherwise(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    spec = make_spec("print(os.environ['GLIBC_TUNABLES'])")
    with ProcessSet(spec) as processes:
        wait_for_end(processes)
    expected = given or "glibc.malloc.hugetlb=1"
    assert spec.log_path(0, 0).read_text().splitlines()[-1] == expected


def test_observers_of_the_launcher_and_of_the_job_are_joined(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECKPT_OBSERVERS", "prometheus(0)")
    observers = {"PYTHONPATH": ":".join(sys.path), "ECKPT_OBSERVERS": "hang(60)"}
    spec = make_spec("print(os.environ['ECKPT_OBSERVERS'])", env=observers)
    with ProcessSet(spec) as processes:
        wait_for_end(processes)
    last = spec.log_path(0, 0).read_text().splitlines()[-1]
    assert last == "prometheus(0) hang(60) event_log progress"


@pytest.mark.parametrize("given", [None, "/somewhere/else"])
def test_process_set_cache_dir_is_the_jobs_or_given(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if given is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", given)
    spec = make_spec("print(os.environ['JAX_COMPILATION_CACHE_DIR'])")
    shown: list[str] = []
    for life in range(2):
        with ProcessSet(spec, restart_count=life) as processes:
            wait_for_end(processes)
        shown.append(spec.log_path(life, 0).read_text().splitlines()[-1])
    assert shown == [given or str(spec.private_dir / "compilation_cache")] * 2
