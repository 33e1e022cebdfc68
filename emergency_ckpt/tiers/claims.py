"""Who may use which process directory of a ramdisk: flock, so that a dead owner lets go by itself.

``owner.lock`` is held exclusively by the process that writes into a directory, or that deletes it.
``reader.lock`` is held shared by whoever serves a directory's contents without owning it; deleting
needs it exclusively. A lock counts only while the locked file is still the one at its path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from emergency_ckpt.errors import ConfigError, CorruptData, LocalTierError
from emergency_ckpt.tiers import files
from emergency_ckpt.tiers.manifest import NAME_PATTERN

OWNER_LOCK = "owner.lock"
READER_LOCK = "reader.lock"
HOST_STATE_DIRECTORY = "host_state"
QUARANTINE_DIRECTORY = "quarantine"
KNOWN_COMPLETE = "known_complete.json"
MAX_DIRECTORIES_PER_RUN = 1024
MAX_RUNS = 1024
_MAX_ATTEMPTS = 16  # lost races against deleters before giving up

_PROCESS_PATTERN = re.compile(r"process_\d{5,10}(\.\d{1,4})?")
# Published names first: a deletion that is cut short leaves nothing that counts.
_DELETE_ORDER = (
    re.compile(r"slot_\d{1,2}\.manifest\.json"),
    re.compile(r"known_complete\.json"),
    re.compile(r"slot_\d{1,2}\.bin"),
    re.compile(re.escape(files.TEMPORARY_PREFIX) + r".*"),
)
_HOST_STATE_SAVE = re.compile(r"[A-Za-z0-9._-]{1,160}")
_HOST_STATE_FILE = re.compile(r"process_\d{5,10}_of_\d{5,10}\.json|\.tmp-.*")
_QUARANTINE_FILE = re.compile(r"[A-Za-z0-9._-]{1,160}\.json|\.tmp-.*")

_registry_lock = threading.Lock()
_claims: weakref.WeakValueDictionary[tuple[int, int], Claim]


class Claim:
    """The owner's lock on one process directory. Lives until ``release``, or the process's end."""

    def __init__(self, path: Path, dir_fd: int, lock_fd: int, key: tuple[int, int]) -> None:
        self.path = path
        self.dir_fd = dir_fd
        self.active = True
        self._key = key
        self._close = weakref.finalize(self, _close_all, (lock_fd, dir_fd))

    def release(self) -> None:
        """Let go of the directory. Idempotent."""
        with _registry_lock:
            if self._close.alive:
                _claims.pop(self._key, None)
            self.active = False
            # The number may soon mean another file: no later call may use it.
            self.dir_fd = -1
        self._close()

    def retire(self) -> None:
        """Let go as soon as nothing refers to this claim any more.

        Used while arrays still read slots of the directory: until they are gone the lock keeps
        other processes from writing there; this process may claim the directory again.
        """
        with _registry_lock:
            self.active = False

    def delete(self) -> bool:
        """Delete the directory and let go; False when a reader still serves it (it then stays).

        Removes only names that this package gives; with anything else in it the rest stays.
        """
        reader_fd = _try_lock(READER_LOCK, self.dir_fd, fcntl.LOCK_EX, create=True)
        if reader_fd is None:
            self.release()
            return False
        try:
            _delete_contents(self.dir_fd)
            files.remove(READER_LOCK, self.dir_fd)
            files.remove(OWNER_LOCK, self.dir_fd)
            # Not empty: a new claimer made its lock file just now, the directory is its own.
            _remove_empty(self.path)
            return not self.path.exists()
        finally:
            os.close(reader_fd)
            self.release()


_claims = weakref.WeakValueDictionary()


class ReaderClaim:
    """A reader's shared lock on one process directory: it is not deleted meanwhile."""

    def __init__(self, path: Path, dir_fd: int, lock_fd: int) -> None:
        self.path = path
        self.dir_fd = dir_fd
        self.release = weakref.finalize(self, _close_all, (lock_fd, dir_fd))


def check_run_id(run_id: str) -> None:
    """``ConfigError`` unless the run id is a plain name that can be a directory."""
    if not NAME_PATTERN.fullmatch(run_id):
        raise ConfigError(
            [f"run_id {run_id[:200]!r}: use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot"]
        )


def claim_directory(local_dir: Path, run_id: str, process_index: int) -> Claim:
    """Claim a process directory of a run: that of this index, else any unlocked, else a new one.

    The index in the name is only a label: process ids may be permuted after a restart. Makes
    what is missing (0700). ``LocalTierError`` when the ramdisk cannot be used. Does not block.
    """
    label = f"process_{process_index:05d}"
    run_dir = local_dir / run_id
    try:
        for _ in range(_MAX_ATTEMPTS):
            local_dir.mkdir(mode=files.DIRECTORY_MODE, parents=True, exist_ok=True)
            # Not mkdir(exist_ok=True): that fails when a deleter removes it just then.
            with contextlib.suppress(FileExistsError):
                run_dir.mkdir(mode=files.DIRECTORY_MODE)
            if run_dir.is_symlink():
                raise LocalTierError("claim", str(run_dir), "it is a link", hint="remove it")
            existing = process_directories(run_dir)
            preferred = [run_dir / label] if run_dir / label in existing else []
            others = [path for path in existing if path.name != label]
            names = itertools.chain([label], (f"{label}.{n}" for n in itertools.count(1)))
            fresh = (run_dir / name for name in names)
            for path in preferred + others:
                if claim := try_claim(path):
                    return claim
            new = next(path for path in fresh if not os.path.lexists(path))
            if claim := _claim_new(new):
                return claim
    except OSError as error:
        raise files.local_error("claim", str(run_dir), error) from error
    raise LocalTierError(
        "claim", str(run_dir), f"lost {_MAX_ATTEMPTS} races", hint="is something deleting it?"
    )


def try_claim(path: Path) -> Claim | None:
    """Claim one existing directory; None when another owner lives or it has just vanished."""
    return _registered_claim(path, create=True)


def read_claim(path: Path) -> ReaderClaim | None:
    """Lock one directory against deletion; None when it is vanishing or was never claimed."""
    try:
        dir_fd = files.open_directory(path)
    except OSError:
        return None
    lock_fd = _try_lock(READER_LOCK, dir_fd, fcntl.LOCK_SH, create=False)
    if lock_fd is None or not _same_file(os.fstat(dir_fd), path):
        _close_all((dir_fd,) if lock_fd is None else (lock_fd, dir_fd))
        return None
    return ReaderClaim(path, dir_fd, lock_fd)


def process_directories(run_dir: Path) -> list[Path]:
    """The process directories of a run, sorted by name; none when the run directory is absent."""
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


def reclaim_other_runs(local_dir: Path, run_id: str) -> tuple[list[Path], list[str]]:
    """Delete process directories of other runs that nobody has locked.

    Returns what was deleted, and what could not be, each with its reason. Never touches a live
    owner's or reader's directory, nor anything that does not carry this package's names.
    """
    deleted: list[Path] = []
    failed: list[str] = []
    with os.scandir(local_dir) as entries:
        runs = sorted(
            entry.name
            for entry in entries
            if entry.name != run_id
            and NAME_PATTERN.fullmatch(entry.name)
            and entry.is_dir(follow_symlinks=False)
        )
    for name in runs[:MAX_RUNS]:
        try:
            directories = process_directories(local_dir / name)
            for path in directories:
                claim = _registered_claim(path, create=False)
                if claim is not None and claim.delete():
                    deleted.append(path)
                elif claim is None:
                    # Perhaps made by a process that died before it had a lock file.
                    _remove_empty(path)
            if directories:
                _remove_empty(local_dir / name)
        except OSError as error:
            failed.append(f"{local_dir / name}: {error.strerror}")
    return deleted, failed


def _remove_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as error:
        # Not empty: somebody lives in it, or it holds what is not ours. Gone: another deleter.
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
            raise


def _claim_new(path: Path) -> Claim | None:
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        path.mkdir(mode=files.DIRECTORY_MODE)
        return _registered_claim(path, create=True)
    return None


def _registered_claim(path: Path, *, create: bool) -> Claim | None:
    try:
        dir_fd = files.open_directory(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    status = os.fstat(dir_fd)
    key = (status.st_dev, status.st_ino)
    with _registry_lock:
        retired = _claims.get(key)
        if retired is not None and not retired.active:
            os.close(dir_fd)
            retired.active = True
            return retired
        try:
            lock_fd = _try_lock(OWNER_LOCK, dir_fd, fcntl.LOCK_EX, create=create)
        except OSError:
            os.close(dir_fd)
            raise
        if lock_fd is None or not _same_file(status, path):
            _close_all((dir_fd,) if lock_fd is None else (lock_fd, dir_fd))
            return None
        claim = Claim(path, dir_fd, lock_fd, key)
        _claims[key] = claim
    if create:
        os.close(files.open_regular(READER_LOCK, dir_fd, os.O_RDWR | os.O_CREAT))
    return claim


def _try_lock(name: str, dir_fd: int, kind: int, *, create: bool) -> int | None:
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    try:
        fd = files.open_regular(name, dir_fd, flags)
    except (FileNotFoundError, CorruptData):
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        current = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if os.path.samestat(os.fstat(fd), current):
            return fd
    except (BlockingIOError, FileNotFoundError):
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


def _delete_contents(dir_fd: int) -> None:
    names = os.listdir(dir_fd)
    for pattern in _DELETE_ORDER:
        for name in names:
            if pattern.fullmatch(name):
                files.remove(name, dir_fd)
    _delete_tree(HOST_STATE_DIRECTORY, dir_fd, (_HOST_STATE_SAVE, _HOST_STATE_FILE))
    _delete_tree(QUARANTINE_DIRECTORY, dir_fd, (_QUARANTINE_FILE,))


def _delete_tree(name: str, parent_fd: int, levels: Sequence[re.Pattern[str]]) -> None:
    try:
        dir_fd = files.open_directory(name, parent_fd=parent_fd)
    except OSError:
        return  # absent, or not ours: then the directory above stays too
    try:
        for entry in os.listdir(dir_fd):
            if not levels[0].fullmatch(entry):
                continue
            if len(levels) > 1:
                _delete_tree(entry, dir_fd, levels[1:])
            else:
                files.remove(entry, dir_fd)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent_fd)
    finally:
        os.close(dir_fd)
