"""Folders of a file system that are kept open, and are changed only while they have their names.

A file system renames and removes by name. So a life that stalls just before a removal might remove
a folder that a newer life has written under the same name meanwhile. An object store prevents that
by generations; here an open descriptor stands for the folder, whatever its name is by now.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import weakref
from collections.abc import Iterable

from etils import epath

from emergency_ckpt.errors import PersistentTierError


class Pinned:
    """Entries of these names below ``root``, kept open. For use inside ``StorageDirectory.do``.

    The descriptors are closed with the last reference: a call that was given up may still use them.
    """

    def __init__(self, root: epath.Path, names: Iterable[str]) -> None:
        self._root = root
        self._fds: dict[str, int] = {}
        weakref.finalize(self, _close, self._fds)
        for name in names:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._fds[name] = os.open(root / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that exist."""
        return tuple(self._fds)

    def move(self, name: str, to: str) -> None:
        """Give a folder another name, if the folder still has ``name``. Idempotent.

        PersistentTierError when a newer life took ``name`` at this instant: the newer life's folder
        gets the name back.
        """
        if not self._is_at(name, name):
            return
        (self._root / name).rename(self._root / to)
        if not self._is_at(name, to):
            (self._root / to).rename(self._root / name)
            problem = "another writer has taken its place meanwhile"
            raise PersistentTierError("move", str(self._root / name), problem)

    def clear(self, name: str, at: str = "") -> None:
        """Remove the entry that had the ``name``, and now has the name ``at``. Idempotent.

        A symbolic link is removed, but not its target.
        """
        at = at or name
        if not self._is_at(name, at):
            return
        fd = self._fds[name]
        try:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                os.unlink(self._root / at)
                return
            _empty(fd)
            os.rmdir(self._root / at)
        except OSError as error:
            if not self._is_at(name, at):
                return  # another writer has removed it, or has the name now
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
            text = f"not all of {self._root / at} could be removed: {error}"
            raise ConnectionError(text) from error

    def _is_at(self, name: str, at: str) -> bool:
        fd = self._fds.get(name)
        if fd is None:
            return False
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self._root / at))
        except (FileNotFoundError, NotADirectoryError):
            return False


def _empty(fd: int) -> None:
    """Remove all entries of a folder, even if the folder has another name by now."""
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        with os.scandir(folder) as entries:
            children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in children:
            if is_folder:
                shutil.rmtree(name, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


def _close(fds: dict[str, int]) -> None:
    for fd in fds.values():
        os.close(fd)
