"""The operating system as the simulated processes see it: files, names, random bytes."""

from __future__ import annotations

import errno
import os as real_os
import random
import secrets as real_secrets
from collections.abc import Callable
from types import ModuleType
from typing import Any

import sim

_CHANGES = (
    "open",
    "rename",
    "replace",
    "unlink",
    "remove",
    "mkdir",
    "rmdir",
    "ftruncate",
    "posix_fallocate",
    "link",
    "pwrite",
    "write",
)
"""Calls before which a process may be killed, and which a full or lost file system refuses."""
_NEEDS_ROOM = frozenset({"posix_fallocate", "pwrite", "write"})


def os_module() -> ModuleType:
    """Return the module that stands for ``os``: real files, and a point before each change."""
    module = ModuleType("os")
    vars(module).update(vars(real_os))
    for name in _CHANGES:
        setattr(module, name, _change(name, getattr(real_os, name)))

    opened = module.open

    def open_and_note(*args: Any, **kwargs: Any) -> int:
        fd = opened(*args, **kwargs)
        if args[0] in _KEPT_OPEN and sim.scheduler.current is not None:
            _folders[fd] = sim.scheduler.current.process
        return fd

    def close(fd: int) -> None:
        _folders.pop(fd, None)
        real_os.close(fd)

    def getpid() -> int:
        task = sim.scheduler.current
        return real_os.getpid() if task is None else task.process.pid

    vars(module).update(
        open=open_and_note,
        close=close,
        getpid=getpid,
        urandom=real_os.urandom,
        setpriority=lambda *_: None,
        register_at_fork=lambda **_: None,
        fstatvfs=_fstatvfs,
        _exit=_no_exit,
        kill=_no_exit,
    )
    return module


_KEPT_OPEN = ("host_state", "quarantine")
_folders: dict[int, Any] = {}
"""Descriptors of these folders, and the processes that have them open. Others have finalizers."""


def close_folders_of_the_dead() -> None:
    """Close what killed processes had open, and no finalizer closes."""
    for fd, process in list(_folders.items()):
        if not process.alive:
            del _folders[fd]
            real_os.close(fd)


def _no_exit(*_: object) -> None:
    raise AssertionError("a simulated process may not end the simulation")


def _change(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        scheduler = sim.scheduler
        task = scheduler.current
        if task is not None:
            if name == "open" and not args[1] & real_os.O_CREAT:
                scheduler.check()
            else:
                scheduler.call()
                host = task.process.host
                if name in _NEEDS_ROOM and host.is_full and not _is_memory(args[0]):
                    raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    return call


def _is_memory(fd: int) -> bool:
    """Return whether ``fd`` is memory of the process, which a full file system leaves alone."""
    return real_os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")


def _fstatvfs(fd: int) -> Any:
    status = real_os.fstatvfs(fd)
    task = sim.scheduler.current
    if task is None or not task.process.host.is_full:
        return status
    fields = list(status)
    fields[3] = fields[4] = 0  # f_bfree, f_bavail
    return real_os.statvfs_result(fields)


def secrets_module() -> ModuleType:
    """Return the module that stands for ``secrets``: bytes that the seed decides."""
    module = ModuleType("secrets")
    vars(module).update(vars(real_secrets))

    def token_bytes(size: int | None = None) -> bytes:
        return _random().randbytes(size or 32)

    vars(module).update(
        token_bytes=token_bytes,
        token_hex=lambda size=None: token_bytes(size).hex(),
        randbelow=lambda below: _random().randrange(below),
    )
    return module


def _random() -> random.Random:
    return sim.scheduler.random


class Ignored(ModuleType):
    """A module whose functions do nothing: ``atexit``."""

    def register(self, *_: Any, **__: Any) -> None:
        """Do nothing: a simulated process is killed and never ends."""

    def unregister(self, *_: Any) -> None:
        """Do nothing."""
