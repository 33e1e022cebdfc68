"""Locks on the process directories of a ramdisk. They are ``flock``, which ends with its process.

A process that writes to a directory, or deletes it, holds ``owner.lock`` exclusively. An owner
writes a record into that file, which names the process and its start of the job. A process that
serves a directory of others holds ``reader.lock`` shared; deletion needs that lock exclusively. A
lock counts only while the locked file is the one at its path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import os
import re
import socket
import stat
import weakref
from pathlib import Path

import msgspec
from absl import logging

from emergency_ckpt import files
from emergency_ckpt.core.limits import MAX_DIRECTORIES_PER_RUN, MAX_SMALL_FILE_BYTES, NAME_PATTERN
from emergency_ckpt.errors import ConfigError, CorruptData, LocalTierError
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.ram.ownership import (
    ensure_run_directory,
    open_process_directory,
    open_to_delete,
)
from emergency_ckpt.ram.process_files import delete_contents, is_published_name

OWNER_LOCK = "owner.lock"
READER_LOCK = "reader.lock"
_MAX_CLAIM_RACES = 16  # lost races against deleters before giving up
_LOCKED = -1

_PROCESS_PATTERN = re.compile(r"process_\d{5,10}(\.\d{1,4})?")


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


def read_owner(dir_fd: int) -> Owner | None:
    """Return the record of the last owner, or None when none can be read."""
    try:
        data = files.read_bounded(OWNER_LOCK, dir_fd, MAX_SMALL_FILE_BYTES)
        return decoder_of(Owner).decode(data)
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
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is a name in parentheses, which may contain any bytes.
    return int(stat.rpartition(b")")[2].split()[19])


class Claim:
    """The owner's lock on one process directory, until ``release`` or the end of the process.

    Attributes:
      dir_fd: descriptor of the directory; -1 once released.
    """

    def __init__(self, path: Path, dir_fd: int, lock_fd: int) -> None:
        self.path = path
        self.dir_fd = dir_fd
        self._lock_fd = lock_fd
        self._close = weakref.finalize(self, _close_all, (lock_fd, dir_fd))
        drop_in_child(self, Claim.release)

    def lock_again(self, start: str) -> bool:
        """Lock the directory anew, of which another program removed only ``owner.lock``.

        Return False when the directory itself is gone. LocalTierError when another process has
        locked it since; OSError.
        """
        if not _same_file(os.fstat(self.dir_fd), self.path):
            return False
        lock_fd = _lock_as_owner(self.path, self.dir_fd, create=True)
        if lock_fd is None or lock_fd == _LOCKED:
            holder = Holder(self.path, read_owner(self.dir_fd)).describe()
            problem = f"{holder} has taken the directory"
            raise LocalTierError("lock again", str(self.path), problem)
        before, self._lock_fd = self._lock_fd, lock_fd
        self._close.detach()
        self._close = weakref.finalize(self, _close_all, (lock_fd, self.dir_fd))
        os.close(before)
        self.sign(start)
        return True

    def release(self) -> None:
        """Release the directory. Idempotent."""
        # The numbers may soon be another file's, so no later call may use them.
        self.dir_fd = self._lock_fd = -1
        self._close()

    def sign(self, start: str) -> None:
        """Write the record that this process of ``start`` owns the directory.

        A failure is only logged: the lock holds without the record, and a full ramdisk must not
        stop a restore.
        """
        pid = os.getpid()
        try:
            owner = Owner(1, start, pid, _born(pid) or 0, _system(), socket.gethostname()[:255])
            data = msgspec.json.encode(owner)
            os.fchmod(self._lock_fd, files.FILE_MODE)  # else nobody believes the record
            # Not atomic: a reader may briefly find the previous record, or part of one.
            os.pwrite(self._lock_fd, data, 0)
            os.ftruncate(self._lock_fd, len(data))
        except OSError as error:
            logging.warning("no record of its owner in %s: %s", self.path, error)

    def is_in_place(self) -> bool:
        """Return True when the directory and its lock are still at their paths."""
        try:
            here = os.stat(self.path, follow_symlinks=False)
            lock = os.stat(OWNER_LOCK, dir_fd=self.dir_fd, follow_symlinks=False)
        except OSError:
            return False
        is_lock = os.path.samestat(lock, os.fstat(self._lock_fd))
        return is_lock and os.path.samestat(here, os.fstat(self.dir_fd))

    def is_served(self) -> bool:
        """Return True when a reader now has the directory locked against deletion."""
        reader_fd = _lock_out_readers(self.dir_fd)
        if reader_fd is not None and reader_fd != _LOCKED:
            os.close(reader_fd)
        return reader_fd == _LOCKED

    def delete(self, *, although_served: bool = False) -> bool:
        """Delete and release the directory; return False when a reader serves it: then it stays.

        Removes only files that this package names; a directory with other files stays.
        ``although_served``: it goes all the same; its readers have what they have mapped.
        """
        # Without the file there is no reader, and none comes, since only an owner makes the file.
        # Made here by root, the file would be root's, and refused at the next start of the user.
        reader_fd: int | None = None
        try:
            if not although_served:
                reader_fd = _lock_out_readers(self.dir_fd)
            if reader_fd == _LOCKED:
                return False
            delete_contents(self.dir_fd)
            files.remove_file(READER_LOCK, self.dir_fd)
            files.remove_file(OWNER_LOCK, self.dir_fd)
            # Not empty when a new claimer has just made its lock file: then it owns the directory.
            remove_empty(self.path)
            return not self.path.exists()
        finally:
            if reader_fd not in (None, _LOCKED):
                os.close(reader_fd)
            self.release()


class ReaderClaim:
    """A reader's shared lock on one process directory, which prevents its deletion."""

    def __init__(self, path: Path, dir_fd: int, lock_fd: int) -> None:
        self.path = path
        self.dir_fd = dir_fd
        self.release = weakref.finalize(self, _close_all, (lock_fd, dir_fd))
        drop_in_child(self, lambda claim: claim.release())


def check_run_id(run_id: str) -> None:
    """Raise ConfigError unless the run id is a plain name that can be a directory."""
    if not NAME_PATTERN.fullmatch(run_id):
        raise ConfigError(
            [f"run_id {run_id[:200]!r}: use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot"]
        )


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process of another start of the job that holds the lock on ``path``.

    Attributes:
      owner: its record, or None when none can be read.
    """

    path: Path
    owner: Owner | None

    @property
    def is_certain(self) -> bool:
        """Return True when the record is the holder's own, not that of an earlier process."""
        return self.owner is not None and self.owner.is_running is not False

    @property
    def is_this_process(self) -> bool:
        return self.owner is not None and self.owner.is_this_process

    @property
    def has_nothing(self) -> bool:
        """Return True when the directory has no record of an owner, and no save.

        On a full ramdisk, where a record has no room, all processes of one start are such holders.
        """
        try:
            size_bytes, names = os.stat(self.path / OWNER_LOCK).st_size, os.listdir(self.path)
        except OSError:
            return False
        return not size_bytes and not any(map(is_published_name, names))

    def describe(self) -> str:
        """Return the process and its host, for people."""
        if self.owner is None:
            return "a process without a record"
        text = f"process {self.owner.pid} on host {self.owner.hostname}"
        return text if self.is_certain else f"a process that came after {text}, such as its child,"


def claim_directory(
    local_dir: Path, run_id: str, process_index: int, start: str = "", *, is_settled: bool = False
) -> Claim | Holder:
    """Claim a process directory of a run: that of this index, else any unlocked, else a new one.

    The index in the name is only a label, since process ids may be permuted by a restart. Makes
    missing directories (0700); existing ones must belong to this user (``ownership``). Skips
    directories of processes of the same ``start``. Returns the Holder of a directory that a process
    of another start holds, because this start may have to restore from it. ``is_settled``: as of
    ``claim_existing``. LocalTierError when the ramdisk cannot be used. Does not block.
    """
    label = f"process_{process_index:05d}"
    run_dir = local_dir / run_id
    try:
        for _ in range(_MAX_CLAIM_RACES):
            ensure_run_directory(run_dir)
            existing = process_directories(run_dir)
            preferred = [run_dir / label] if run_dir / label in existing else []
            others = [path for path in existing if path.name != label]
            names = itertools.chain([label], (f"{label}.{n}" for n in itertools.count(1)))
            fresh = (run_dir / name for name in names)
            for path in preferred + others:
                claim_or_holder = claim_existing(path, start, is_settled=is_settled)
                if claim_or_holder is not None:
                    return claim_or_holder
            new = next(path for path in fresh if not os.path.lexists(path))
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                new.mkdir(mode=files.DIRECTORY_MODE)
                claim = claim_existing(new, start)
                if isinstance(claim, Claim):
                    return claim
    except OSError as error:
        raise files.local_error("claim", str(run_dir), error) from error
    raise LocalTierError(
        "claim",
        str(run_dir),
        f"lost {_MAX_CLAIM_RACES} races",
        hint="check for a program that deletes it",
    )


def claim_existing(path: Path, start: str, *, is_settled: bool = False) -> Claim | Holder | None:
    """Claim one directory for ``start``; None when another process of it has it, or it is gone.

    ``is_settled``: a holder has had time for its record. One that has nothing is then taken for a
    process of ``start``: there is nothing to restore from it.
    """
    claim_or_holder = _claim(path, create=True)
    if isinstance(claim_or_holder, Claim):
        claim_or_holder.sign(start)
        return claim_or_holder
    if claim_or_holder is None or (
        claim_or_holder.owner is not None and claim_or_holder.owner.start == start
    ):
        return None
    return None if is_settled and claim_or_holder.has_nothing else claim_or_holder


def read_claim(path: Path, owner_uid: int | None = None) -> ReaderClaim | None:
    """Lock one directory against deletion; None when it is being deleted or was never claimed.

    OSError when its lock is not a file (a link, a pipe, a folder), or is another user's, or the
    directory does not belong to ``owner_uid`` (None: the effective user).
    """
    try:
        dir_fd = open_process_directory(path, owner_uid)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, dir_fd)
        lock_fd = _try_lock(READER_LOCK, dir_fd, fcntl.LOCK_SH, create=False)
        if lock_fd is None or lock_fd == _LOCKED:
            return None
        opened.callback(os.close, lock_fd)
        if not _same_file(os.fstat(dir_fd), path):
            return None
        opened.pop_all()
        return ReaderClaim(path, dir_fd, lock_fd)


def current_holder(path: Path, owner_uid: int | None = None) -> Holder | None:
    """Return the process that has a directory locked as its owner now, or None.

    Writes nothing, and has the lock itself for an instant only. OSError when the directory is gone,
    or the directory or its lock does not belong to ``owner_uid`` (None: the effective user).
    """
    with files.closing(open_process_directory(path, owner_uid)) as dir_fd:
        try:
            lock_fd = _try_lock(OWNER_LOCK, dir_fd, fcntl.LOCK_SH, create=False)
        except _NoLock:
            return None
        if lock_fd == _LOCKED:
            return Holder(path, read_owner(dir_fd))
        if lock_fd is not None:
            os.close(lock_fd)
        return None


def process_directories(run_dir: Path) -> list[Path]:
    """Return the process directories of a run, sorted by name; none without a run directory."""
    try:
        with os.scandir(run_dir) as entries:
            names = [
                entry.name
                for entry in entries
                if _PROCESS_PATTERN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
    return [run_dir / name for name in sorted(names)[:MAX_DIRECTORIES_PER_RUN]]


def claim_to_delete(path: Path, *, own: bool = False) -> Claim | Holder | None:
    """Lock a directory of another run; None when it has no lock file, or is gone.

    ``own``: files.NotOwn when it, its run or ``local_dir`` is not this user's.
    """
    return _claim(path, create=False, own=own)


def remove_empty(path: Path) -> None:
    """Remove a directory if it is empty. OSError."""
    try:
        path.rmdir()
    except OSError as error:
        # Not empty: a process owns it, or it has foreign files. Gone: another process deleted it.
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
            raise


def _claim(path: Path, *, create: bool, own: bool = True) -> Claim | Holder | None:
    try:
        dir_fd = open_process_directory(path) if own else open_to_delete(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    # An interrupt ends the lock too: else the lock would stay with this process.
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, dir_fd)
        lock_fd = _lock_as_owner(path, dir_fd, create=create)
        if lock_fd == _LOCKED:
            return Holder(path, read_owner(dir_fd))
        if lock_fd is None:
            return None
        opened.callback(os.close, lock_fd)
        if not _same_file(os.fstat(dir_fd), path):
            return None
        if create:
            _ensure_readers_lock(path, dir_fd)
        opened.pop_all()
        return Claim(path, dir_fd, lock_fd)


def _lock_as_owner(path: Path, dir_fd: int, *, create: bool) -> int | None:
    """Return the result of ``_try_lock``. ``create``: also in place of what is no lock file."""
    if not create:
        return _try_lock(OWNER_LOCK, dir_fd, fcntl.LOCK_EX, create=False)
    try:
        with contextlib.suppress(_NoLock):
            return _try_lock(OWNER_LOCK, dir_fd, fcntl.LOCK_EX, create=True)
        if not _make_way(path, dir_fd):
            return None
        return _try_lock(OWNER_LOCK, dir_fd, fcntl.LOCK_EX, create=True)
    except PermissionError as error:
        raise _not_own(path / OWNER_LOCK) from error


def _make_way(path: Path, dir_fd: int) -> bool:
    """Take away an ``owner.lock`` that is no file; return False when another process does so now.

    Without the lock of the directory, of two processes that found such a thing the second would
    take away the file that the first had made and locked meanwhile.
    """
    try:
        fcntl.flock(dir_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        if _is_no_file(OWNER_LOCK, dir_fd):
            logging.warning("%s is no lock file, and makes way for one", path / OWNER_LOCK)
            files.make_way(OWNER_LOCK, dir_fd)
    finally:
        fcntl.flock(dir_fd, fcntl.LOCK_UN)
    return True


def _lock_out_readers(dir_fd: int) -> int | None:
    """Return the result of ``_try_lock``; None where ``read_claim`` refuses the file to readers."""
    with contextlib.suppress(_NoLock, files.NotOwn):
        return _try_lock(READER_LOCK, dir_fd, fcntl.LOCK_EX, create=False)
    return None


def _ensure_readers_lock(path: Path, dir_fd: int) -> None:
    """Make ``reader.lock`` in a directory of this user, also in place of another user's. NotOwn.

    A command of root may have left one. No server has that one locked, since ``read_claim`` takes
    no other user's file.
    """
    flags = os.O_RDWR | os.O_CREAT
    try:
        os.close(_open_lock(READER_LOCK, dir_fd, flags))
    except (_NoLock, PermissionError):
        try:
            files.make_way(READER_LOCK, dir_fd)
            os.close(_open_lock(READER_LOCK, dir_fd, flags | os.O_EXCL))
        except PermissionError as error:
            raise _not_own(path / READER_LOCK) from error


def _not_own(path: Path) -> files.NotOwn:
    hint = f"if no process has {path.parent}: rm -r {path}"
    return files.NotOwn("it is not a file that this user may write", path, hint)


class _NoLock(OSError):
    """A link, a pipe or a folder stands in place of a lock, and no process can have that locked."""


def _is_no_file(name: str, dir_fd: int) -> bool:
    """Return whether something has the name that is no file."""
    try:
        return not stat.S_ISREG(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _open_lock(name: str, dir_fd: int, flags: int) -> int:
    """Return the descriptor of a lock. OSError; _NoLock, NotOwn for another user's file.

    A file that others may write to is a lock as well: they cannot enter the directory, and a
    process may have the file locked.
    """
    try:
        return files.open_regular(name, dir_fd, flags, any_mode=True)
    except FileNotFoundError:
        raise
    except (CorruptData, OSError) as error:
        if _is_no_file(name, dir_fd):
            raise _NoLock(errno.EINVAL, "it is no lock file", name) from error
        if isinstance(error, CorruptData):
            raise files.NotOwn(error.problem, name, hint=error.hint) from error
        raise


def _try_lock(name: str, dir_fd: int, kind: int, *, create: bool) -> int | None:
    """Return a locked descriptor; ``_LOCKED`` when another has the lock; None without the file.

    Errors as of ``_open_lock``.
    """
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    try:
        fd = _open_lock(name, dir_fd, flags)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        current = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if os.path.samestat(os.fstat(fd), current):
            return fd
    except BlockingIOError:
        os.close(fd)
        return _LOCKED
    except FileNotFoundError:
        pass
    os.close(fd)
    return None


def _same_file(status: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(status, os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _close_all(descriptors: tuple[int, ...]) -> None:
    for fd in descriptors:
        os.close(fd)
