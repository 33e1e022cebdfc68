"""Measure what the number of steps in a directory costs a job, on a disk and in a bucket.

    python -m benchmarks.micro.many_steps [--steps 5 5000] [--latency-ms 40] [--saves 20]

A directory gets so many steps of a small state. Then, in a life of one process that saves to
storage alone: a start, a restore, the first save of the life, ``--saves`` saves, a save after a
preemption notice, the removal of a step, ``latest_step()``; and, as processes of their own,
`eckpt ls`, `check` and `check --read-data`. On the disk all steps are whole; in the bucket, the GCS
server of the tests in a process of its own with a latency for each request, the last three are,
and of the others there is what a listing shows. Seconds; of saves the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fake_gcs import FakeGcs, FaultRule, GcsControl

from benchmarks.common.arguments import above_0, positive
from benchmarks.common.tables import markdown, number

_BUCKET = "bucket"
_WHOLE = 3
_CHILD = "--in"
_T = TypeVar("_T")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=positive, nargs="+", default=[5, 5000])
    parser.add_argument("--latency-ms", type=above_0, default=40.0)
    parser.add_argument("--saves", type=positive, default=20)
    parser.add_argument(_CHILD, dest="place", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.place:
        with tempfile.TemporaryDirectory(prefix="eckpt-many-steps-", dir="/dev/shm") as ramdisk:
            print(json.dumps(_measured(options, options.place, options.steps[0], ramdisk)))
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="eckpt-many-steps-") as scratch,
        FakeGcs(buckets=[_BUCKET]) as gcs,
    ):
        for name, place in (("disk", scratch), ("bucket", f"gs://{_BUCKET}")):
            environ = {**os.environ, **gcs.environment(), "JAX_PLATFORMS": "cpu"}
            found = {n: _in_process(options, f"{place}/{n}", n, environ) for n in options.steps}
            print(f"\n{name}\n")
            words = list(found[options.steps[0]])
            rows = [[word, *(number(each[word]) for each in found.values())] for word in words]
            print(markdown([["seconds", *(f"{n} steps" for n in options.steps)], *rows]))
    return 0


def _in_process(
    options: argparse.Namespace, place: str, steps: int, environ: dict[str, str]
) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.micro.many_steps", "--steps", str(steps)]
    command += ["--latency-ms", str(options.latency_ms), "--saves", str(options.saves)]
    command += [_CHILD, place]
    done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measured(
    options: argparse.Namespace, place: str, steps: int, ramdisk: str
) -> dict[str, float]:
    import jax.numpy as jnp  # noqa: PLC0415

    from emergency_ckpt import EmergencyCheckpointer  # noqa: PLC0415

    def opened() -> EmergencyCheckpointer:
        return EmergencyCheckpointer(dir=place, local_dir=ramdisk, save_every=1, local_save_every=0)

    def save(ckpt: EmergencyCheckpointer, step: int, **more: Any) -> None:
        ckpt.save(step=step, state={"w": jnp.full(64, step)}, **more)
        ckpt.wait_until_finished()
        ckpt.check_for_errors()

    in_bucket = place.startswith("gs://")
    with opened() as ckpt:
        for step in range(max(1, steps - _WHOLE + 1) if in_bucket else 1, steps + 1):
            save(ckpt, step)
    if in_bucket:
        _name_older(place)
        gcs = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
        gcs.add_fault(FaultRule(kind="delay", delay_s=options.latency_ms / 1e3))
    seconds: dict[str, float] = {}
    ckpt = _timed(seconds, "start", opened)
    with ckpt:
        state = {"w": jnp.zeros(64, jnp.int32)}
        _timed(seconds, "restore", lambda: ckpt.restore(state=state))
        _timed(seconds, "first save of the life", lambda: save(ckpt, steps + 1))
        each: list[float] = []
        for step in range(steps + 2, steps + 2 + options.saves):
            begin_s = time.perf_counter()
            save(ckpt, step)
            each.append(time.perf_counter() - begin_s)
        seconds["another save"] = statistics.median(each)
        _timed(seconds, "removal", lambda: ckpt.steps.remove(steps))
        _timed(seconds, "latest_step()", ckpt.latest_step)
    with opened() as ckpt:
        ckpt.restore(state=state)
        last = steps + 3 + options.saves
        _timed(seconds, "forced save, the first of a life", lambda: save(ckpt, last, force=True))
    for words in (("ls",), ("ls", "--check"), ("ls", "--check", "--read-data")):
        if in_bucket and "--check" in words:
            continue  # most of its steps are names only
        command = [sys.executable, "-m", "emergency_ckpt.tools.cli.main", *words, "--dir", place]
        _timed(
            seconds,
            f"eckpt {' '.join(words)}",
            lambda c=command: subprocess.run(c, check=True, stdout=subprocess.DEVNULL),
        )
    return seconds


def _timed(seconds: dict[str, float], word: str, call: Callable[[], _T]) -> _T:
    begin_s = time.perf_counter()
    value = call()
    seconds[word] = time.perf_counter() - begin_s
    return value


def _name_older(place: str) -> None:
    """Give a bucket what a listing and the step log show of older steps."""
    import fsspec  # noqa: PLC0415
    import msgspec  # noqa: PLC0415

    from emergency_ckpt.storage.tier import PersistentTier  # noqa: PLC0415

    log = PersistentTier(place).found.log
    read = log.read()
    assert read.table is not None, "steps were saved"
    (first, *_) = read.table.steps
    older = [msgspec.structs.replace(first, step=step) for step in range(1, first.step)]
    client: Any = fsspec.filesystem("gs")
    client.pipe({f"{place}/{entry.step}/_METADATA": b"{}" for entry in older})
    client.pipe({f"{place}/host_state/{entry.step}/marker.json": b"{}" for entry in older})
    steps = (*older, *read.table.steps)
    log.append(msgspec.structs.replace(read.table, number=read.number + 1, steps=steps), read)


if __name__ == "__main__":
    sys.exit(main())
