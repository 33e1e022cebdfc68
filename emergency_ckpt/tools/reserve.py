"""The pages of a slot, made ahead of the process that needs them, while it starts.

A host that lost its ramdisk must make a new page for each that it fetches, which takes longer than
the transfer itself. The pages made here are those of an ordinary slot without a manifest: the
process that claims the directory takes it as one that an earlier life left. It may do so at any
time, and a maker may be killed at any time: the slot is then as long as it had become. The maker
only appends zeros: the kernel finds the end of the file as it writes, so no byte is changed that
the owner has, or has made room for. The maker stops when its temporary file is gone, which the next
owner of the directory removes as it does with all.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from emergency_ckpt import files
from emergency_ckpt.core.limits import SMALL_FILES_BYTES
from emergency_ckpt.ram.host_memory import new_pages_fit
from emergency_ckpt.ram.locks import Claim, claim_existing, process_directories
from emergency_ckpt.ram.other_runs import left_runs
from emergency_ckpt.ram.ownership import ensure_run_directory

_SLOT = re.compile(r"slot_\d{1,2}\.bin")
_FIRST_SLOT = "slot_0.bin"
_MARK = "reserve"
_PIECE_BYTES = 8 << 20
"""The owner that takes the slot over waits for no more than this, and gets no more behind it."""
_ZEROS = bytes(256 << 10)  # stays in the cache


def slot_sizes(local_dir: Path) -> dict[str, tuple[float, int]]:
    """Return, for each run with slots: (Unix time of its last change, bytes of its largest slot).

    Empty when there is no such directory.
    """
    try:
        runs = left_runs(local_dir)
    except OSError:
        return {}
    sizes = {run.run_id: max(chain(*map(_slots, run.directories)), default=0) for run in runs}
    return {run.run_id: (run.changed_s, sizes[run.run_id]) for run in runs if sizes[run.run_id]}


def reserve_slot(
    local_dir: Path,
    run_id: str,
    process_index: int,
    size_bytes: int,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Make the pages of one slot for a process of this host that has none; return their bytes.

    Returns 0, and makes none, when the process's directory has a slot or an owner, or the ramdisk
    has no room: nothing is removed for it. Ends early when the directory gets an owner, and when
    ``stopped`` returns True, which is asked after every few milliseconds. Blocks for about half a
    second per GiB.

    Raises:
      OSError: the directory cannot be made or used; no slot is left then. NotOwn: it is another
        user's.
    """
    path = local_dir / run_id / f"process_{process_index:05d}"
    ensure_run_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=files.DIRECTORY_MODE)
    claim = claim_existing(path, f"reserve {os.getpid()}")
    if not isinstance(claim, Claim):
        return 0
    pages = (size_bytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    try:
        new_bytes = size_bytes + SMALL_FILES_BYTES
        has_room = files.free_bytes(claim.dir_fd) >= new_bytes
        has_room = has_room and new_pages_fit(path, new_bytes)[0]
        if _slots(path) or not has_room:
            return 0
        made = _Pages(claim.dir_fd)
    finally:
        claim.release()
    try:
        return made.make(pages * mmap.PAGESIZE, stopped)
    except OSError:
        _remove_unused(path, made)
        raise
    finally:
        made.close()


def has_slots(local_dir: Path, run_id: str) -> bool:
    """Return True when a process directory of the run has a slot: this host lost nothing.

    One whose maker is at work, or was killed, does not count: the others are still to be made.
    """
    paths = process_directories(local_dir / run_id)
    return any(_slots(path) and not _has_mark(path) for path in paths)


class _Pages:
    """A new slot's file, and the temporary file that says that nobody has taken it over."""

    def __init__(self, dir_fd: int) -> None:
        """``dir_fd``: of a claimed directory without slots; it is not kept."""
        with contextlib.ExitStack() as undone:
            self._dir_fd = os.dup(dir_fd)
            undone.callback(os.close, self._dir_fd)
            # First, because it may find no room; without a slot it is an ordinary leftover.
            self._mark = files.write_temporary(_MARK, self._dir_fd, b"")
            undone.callback(files.remove, self._mark, self._dir_fd)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._fd = files.open_regular(_FIRST_SLOT, self._dir_fd, flags)
            undone.pop_all()

    def make(self, size_bytes: int, stopped: Callable[[], bool]) -> int:
        done = 0
        while done < size_bytes and self.is_unused() and not stopped():
            # In two thirds of the time of reserving the pages and clearing them in a mapping.
            done += os.writev(self._fd, _zeros(min(_PIECE_BYTES, size_bytes - done)))
        return done

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            files.remove(self._mark, self._dir_fd)
        os.close(self._fd)
        os.close(self._dir_fd)

    def is_unused(self) -> bool:
        """Return True until an owner has claimed the directory, or somebody has removed it."""
        try:
            os.stat(self._mark, dir_fd=self._dir_fd, follow_symlinks=False)
        except OSError:
            return False
        return True


def _zeros(nbytes: int) -> list[bytes]:
    """Return buffers of ``nbytes`` zeros in all."""
    whole, rest = divmod(nbytes, len(_ZEROS))
    return [_ZEROS] * whole + [_ZEROS[:rest]]


def _remove_unused(path: Path, made: _Pages) -> None:
    """Remove the slot, for which the room has run out, unless the directory has or had an owner.

    One that has ended may have left a step in the slot.
    """
    claim = claim_existing(path, f"reserve {os.getpid()}")
    if isinstance(claim, Claim):
        try:
            if made.is_unused():
                files.remove(_FIRST_SLOT, claim.dir_fd)
        finally:
            claim.release()


def _has_mark(directory: Path) -> bool:
    """Return True when a maker has left its temporary file there, and no owner has come since."""
    with contextlib.suppress(OSError):
        return any(
            name.startswith(files.TEMPORARY_PREFIX) and name.endswith(f"-{_MARK}")
            for name in os.listdir(directory)
        )
    return False


def _slots(directory: Path) -> list[int]:
    """Return the sizes in bytes of the slots in a process directory."""
    sizes: list[int] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _SLOT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                sizes.append(entry.stat(follow_symlinks=False).st_size)
    return sizes
