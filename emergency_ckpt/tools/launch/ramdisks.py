"""The directories that stand for the hosts' RAM. They belong to hosts, not to processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from absl import logging

from emergency_ckpt.errors import CheckpointError, LocalTierError
from emergency_ckpt.files import NotOwn
from emergency_ckpt.ram.ownership import ensure_run_directory
from emergency_ckpt.tools.launch.job import JobSpec
from emergency_ckpt.tools.launch.job_layout import JobLayout
from emergency_ckpt.tools.reserve import reserve_slot, slot_sizes


class Ramdisks:
    """All ramdisks of a job, owned by one supervisor at a time; a crash releases its file lock."""

    def __init__(self, spec: JobSpec) -> None:
        """Make missing directories; contents of an earlier job of this user are kept.

        Raises:
          LocalTierError: another supervisor uses the same ``local_root``; or another user may have
            put something into it, such as compiled code.
          OSError: a directory cannot be made.
        """
        self._spec = spec
        try:
            ensure_run_directory(spec.private_dir)
        except NotOwn as error:
            problem = f"{error.filename}: {error.strerror}"
            raise LocalTierError(
                "launch", str(spec.local_root), problem, hint=error.hint
            ) from error
        lock_path = spec.private_dir / "owner.lock"
        self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _locked(self._lock) or not _still_at(self._lock, lock_path):
            os.close(self._lock)
            raise LocalTierError(
                "launch",
                str(spec.local_root),
                "another job runs with this local root",
                hint="wait for it, or give another --local-root",
            )
        for host in spec.first_topology.host_of_process:
            spec.ramdisk(host).mkdir(mode=0o700, exist_ok=True)

    def wipe(self, hosts: Iterable[int]) -> None:
        """Delete the contents of ``hosts``, whose processes must have ended."""
        for host in hosts:
            shutil.rmtree(self._spec.ramdisk(host))
            self._spec.ramdisk(host).mkdir(mode=0o700)

    def close(self, *, remove: bool) -> None:
        """Release the ramdisks, or remove them; then remove ``local_root`` if it is empty."""
        spec = self._spec
        for life_dir in spec.private_dir.glob("life_*"):
            shutil.rmtree(life_dir)
        if remove:
            for host in spec.first_topology.host_of_process:
                if spec.ramdisk(host).exists():
                    shutil.rmtree(spec.ramdisk(host))
            shutil.rmtree(spec.private_dir)  # the lock is held until its file is gone
        os.close(self._lock)
        if remove and not any(spec.local_root.iterdir()):
            spec.local_root.rmdir()


class SlotReserves:
    """Makes the pages of a slot on each host without one, while its process starts.

    For a life after the first: the other hosts' ramdisks tell the run and the size. A process takes
    its slot over when it is ready, finished or not; a failure is logged, and costs time only.
    """

    def __init__(self, spec: JobSpec, layout: JobLayout) -> None:
        """Start a thread for each such host. Does not block."""
        self._closing = threading.Event()
        sizes_of_hosts = {host: slot_sizes(spec.ramdisk(host)) for host in layout.host_of_process}
        wanted = lost_slots(sizes_of_hosts)
        self._threads = [
            threading.Thread(
                target=self._reserve,
                args=(spec.ramdisk(host), wanted[host], process),
                name=f"reserve host {host}",
            )
            for process, host in enumerate(layout.host_of_process)
            if host in wanted
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, which takes a few milliseconds. What they made stays. Idempotent."""
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _reserve(self, ramdisk: Path, wanted: tuple[str, int], process: int) -> None:
        run_id, size_bytes = wanted
        try:
            reserve_slot(ramdisk, run_id, process, size_bytes, self._closing.is_set)
        except (CheckpointError, OSError) as error:
            logging.warning("no slot was reserved in %s: %s", ramdisk, error)


def lost_slots(
    sizes_of_hosts: Mapping[int, Mapping[str, tuple[float, int]]],
) -> dict[int, tuple[str, int]]:
    """Return, for each host without a slot of the newest run: (that run, bytes of its largest).

    Pure. ``sizes_of_hosts``: the result of ``slot_sizes`` for each host.
    """
    newest = max(
        ((runs[run][0], run) for runs in sizes_of_hosts.values() for run in runs), default=None
    )
    if newest is None:
        return {}
    run_id = newest[1]
    largest = max(runs[run_id][1] for runs in sizes_of_hosts.values() if run_id in runs)
    return {host: (run_id, largest) for host, runs in sizes_of_hosts.items() if run_id not in runs}


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_at(descriptor: int, path: Path) -> bool:
    """Return True unless the last owner removed the file between our open and our lock."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
