"""One round of one contender: save and end all processes, then for each loss start and restore."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import contenders, machine
from benchmarks.common.job import FROM_STORAGE, Orders, Shape, lost_hosts
from emergency_ckpt.tools.launch.job import JobSpec, log_tail
from emergency_ckpt.tools.launch.process_set import ProcessSet

LOOPBACK_HOST = "127.0.0.1"
_SAVE = 0
WORKER = Path(__file__).with_name("worker.py")
_POLL_S = 0.05


# The most that a contender keeps of each slice's state at one time, one of it set aside.
_COPIES_ON_RAMDISK = 4
_COPIES_IN_PROCESS = 3
_COPIES_TOUCHED = 4
"""Copies of the states of all slices whose size of free memory is touched before a life."""


class RoundFailed(Exception):
    """A process of the job failed or did not end in time. The message has the end of its log."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The directories and the environment of a round.

    Attributes:
      ramdisks: directory on a tmpfs.
      storage: directory for the persistent tier.
      timeout_s: for each life of the job.
      launcher: put before the program of each process.
      bind_host: address on which contenders listen; None: each process chooses.
    """

    ramdisks: Path
    storage: Path
    timeout_s: float
    launcher: tuple[str, ...] = ()
    bind_host: str | None = LOOPBACK_HOST


def require_room(ramdisk: Path, shapes: Sequence[Shape]) -> None:
    """Raise ValueError unless such jobs fit on the ramdisk and in memory, ramdisks included."""
    slices_bytes = max(shape.slices * shape.state_bytes for shape in shapes)
    stat = os.statvfs(ramdisk)
    for what, free_bytes, copies in (
        (str(ramdisk), stat.f_bavail * stat.f_frsize, _COPIES_ON_RAMDISK),
        ("the memory", machine.available_memory_bytes(), _COPIES_ON_RAMDISK + _COPIES_IN_PROCESS),
    ):
        if free_bytes < copies * slices_bytes:
            raise ValueError(
                f"{what} has {free_bytes >> 20} MiB left, the benchmark may take"
                f" {copies * slices_bytes >> 20} MiB: choose a smaller state"
            )


def run_round(
    contender: str, shape: Shape, place: Place, scenarios: Sequence[str]
) -> dict[str, Any]:
    """Measure one contender in fresh processes with fresh directories.

    Each tier has lives of its own. Storage comes first, because the ramdisks of a RAM tier take
    memory from the page cache. Scenarios that do not apply to the contender's tiers or to the job
    are left out. Blocks for up to ``timeout_s`` per life. Raises RoundFailed. Leaves no file and
    no process.
    """
    tiers = contenders.tiers(contender)
    wanted = [
        scenario
        for scenario in scenarios
        if _tier_of(scenario) in tiers and lost_hosts(scenario, shape) is not None
    ]
    parts = {
        tier: _run_tier(contender, tier, shape, place, [s for s in wanted if _tier_of(s) == tier])
        for tier in (contenders.STORAGE, contenders.RAM)
        if tier in tiers and (tier == contenders.RAM or FROM_STORAGE in wanted)
    }
    return {
        "save": [
            dict(zip(parts, results, strict=True))
            for results in zip(*(part["save"] for part in parts.values()), strict=True)
        ],
        "restores": {s: parts[_tier_of(s)]["restores"][s] for s in wanted},
    }


def _run_tier(
    contender: str, tier: str, shape: Shape, place: Place, scenarios: Sequence[str]
) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="eckpt-bench-", dir=place.ramdisks.resolve()) as root,
        tempfile.TemporaryDirectory(prefix="eckpt-bench-", dir=place.storage.resolve()) as storage,
    ):
        orders = Orders(
            contender=contender,
            shape=shape,
            tier=tier,
            bind_host=place.bind_host,
            persistent_dir=storage,
            root=root,
        )
        orders.write()
        spec = JobSpec(
            command=(*place.launcher, sys.executable, str(WORKER), str(orders.path)),
            slices=shape.slices,
            hosts_per_slice=shape.hosts_per_slice,
            devices_per_host=1,
            local_root=Path(root, "ramdisks"),
            log_dir=Path(root, "logs"),
            env={"PYTHONPATH": str(ROOT)},
        )
        return _run_lives(spec, orders, scenarios, place.timeout_s)


def _tier_of(scenario: str) -> str:
    """Return the tier from which a restore after this loss reads."""
    return contenders.STORAGE if scenario == FROM_STORAGE else contenders.RAM


def _run_lives(
    spec: JobSpec, orders: Orders, scenarios: Sequence[str], timeout_s: float
) -> dict[str, Any]:
    who = f"{orders.contender}, {orders.tier}"
    saved = _run_life(spec, orders, _SAVE, f"{who}, saving", timeout_s)
    hosts = [spec.ramdisk(host) for host in range(spec.host_count)]
    expected = _merge_digests(saved)
    orders.expected_path.write_text(json.dumps(expected))
    for result in saved:
        del result["digests"]  # of thousands of shards would be most of the document
    restores: dict[str, Any] = {}
    for life, scenario in enumerate(scenarios, start=1):
        lost = lost_hosts(scenario, orders.shape)
        assert lost is not None, scenario
        with _without([hosts[index] for index in lost], spec.local_root.parent / "lost"):
            name = f"{who}, restoring ({scenario} lost)"
            results = _run_life(spec, orders, life, name, timeout_s)
        restores[scenario] = _outcome(orders, set(expected["digests"]), results)
    return {"save": saved, "restores": restores}


@contextlib.contextmanager
def _without(ramdisks: Sequence[Path], aside: Path) -> Iterator[None]:
    """Give the hosts empty ramdisks, and afterwards restore the earlier contents.

    So every loss applies to the files of the saves, not to files that a restore changed.
    """
    aside.mkdir(exist_ok=True)
    for ramdisk in ramdisks:
        ramdisk.rename(aside / ramdisk.name)
    yield
    for ramdisk in ramdisks:
        shutil.rmtree(ramdisk)
        (aside / ramdisk.name).rename(ramdisk)


def _run_life(
    spec: JobSpec, orders: Orders, life: int, who: str, timeout_s: float
) -> list[dict[str, Any]]:
    """Run one process per host until all have ended; return their results in order.

    Raises RoundFailed; its message begins with ``who``.
    """
    shape = orders.shape
    machine.touch_free_memory(_COPIES_TOUCHED * shape.slices * shape.state_bytes)
    deadline_s = time.monotonic() + timeout_s
    with ProcessSet(spec, restart_count=life) as processes:
        while processes.running:
            for ended in processes.poll():
                if ended.returncode != 0:
                    raise _failure(spec, life, who, ended.process, str(ended))
            if processes.running and time.monotonic() > deadline_s:
                late = processes.running[0]
                problem = f"process {late} still runs after {timeout_s:g} s"
                raise _failure(spec, life, who, late, problem)
            time.sleep(_POLL_S)
    results = (orders.result_path(life, index) for index in range(shape.process_count))
    return [json.loads(path.read_text()) for path in results]


def _failure(spec: JobSpec, life: int, who: str, process: int, problem: str) -> RoundFailed:
    return RoundFailed(f"{who}: {problem}\n{log_tail(spec.log_path(life, process))}")


def _merge_digests(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the expected values of a restore. Differing replicas are a defect of the job."""
    merged: dict[str, str] = {}
    for result in results:
        for shard, digest in result["digests"].items():
            assert merged.setdefault(shard, digest) == digest, f"replicas differ at {shard}"
    return {"step": results[0]["step"], "digests": merged}


def _outcome(orders: Orders, saved: set[str], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements, or the reason why the contender refused. Raises RoundFailed."""
    if refusals := [result["refused"] for result in results if "refused" in result]:
        if len(refusals) < len(results):
            raise RoundFailed(f"{orders.contender}: not all refused to restore: {refusals}")
        return {"refused": refusals[0], "processes": results}
    shape = orders.shape
    verified = {shard for result in results for shard in result.pop("verified_shards")}
    verified_bytes = sum(result["verified_bytes"] for result in results)
    if verified != saved or verified_bytes != shape.slices * shape.state_bytes:
        raise RoundFailed(
            f"{orders.contender}: restored {len(verified)} of {len(saved)} distinct shards and"
            f" {verified_bytes} of {shape.slices * shape.state_bytes} bytes"
        )
    return {"processes": results, "verified_shards": len(verified)}
