"""A site's view of many jobs and lives: RAM, storage and the logs stay bounded.

`make test-slow` runs it, with a line of figures for docs/operations.md where `-s` is given.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_support import wait_for_end
from looks import eckpt
from running_jobs import HERE, job_root, spec_of
from trees import files_below

from emergency_ckpt.core.limits import MAX_LINE_BYTES, MAX_LIVES
from emergency_ckpt.extras.event_log import FILES_KEPT, LOG_BYTES, open_event_log, read_events
from emergency_ckpt.tools.launch.job import JobSpec
from emergency_ckpt.tools.launch.process_set import POLL_S, ProcessSet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LIVES = 200
_LIFE_S = 120.0


@pytest.fixture
def root() -> Iterator[Path]:
    with job_root() as path:
        yield path


def footprint(root: Path) -> dict[str, int]:
    """What a job has left: files and bytes of each place."""
    places = {"ram": root / "hosts", "storage": root / "storage", "events": root / "events"}
    found: dict[str, int] = {}
    for name, place in places.items():
        found[f"{name}_files"], found[f"{name}_bytes"] = files_below(place)
        found[f"{name}_folders"] = sum(path.is_dir() for path in place.rglob("*"))
    found["versions"] = len(list((root / "storage").glob("*/host_state/log/*.json")))
    return found


def run_until(processes: ProcessSet, steps: int) -> None:
    """Return when every process has reported so many steps; AssertionError when one ended."""
    deadline_s = time.monotonic() + _LIFE_S
    begun: tuple[int, ...] = ()
    while True:
        assert not processes.poll(), f"{processes.exits}; logs in {processes.spec.log_dir}"
        assert time.monotonic() < deadline_s, f"steps {processes.steps}"
        begun = begun or (processes.steps if min(processes.steps) >= 0 else ())
        if begun and min(processes.steps) >= max(begun) + steps:
            return
        time.sleep(POLL_S)


def live_and_be_killed(spec: JobSpec, life: int, rng: random.Random) -> None:
    """One life, of at least one step, that ends by SIGKILL of one process or of all."""
    with ProcessSet(spec, restart_count=life) as processes:
        run_until(processes, rng.randint(1, 3))
        time.sleep(rng.random() * 0.05)
        count = len(processes.pids)
        victims = rng.choice([range(count), [rng.randrange(count)]])
        processes.signal(victims, signal.SIGKILL)
        processes.end(grace_s=0)


def end_well(spec: JobSpec, life: int = 0) -> None:
    with ProcessSet(spec, restart_count=life) as processes:
        exits = wait_for_end(processes, _LIFE_S)
    assert [each.returncode for each in exits] == [0] * len(exits), spec.log_dir


def test_two_hundred_lives_leave_no_more_than_a_hundred(root: Path) -> None:
    rng, spec = random.Random(7), spec_of(root, "many_lives_job.py", "run", "1000000", hosts=1)
    seen: list[dict[str, int]] = []
    for life in range(LIVES):
        live_and_be_killed(spec, life, rng)
        seen.append(footprint(root))
        if life + 1 in (1, 10, 50, 100, LIVES):
            print(json.dumps({"lives": life + 1, **seen[-1]}))
    # The chain and the ledgers name the last 64 lives one by one.
    early, late = seen[MAX_LIVES : MAX_LIVES + 60], seen[-60:]
    for name in seen[0]:
        if name != "events_bytes":  # ``test_month_of_events_stays_within_its_bound``
            assert max(s[name] for s in late) <= 1.2 * max(s[name] for s in early) + 2, name


JOBS = (("a", 2, 2), ("b", 2, 1), ("c", 1, 2), ("d", 1, 1), ("e", 2, 2))
"""Run id, slices and hosts of a slice of jobs on the same four hosts."""
NOBODY = 65534
_AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    # So that it can read this interpreter, and nothing more.
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", sys.executable, "-c"),
)
_ONE_JOB = """
import sys
from pathlib import Path
from launch_support import wait_for_end
from running_jobs import spec_of
from emergency_ckpt.tools.launch.process_set import ProcessSet
root, run_id, slices, hosts, life = sys.argv[1:]
program = Path(root, "python")  # os.access does not know that this one can be run
program.write_text(f'#!/bin/sh\\nexec {sys.executable} "$@"\\n')
program.chmod(0o755)
sys.executable = str(program)
sizes = {"slices": int(slices), "hosts": int(hosts)}
spec = spec_of(Path(root), "many_lives_job.py", run_id, "6", **sizes)
with ProcessSet(spec, restart_count=int(life)) as processes:
    exits = wait_for_end(processes, 120)
sys.exit([each.returncode for each in exits] != [0] * len(exits))
"""


def test_five_jobs_leave_only_their_own_slots(root: Path) -> None:
    """Other names and sizes on the same hosts, the third as another user where that can be."""
    hosts_of_all = [root / "hosts" / f"host_{host:05d}" for host in range(4)]
    shared = [root, *(root / n for n in ("hosts", "storage", "events", "logs")), *hosts_of_all]
    shared.append(root / "hosts" / "supervisor")
    for place in shared:
        place.mkdir(exist_ok=True)
        place.chmod(0o1777)
    sizes: list[dict[str, int]] = []
    for number, (run_id, slices, hosts) in enumerate(JOBS):
        is_other = run_id == "c" and os.geteuid() == 0 and shutil.which("setpriv") is not None
        if is_other:
            words = map(str, (root, run_id, slices, hosts, number))
            paths = os.pathsep.join(map(str, (HERE, os.environ["PYTHONPATH"])))
            home = {**os.environ, "HOME": str(root), "PYTHONPATH": paths}
            subprocess.run([*_AS_NOBODY, _ONE_JOB, *words], check=True, env=home)
        else:
            spec = spec_of(root, "many_lives_job.py", run_id, "6", slices=slices, hosts=hosts)
            end_well(spec, number)
        left = {path.name for path in (root / "hosts").glob("host_*/*")}
        assert left == {name for name, _, _ in JOBS[: number + 1]}
        owners = {path.stat().st_uid for path in (root / "hosts").glob(f"host_*/{run_id}")}
        assert owners == {NOBODY if is_other else os.geteuid()}
        sizes.append(footprint(root))
        print(json.dumps({"jobs": number + 1, **sizes[-1]}))
    counts = [slices * hosts for _, slices, hosts in JOBS]
    of_one = sizes[0]["ram_files"] // counts[0] + 2  # some have a host state more
    assert all(s["ram_files"] <= of_one * sum(counts[: n + 1]) for n, s in enumerate(sizes))
    for host in hosts_of_all:
        done = eckpt("doctor", "--clean", "--local-dir", host, "--older-than", 0, "--yes")
        assert done.returncode == 0, done.stderr
    assert list((root / "hosts").glob("host_*/*")) == []


def test_one_run_of_other_sizes_leaves_no_more(root: Path) -> None:
    """Each host has the slots of one process, whatever the sizes were."""
    sizes: list[dict[str, int]] = []
    for life in range(12):
        slices, hosts = JOBS[life % 5][1:]
        spec = spec_of(root, "many_lives_job.py", "run", "6", slices=slices, hosts=hosts)
        end_well(spec, life)
        sizes.append(footprint(root))
        print(json.dumps({"life": life + 1, "processes": slices * hosts, **sizes[-1]}))
    for name in set(sizes[0]) - {"events_bytes"}:
        assert max(s[name] for s in sizes[6:]) <= 1.1 * max(s[name] for s in sizes[:6]), name


def test_month_of_events_stays_within_its_bound(tmp_path: Path) -> None:
    """A save each ten seconds for thirty days, ten events each, in three lives."""
    events, sizes = 30 * 86400 // 10 * 10, list[int]()
    for life in range(3):
        log = open_event_log(tmp_path, 0, life=life)
        for number in range(events // 3):
            fields = {
                "stage": "published",
                "step": number,
                "seconds": 0.123456789,
                "size_bytes": 1 << 36,
            }
            log.note("save.stage", fields, run_id="run7", incarnation="000000000001-0123456789")
            if number % 8192 == 0:
                time.sleep(0.1)  # no faster than it is written
        log.close()
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    files = sorted(path.name for path in tmp_path.iterdir())
    print(json.dumps({"events": events, "bytes_after_each_life": sizes, "files": files}))
    assert len(files) == FILES_KEPT, "more was written than one log may have"
    assert max(sizes) <= LOG_BYTES + MAX_LINE_BYTES
    assert read_events(tmp_path, limit_bytes=1 << 20).events[-1].fields["step"] > events // 3 - 8192
