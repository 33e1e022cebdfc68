"""Random faults in jobs of real processes, against an oracle: `make soak MINUTES=60`.

    python verification/soak/soak.py --minutes 60 --lanes 2 --out soak_out
    python verification/soak/soak.py --seed 7 --only 123     once more, with those before it
    python verification/soak/soak.py --put-back order_by_clock     a known defect must be found

Each incident is a line of `incidents.jsonl`; `summary.json` has the figures. Exit status 1 when an
incident was not recovered as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a fork takes the calling thread only
_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent), str(_HERE.parents[1] / "tests" / "support")]

from fake_gcs import FakeGcs  # noqa: E402  the path above leads to it

_MODULES = (
    *("gcsfs", "google.cloud.storage", "orbax.checkpoint", "soak_lane"),
    *(f"emergency_ckpt.storage.{name}" for name in ("orbax_reader", "step_writer")),
)
"""All that a life imports. Clients of buckets read the server's address when they are imported."""


def _load() -> None:
    """Import what lives need, before the first is forked; nothing of it may start a thread."""
    for name in _MODULES:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads before the first fork"


def _run_lane(lane: int, options: argparse.Namespace, gcs: Any, root: Path) -> int:
    """Run each ``lanes``-th job; return how many the soak itself broke. In a process of its own."""
    from soak_faults import RAMDISK_BYTES, STORAGE_BYTES, mount_small, own_mounts  # noqa: PLC0415
    from soak_job import JobRun, Site  # noqa: PLC0415
    from soak_lane import Incidents  # noqa: PLC0415
    from soak_plan import INCIDENTS_PER_JOB, MAX_HOSTS, job_of  # noqa: PLC0415

    site = Site(root / f"lane_{lane}", gcs, gcs.environment(), own_mounts())
    for path in [site.storage.parent, *map(site.host, range(MAX_HOSTS))]:
        path.mkdir(parents=True)
        if site.is_mounted:
            mount_small(path, STORAGE_BYTES if path == site.storage.parent else RAMDISK_BYTES)

    def record(line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        file = os.open(options.out / "incidents.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, data)
        os.close(file)
        with contextlib.suppress(FileNotFoundError):
            failures = site.root / "failures"
            shutil.copytree(failures, options.out / "failures", dirs_exist_ok=True, symlinks=True)
            shutil.rmtree(failures)

    broken = 0
    until_s = time.monotonic() + 60 * options.minutes
    number = lane if options.only is None else options.only // INCIDENTS_PER_JOB
    while time.monotonic() < until_s:
        job = job_of(options.seed, number, may_mount=site.is_mounted)
        run = JobRun(site, options.seed, job, tuple(options.put_back))
        try:
            Incidents(run, record).run(until_s, options.only)
        except Exception:  # noqa: BLE001 - a defect of the soak costs one job, and is counted
            traceback.print_exc()
            broken += 1
            run.close()
        number += options.lanes
        if options.only is not None:
            break
    return broken


def _fork_lane(lane: int, options: argparse.Namespace, gcs: Any, root: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 101
        try:
            from soak_life import end_with_parent  # noqa: PLC0415

            end_with_parent()
            status = min(_run_lane(lane, options, gcs, root), 100)
        except Exception:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def _summarise(out: Path) -> dict[str, Any]:
    from soak_summary import summary, table  # noqa: PLC0415

    path = out / "incidents.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    figures = summary(lines)
    (out / "summary.json").write_text(json.dumps(figures, indent=1) + "\n")
    (out / "table.md").write_text(table(figures))
    return figures


def main() -> int:
    """Run the soak; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this incident, with those before it in its job")
    parser.add_argument("--lanes", type=int, default=2, help="jobs side by side")
    parser.add_argument("--out", type=Path, default=Path("soak_out"))
    parser.add_argument("--put-back", action="append", default=[], help="a known defect")
    options = parser.parse_args()
    if options.only is not None:
        options.lanes = 1
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="eckpt-soak-", dir=base))
    with FakeGcs(buckets=["bucket"]) as gcs:
        os.environ.update(gcs.environment())
        _load()
        lanes = [_fork_lane(lane, options, gcs, root) for lane in range(options.lanes)]
        broken = [os.waitstatus_to_exitcode(os.waitpid(lane, 0)[1]) for lane in lanes]
    shutil.rmtree(root)
    figures = _summarise(options.out) | {"broken_jobs": sum(map(abs, broken))}
    print(json.dumps(figures, indent=1))
    return 1 if any(broken) or figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
