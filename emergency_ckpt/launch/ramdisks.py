"""The directories that stand for the hosts' RAM. They belong to hosts, not to processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from emergency_ckpt.errors import LocalTierError
from emergency_ckpt.launch.job import JobSpec


class Ramdisks:
    """All ramdisks of a job, owned by one supervisor at a time; a crash releases its file lock."""

    def __init__(self, spec: JobSpec) -> None:
        """Make missing directories; contents of an earlier job are kept.

        Raises:
          LocalTierError: another supervisor uses the same ``local_root``.
          OSError: a directory cannot be made.
        """
        self._spec = spec
        spec.private_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_at(descriptor: int, path: Path) -> bool:
    """Return True unless the last owner removed the file between our open and our lock."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
