"""One contender, one round: save, end all processes, lose a slice's ramdisks, start and restore."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from job import Orders, Shape
from ramdisk import allocated_bytes

from emergency_ckpt.launch.job import JobSpec
from emergency_ckpt.launch.logs import log_tail
from emergency_ckpt.launch.process_set import ProcessSet

LOST_SLICE = 0
_SAVE, _RESTORE = 0, 1
_WORKER = Path(__file__).with_name("worker.py")
_POLL_S = 0.05


class RoundFailed(Exception):
    """A process of the job failed or did not end in time. The message has the end of its log."""


def run_round(contender: str, shape: Shape, ramdisks: Path, timeout_s: float) -> dict[str, Any]:
    """Measurements of one contender in fresh processes and on fresh ramdisks.

    Blocks for up to twice ``timeout_s``. Raises RoundFailed. Leaves no file and no process.
    """
    with tempfile.TemporaryDirectory(prefix="eckpt-bench-", dir=ramdisks) as scratch:
        root = Path(scratch).resolve()
        orders = Orders(
            contender=contender,
            shape=shape,
            persistent_dir=str(root / "persistent"),
            results_dir=str(root / "results"),
            expected_path=str(root / "expected.json"),
        )
        for path in (orders.persistent_dir, orders.results_dir):
            Path(path).mkdir()
        orders.write(root / "orders.json")
        spec = JobSpec(
            command=(sys.executable, str(_WORKER), str(root / "orders.json")),
            slices=shape.slices,
            hosts_per_slice=shape.hosts_per_slice,
            devices_per_host=1,
            local_root=root / "ramdisks",
            log_dir=root / "logs",
        )
        saved = run_life(spec, _SAVE, orders.results(_SAVE), f"{contender}, saving", timeout_s)
        hosts = [spec.ramdisk(host) for host in spec.first_topology.host_of_process]
        kept = [allocated_bytes(host) for host in hosts]
        expected = _merge_digests(saved)
        Path(orders.expected_path).write_text(json.dumps(expected))
        for index in spec.first_topology.processes_of_slice(LOST_SLICE):
            shutil.rmtree(hosts[index])
        restored = run_life(
            spec, _RESTORE, orders.results(_RESTORE), f"{contender}, restoring", timeout_s
        )
        persistent_bytes = allocated_bytes(Path(orders.persistent_dir))
    _require_all_verified(orders, set(expected["digests"]), restored)
    return {
        "save": [{k: v for k, v in result.items() if k != "digests"} for result in saved],
        "restore": restored,
        "ramdisk_bytes": kept,
        "persistent_bytes": persistent_bytes,
    }


def run_life(
    spec: JobSpec, life: int, results: Sequence[Path], who: str, timeout_s: float
) -> list[dict[str, Any]]:
    """Run one process per host until all have ended; what they wrote to ``results``, in order.

    Raises RoundFailed; its message begins with ``who``.
    """
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
    return [json.loads(path.read_text()) for path in results]


def _failure(spec: JobSpec, life: int, who: str, process: int, problem: str) -> RoundFailed:
    return RoundFailed(f"{who}: {problem}\n{log_tail(spec.log_path(life, process))}")


def _merge_digests(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What the restore must find. Replicas that differ before the save are the job's own fault."""
    merged: dict[str, str] = {}
    for result in results:
        for shard, digest in result["digests"].items():
            assert merged.setdefault(shard, digest) == digest, f"replicas differ at {shard}"
    return {"step": results[0]["step"], "digests": merged}


def _require_all_verified(orders: Orders, saved: set[str], restored: list[dict[str, Any]]) -> None:
    shape = orders.shape
    verified = {shard for result in restored for shard in result["verified_shards"]}
    verified_bytes = sum(result["verified_bytes"] for result in restored)
    if verified != saved or verified_bytes != shape.slices * shape.state_bytes:
        raise RoundFailed(
            f"{orders.contender}: restored {len(verified)} of {len(saved)} distinct shards and"
            f" {verified_bytes} of {shape.slices * shape.state_bytes} bytes"
        )
