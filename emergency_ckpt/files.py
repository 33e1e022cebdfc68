"""Small files of a directory: whole or absent, bounded, and never through a symbolic link.

Every call takes the descriptor of an open directory and a plain name, so no path
leads out of it. Files of a ramdisk are not synced, because tmpfs ignores fsync; the order of
publishing suffices.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import stat
import sys
import time
from collections.abc import Generator
from pathlib import Path

from emergency_ckpt.errors import CorruptData, LocalTierError, MemoryLimitReached, RamdiskFull

TEMPORARY_PREFIX = ".tmp-"
ASIDE_PREFIX = "aside-"
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_sequence = itertools.count()  # next() is atomic: temporary names differ between threads


class NotOwn(PermissionError):
    """A directory that another user owns or can write to: its contents are not trusted.

    Attributes:
      hint: the command that corrects it.
    """

    def __init__(self, problem: str, path: str | os.PathLike[str], hint: str) -> None:
        self.hint = hint
        super().__init__(errno.EPERM, problem, os.fspath(path))


def _check_own(dir_fd: int, path: str | os.PathLike[str], owner_uid: int) -> None:
    status = os.fstat(dir_fd)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != owner_uid:
        raise NotOwn(
            f"it belongs to user {status.st_uid}, not to user {owner_uid}",
            path,
            f"if nobody else can have put anything into it: chown -R {owner_uid} {path};"
            " else remove it",
        )
    if mode & _OTHERS:
        raise NotOwn(
            f"it is open to others (mode {mode:04o})",
            path,
            f"if nobody else can have put anything into it: chmod -R go-rwx {path}; else remove it",
        )


@contextlib.contextmanager
def closing(fd: int) -> Generator[int]:
    """Give a descriptor, and close it at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_directory(name: str | os.PathLike[str], *, parent_fd: int | None = None) -> int:
    """Return the descriptor of a directory; OSError, also when the last component is a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=parent_fd)


def open_own(path: str | os.PathLike[str], parent_fd: int, owner_uid: int | None = None) -> int:
    """Open the directory ``path`` by its name in ``parent_fd``. OSError.

    NotOwn unless ``owner_uid`` owns it (None: the effective user) and others have no access.
    """
    fd = open_directory(os.path.basename(path), parent_fd=parent_fd)
    try:
        _check_own(fd, path, os.geteuid() if owner_uid is None else owner_uid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_inner(name: str, parent_fd: int) -> int:
    """Open a directory inside a checked one. NotOwn unless it has the same owner and is closed."""
    return open_own(name, parent_fd, os.fstat(parent_fd).st_uid)


def ensure_directory(name: str, parent_fd: int) -> int:
    """Make the directory when it is absent, then open it as ``open_inner``.

    A file or a link under that name, which this package never makes, is moved aside and kept.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, DIRECTORY_MODE, dir_fd=parent_fd)
    try:
        return open_inner(name, parent_fd)
    except NotADirectoryError:
        _move_aside(name, parent_fd)
        os.mkdir(name, DIRECTORY_MODE, dir_fd=parent_fd)
        return open_inner(name, parent_fd)


def open_regular(name: str, dir_fd: int, flags: int, *, any_mode: bool = False) -> int:
    """Return the descriptor of a regular file. OSError.

    CorruptData for a link, a pipe or a device, and for a file that a user other than the
    directory's owner owns or can write to. ``any_mode``: others may write to the file.
    """
    # O_NONBLOCK: to open a planted pipe must not block until its other end is opened.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(name, flags, FILE_MODE, dir_fd=dir_fd)
    status = os.fstat(fd)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "not a regular file"
    elif status.st_uid != os.fstat(dir_fd).st_uid:
        problem = f"it belongs to user {status.st_uid}, its directory does not"
    elif status.st_mode & _OTHERS_WRITE and not any_mode:
        problem = f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    if problem:
        os.close(fd)
        raise CorruptData("open", name, problem, hint="remove it")
    return fd


def read_bounded(name: str, dir_fd: int, limit_bytes: int) -> bytes:
    """Return all bytes of a file. CorruptData over the limit, FileNotFoundError when absent.

    CorruptData too when the file cannot be opened or read, as where its memory is damaged.
    """
    try:
        with open(open_regular(name, dir_fd, os.O_RDONLY), "rb") as file:
            data = file.read(limit_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptData("read", name, f"cannot be read: {error.strerror}") from error
    if len(data) > limit_bytes:
        raise CorruptData("read", name, "too long", expected=f"at most {limit_bytes} bytes")
    return data


def write_temporary(name: str, dir_fd: int, data: bytes) -> str:
    """Write a temporary file, which ``rename`` makes ``name``; return its name.

    RamdiskFull when there is no room. On failure no file is left.
    """
    temporary = f"{TEMPORARY_PREFIX}{os.getpid()}-{next(_sequence)}-{name}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with open(open_regular(temporary, dir_fd, flags), "wb") as file:
            file.write(data)
    except OSError as error:
        _discard(temporary, dir_fd)
        raise local_error("write", name, error, len(data), dir_fd=dir_fd) from error
    return temporary


def rename(temporary: str, name: str, dir_fd: int) -> None:
    """Publish a temporary file as ``name``, atomically: readers see the old one or the new one.

    A folder under that name, which this package never makes, is moved aside and kept.
    """
    try:
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except IsADirectoryError:
        _move_aside(name, dir_fd)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def _move_aside(name: str, dir_fd: int) -> None:
    aside = f"{ASIDE_PREFIX}{os.getpid()}-{time.time_ns()}-{name}"[:200]
    os.rename(name, aside, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def write_atomic(name: str, dir_fd: int, data: bytes) -> None:
    """Write a small file whole or not at all. ``RamdiskFull``, ``LocalTierError``."""
    temporary = write_temporary(name, dir_fd, data)
    try:
        rename(temporary, name, dir_fd)
    except OSError as error:
        _discard(temporary, dir_fd)
        raise local_error("publish", name, error, len(data), dir_fd=dir_fd) from error


def remove(name: str, dir_fd: int) -> None:
    """Remove a name that is not a directory; do nothing when it is absent."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)


def remove_file(name: str, dir_fd: int) -> bool:
    """Remove a name; return False for a folder, which this package never makes there: it stays."""
    try:
        remove(name, dir_fd)
    except IsADirectoryError:
        return False
    return True


def make_way(name: str, dir_fd: int) -> None:
    """Remove a name; a folder, which this package never makes there, is moved aside and kept."""
    if not remove_file(name, dir_fd):
        _move_aside(name, dir_fd)


def _discard(temporary: str, dir_fd: int) -> None:
    # The first error is the one to report; the next owner removes what is left.
    with contextlib.suppress(OSError):
        remove(temporary, dir_fd)


def remove_temporaries(dir_fd: int) -> None:
    """Remove the temporary files of a writer that died. Only the directory's owner may call it."""
    for name in os.listdir(dir_fd):
        if name.startswith(TEMPORARY_PREFIX):
            remove_file(name, dir_fd)


def free_bytes(directory: int | Path) -> int:
    """Return the free bytes of a directory's file system; without a limit ``sys.maxsize``."""
    status = os.statvfs(directory)
    has_limit = status.f_blocks > 0  # a tmpfs of size=0 and a ramfs tell 0 blocks, 0 of them free
    return status.f_bavail * status.f_frsize if has_limit else sys.maxsize


def file_size_hint() -> str:
    """Return what to do where a file would be larger than this process may make one (EFBIG)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = "" if limit == resource.RLIM_INFINITY else f", which is {limit} bytes here"
    ways = "`ulimit -f unlimited` in its shell, or LimitFSIZE of its service"
    return f"raise the process's limit of file sizes{most}: {ways}"


def _lacks_inodes(place: int | str) -> bool:
    """Return whether a file system has free bytes and no free inode; ``place``: in it."""
    if isinstance(place, str) and not os.path.isabs(place):
        return False
    try:
        status = os.statvfs(place)
    except OSError:  # the place is gone: the first error stands
        return False
    return status.f_bavail > 0 and status.f_files > 0 and status.f_favail == 0


def local_error(
    operation: str,
    target: str,
    error: OSError,
    needed_bytes: int | None = None,
    *,
    dir_fd: int | None = None,
) -> LocalTierError:
    """Return the typed error for a failed system call on the ramdisk.

    ``dir_fd``: of the directory, where ``target`` is a name in it and no path.
    """
    if error.errno == errno.EFBIG:
        problem = "the file would be larger than this process may write"
        return LocalTierError(operation, target, problem, hint=file_size_hint())
    if error.errno == errno.ENOSPC and _lacks_inodes(target if dir_fd is None else dir_fd):
        return RamdiskFull(
            operation,
            target,
            "the ramdisk has free bytes, but no free inode for one more file",
            hint="mount the ramdisk with more inodes (tmpfs: nr_inodes), or remove files from it",
        )
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        needed = None if needed_bytes is None else f"{needed_bytes} bytes free"
        return RamdiskFull(
            operation, target, "no space left", expected=needed, hint="enlarge the ramdisk"
        )
    if error.errno == errno.ENOMEM:
        problem, hint = "the kernel gives it no memory", "raise the job's memory limit"
        return MemoryLimitReached(operation, target, problem, hint=hint)
    if isinstance(error, NotOwn):
        return LocalTierError(operation, str(error.filename), str(error.strerror), hint=error.hint)
    hint = "check that local_dir is a writable directory of this user"
    return LocalTierError(operation, target, error.strerror or str(error), hint=hint)
