"""File systems that a test mounts, by calls of the kernel: it starts no program for that."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MNT_DETACH = 1, 32, 4096, 2
_libc = ctypes.CDLL(None, use_errno=True)


def mount_tmpfs(path: Path, size_bytes: int, *, inodes: int = 0) -> bool:
    """Mount a tmpfs at a folder; return whether this process may. ``inodes``: 0 for the usual."""
    options = f"size={size_bytes}" + (f",nr_inodes={inodes}" if inodes else "")
    done = _libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, options.encode())
    return done == 0


def mount_again(path: Path, at: Path) -> None:
    """Mount the folder ``path`` at another one too."""
    _check(_libc.mount(os.fsencode(path), os.fsencode(at), None, _MS_BIND, None), at)


def make_read_only(path: Path) -> None:
    """Let the file system that is mounted at ``path`` refuse writes from now on."""
    _check(_libc.mount(None, os.fsencode(path), None, _MS_REMOUNT | _MS_RDONLY, None), path)


def unmount(path: Path) -> None:
    """Detach the file system at once; it ends with the last file that is open on it."""
    _check(_libc.umount2(os.fsencode(path), _MNT_DETACH), path)


def _check(result: int, path: Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
