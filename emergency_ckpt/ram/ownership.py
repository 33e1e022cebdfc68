"""The owner of a ramdisk's directories, checked on the open descriptor, never by path.

On ``/dev/shm`` every user of the host may make a directory before the job does. So a directory is
used only when this user owns it and others have no access; ``local_dir`` itself may be readable,
and root's, because it contains only such directories.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from emergency_ckpt import files

ROOT_UID = 0


def open_local_dir(path: Path, owner_uid: int | None = None) -> int:
    """Open ``local_dir``, where only root and the owner may remove or rename entries.

    It belongs to root or the owner, and others cannot write to it unless it is sticky, such as
    ``/dev/shm``. ``owner_uid``: None for the effective user.

    Raises:
      files.NotOwn: it belongs to another user, is open to others, or is a link.
      OSError: as ``os.open``.
    """
    if path.is_symlink():
        hint = f"give the directory itself: {os.path.realpath(path)}"
        raise files.NotOwn("it is a link", path, hint)
    fd = files.open_directory(path)
    try:
        _check_local_dir(os.fstat(fd), path, os.geteuid() if owner_uid is None else owner_uid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_local_dir(status: os.stat_result, path: Path, owner_uid: int) -> None:
    way_out = f"give local_dir a directory of its own, such as {path / 'eckpt'}, which is then made"
    if status.st_uid not in {owner_uid, ROOT_UID}:
        raise files.NotOwn(
            f"it belongs to user {status.st_uid}, not to user {owner_uid}",
            path,
            f"if nobody else can have put anything into it: chown {owner_uid} {path}; else remove"
            " it, or mount a tmpfs of the job's own",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise files.NotOwn(
            f"others may write in it (mode {mode:04o})", path, f"chmod go-w {path}, or {way_out}"
        )


def ensure_run_directory(path: Path) -> None:
    """Make ``<local_dir>/<run id>`` when it is missing; errors as of ``open_run_directory``."""
    path.parent.mkdir(mode=files.DIRECTORY_MODE, parents=True, exist_ok=True)
    with (
        files.closing(open_local_dir(path.parent)) as parent_fd,
        contextlib.suppress(FileExistsError),
    ):
        os.mkdir(path.name, files.DIRECTORY_MODE, dir_fd=parent_fd)
    with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
        os.close(open_run_directory(path))


def open_run_directory(path: Path, owner_uid: int | None = None) -> int:
    """Open ``<local_dir>/<run id>``, which must belong to the owner and be closed to all others.

    Raises:
      files.NotOwn: it is not, or ``local_dir`` cannot be used.
      OSError: as ``os.open``.
    """
    with files.closing(open_local_dir(path.parent, owner_uid)) as parent_fd:
        try:
            return files.open_own(path, parent_fd, owner_uid)
        except NotADirectoryError as error:
            raise files.NotOwn("it is a link, or no directory", path, "remove it") from error


def open_process_directory(path: Path, owner_uid: int | None = None) -> int:
    """Open ``<local_dir>/<run id>/<process directory>``, as ``open_run_directory``."""
    with files.closing(open_run_directory(path.parent, owner_uid)) as parent_fd:
        return files.open_own(path, parent_fd, owner_uid)


def open_to_delete(path: Path) -> int:
    """Open a process directory of any user, through no link below ``local_dir``. OSError.

    For deletion only, which the kernel's permissions limit: its contents are not trusted.
    """
    local_fd = os.open(path.parent.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with (
        files.closing(local_fd),
        files.closing(files.open_directory(path.parent.name, parent_fd=local_fd)) as parent_fd,
    ):
        return files.open_directory(path.name, parent_fd=parent_fd)
