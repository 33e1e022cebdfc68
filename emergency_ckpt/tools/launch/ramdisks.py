"""The directories that stand for the hosts' RAM. They belong to hosts, not to processes."""

from __future__ import annotations

import fcntl
import os
import shutil

from emergency_ckpt.errors import LocalTierError
from emergency_ckpt.files import NotOwn
from emergency_ckpt.ram.ownership import ensure_run_directory
from emergency_ckpt.tools.launch.job import JobSpec


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
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_own = lock_path.exists() and os.path.samestat(os.fstat(self._lock), lock_path.stat())
        except BlockingIOError:
            is_own = False
        if not is_own:  # locked, or removed by the last owner between our open and our lock
            os.close(self._lock)
            raise LocalTierError(
                "launch",
                str(spec.local_root),
                "another job runs with this local root",
                hint="wait for it, or give another --local-root",
            )
        for host in range(spec.host_count):
            spec.ramdisk(host).mkdir(mode=0o700, exist_ok=True)

    def close(self, *, remove: bool) -> None:
        """Release the ramdisks, or remove them; then remove ``local_root`` if it is empty."""
        spec = self._spec
        for life_dir in spec.private_dir.glob("life_*"):
            shutil.rmtree(life_dir)
        if remove:
            for host in range(spec.host_count):
                if spec.ramdisk(host).exists():
                    shutil.rmtree(spec.ramdisk(host))
            shutil.rmtree(spec.private_dir)  # the lock is held until its file is gone
        os.close(self._lock)
        if remove and not any(spec.local_root.iterdir()):
            spec.local_root.rmdir()
