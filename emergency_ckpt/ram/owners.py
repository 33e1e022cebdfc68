"""The record of a directory's owner, written into its lock file and read by later starts.

The lock shows that a process lives; the record names the process and its start of the job.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from emergency_ckpt import files
from emergency_ckpt.core.limits import MAX_SMALL_FILE_BYTES
from emergency_ckpt.errors import CorruptData

OWNER_LOCK = "owner.lock"


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process of one start of a job.

    Attributes:
      start: the name of the start, equal on all of its processes.
      system: identifies the kernel's boot and the namespace of ``pid``.
      born: start of the process in clock ticks since that boot, because pids are reused.
    """

    format: int
    start: str
    pid: int
    born: int
    system: str
    hostname: str

    @property
    def is_this_process(self) -> bool:
        """Return True when this process wrote the record."""
        return (self.pid, self.system) == (os.getpid(), _system()) and self.is_running is True

    @property
    def is_running(self) -> bool | None:
        """Return True when the process lives; None when its pid is of another system."""
        if self.system != _system():
            return None
        return _born(self.pid) == self.born


def this_process(start: str) -> Owner:
    """Return the record of this process as one of ``start``."""
    pid = os.getpid()
    return Owner(1, start, pid, _born(pid) or 0, _system(), socket.gethostname()[:255])


def write_owner(lock_fd: int, owner: Owner) -> None:
    """Write the record into the locked file. OSError.

    Not atomic: a reader may briefly find the previous record, or part of one.
    """
    data = msgspec.json.encode(owner)
    os.pwrite(lock_fd, data, 0)
    os.ftruncate(lock_fd, len(data))


def read_owner(dir_fd: int) -> Owner | None:
    """Return the record of the last owner, or None when none can be read."""
    try:
        data = files.read_bounded(OWNER_LOCK, dir_fd, MAX_SMALL_FILE_BYTES)
        return msgspec.json.decode(data, type=Owner)
    except (OSError, CorruptData, msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()[:255]


def _born(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is a name in parentheses, which may contain any character.
    return int(stat.rpartition(")")[2].split()[19])
