"""The directories that earlier lives and other runs left on a ramdisk: waited for, listed, removed.

The run of a crashed job is restored from its directories. So a dead owner is no reason for removal:
a run is removed when the room is needed and the run is old, or when a person asks for it. Another
process may hold a directory of the same run's earlier life; a start waits for that process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from absl import logging

from emergency_ckpt import files
from emergency_ckpt.core.limits import MAX_RUNS, NAME_PATTERN
from emergency_ckpt.core.timeline import number_of
from emergency_ckpt.core.wording import few
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    LocalTierError,
    MemoryLimitReached,
    RamdiskFull,
)
from emergency_ckpt.ram import locks as claims
from emergency_ckpt.ram.locks import Claim, Holder, process_directories
from emergency_ckpt.ram.process_files import NUMBERS, ProcessFiles

GRACE_S = 86400.0
"""Time in seconds after its last change during which a run is kept."""
_MOST_ENTRIES = 10_000
"""Files of a process directory that are looked at for its age and size."""
_MOST_NAMED = 4

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LeftRun:
    """The directories of a run on one ramdisk.

    Attributes:
      changed_s: Unix time of the newest change in them.
      size_bytes: memory that they use.
      owner_uid: the user who owns them.
    """

    run_id: str
    directories: tuple[Path, ...]
    changed_s: float
    size_bytes: int
    owner_uid: int

    def age_s(self, now_s: float) -> float:
        return now_s - self.changed_s


def run_ids(local_dir: Path) -> list[str]:
    """Return the names of the runs on a ramdisk, sorted. OSError when it cannot be read."""
    with os.scandir(local_dir) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if NAME_PATTERN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )
    return names[:MAX_RUNS]


def left_runs(local_dir: Path, run_id: str | None = None) -> list[LeftRun]:
    """Return the runs of a ramdisk except ``run_id``, in the order of their last change.

    Includes those of live jobs; excludes those that this user cannot read. OSError when
    ``local_dir`` cannot be read.
    """
    runs: list[LeftRun] = []
    for name in run_ids(local_dir):
        if name == run_id:
            continue
        with contextlib.suppress(OSError):  # another user's
            runs.append(_inspect(local_dir / name))
    return sorted((run for run in runs if run.directories), key=lambda run: run.changed_s)


def holder_of(run: LeftRun) -> Holder | None:
    """Return a process that has a directory of the run locked, or None."""
    with _locked(run) as claims_or_holder:
        return claims_or_holder if isinstance(claims_or_holder, Holder) else None


def remove_run(run: LeftRun, *, although_served: bool = False) -> bool:
    """Delete a run's directories; return False, and delete none, when a process uses one.

    Removes only files that this package names. OSError when a file cannot be removed.
    ``although_served``: readers are no reason to keep the run; files.NotOwn when the run is another
    user's.
    """
    with _locked(run, own=although_served) as claims_or_holder:
        if isinstance(claims_or_holder, Holder):
            return False
        if not although_served and any(claim.is_served() for claim in claims_or_holder):
            return False
        gone = [claim.delete(although_served=although_served) for claim in claims_or_holder]
        parent = run.directories[0].parent
        for path in run.directories:
            # A process may have died before it made the lock file.
            claims.remove_empty(path)
        claims.remove_empty(parent)
        return bool(gone) and all(gone)


class OtherRuns:
    """The directories of other runs, which are removed when this run has no room otherwise.

    Args:
      grace_s: a run that changed within this number of seconds stays.
      on_removed: called with each removed run.
    """

    def __init__(
        self,
        local_dir: Path,
        run_id: str,
        grace_s: float = GRACE_S,
        on_removed: Callable[[LeftRun], None] = lambda _: None,
    ) -> None:
        self._local_dir = local_dir
        self._run_id = run_id
        self._grace_s = grace_s
        self._on_removed = on_removed

    def with_room(self, work: Callable[[], T]) -> T:
        """Call ``work``; while it raises RamdiskFull, remove an old run and call it again.

        RamdiskFull when no run may be removed. ``work`` must leave nothing when it fails. A memory
        limit of the job is no reason to remove a run: its pages count elsewhere.
        """
        while True:
            try:
                return work()
            except MemoryLimitReached:
                raise
            except RamdiskFull as error:
                if self.give_room():
                    continue
                explained = self._explained(error)
                if explained is None:
                    raise
                raise explained from error

    def give_room(self) -> bool:
        """Remove the unused run of this user with the oldest last change; True when one was."""
        now_s = time.time()
        for run in self._left():
            if run.owner_uid != os.geteuid():
                continue  # root could, but must not
            if run.age_s(now_s) < self._grace_s:
                return False
            with contextlib.suppress(OSError):  # try the next one
                if remove_run(run):
                    self._on_removed(run)
                    return True
        return False

    def _explained(self, error: RamdiskFull) -> RamdiskFull | None:
        """Return the error with a hint about the other runs, or None without other runs."""
        runs = self._left()
        if not runs:
            return None
        named = few((run.run_id for run in runs), _MOST_NAMED)
        taken = sum(run.size_bytes for run in runs)
        return RamdiskFull(
            error.operation,
            error.target,
            error.problem,
            expected=error.expected,
            actual=error.actual,
            hint=f"{error.hint}; other runs use {taken} bytes of it ({named}):"
            " 'eckpt doctor --clean' removes runs that are no longer wanted",
        )

    def _left(self) -> list[LeftRun]:
        try:
            return left_runs(self._local_dir, self._run_id)
        except OSError:
            return []


@contextlib.contextmanager
def _locked(run: LeftRun, *, own: bool = False) -> Generator[list[Claim] | Holder]:
    """Lock all directories of a run, or none and return the process that holds one."""
    locked: list[Claim] = []
    try:
        for path in run.directories:
            claim_or_holder = claims.claim_to_delete(path, own=own)
            if isinstance(claim_or_holder, Holder):
                yield claim_or_holder
                return
            if claim_or_holder is not None:
                locked.append(claim_or_holder)
        yield locked
    finally:
        for claim in locked:
            claim.release()


def _inspect(run_dir: Path) -> LeftRun:
    directories = tuple(claims.process_directories(run_dir))
    changed_s, size_bytes = 0.0, 0
    for directory in directories:
        # A process directory has slots, and host states in a folder for each save.
        for status in islice(_statuses(directory, depth=2), _MOST_ENTRIES):
            changed_s = max(changed_s, status.st_mtime)
            size_bytes += status.st_blocks * 512
    owner_uid = os.stat(run_dir, follow_symlinks=False).st_uid
    return LeftRun(run_dir.name, directories, changed_s, size_bytes, owner_uid)


def _statuses(directory: Path, *, depth: int) -> Iterator[os.stat_result]:
    """Yield the status of a directory, and of what lies there and up to ``depth`` folders below."""
    try:
        dir_fd = files.open_directory(directory)
    except OSError:
        return  # gone meanwhile
    with files.closing(dir_fd):
        yield os.fstat(dir_fd)
        for name in os.listdir(dir_fd)[:_MOST_ENTRIES]:
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    yield status
                elif depth:
                    yield from _statuses(directory / name, depth=depth - 1)


SETTLE_S = 5.0
"""Time for the writer of an invalid record to replace it, in seconds."""
_INSPECTION_S = 0.05
_READS = (
    "A job that only reads, beside the one that saves, has local_save_every=0 and save_every=0, or"
    " read_only=True in Orbax's options"
)


def claim_or_wait(claim: Callable[[bool], T | Holder], run_id: str, wait_s: float) -> T:
    """Repeat ``claim`` until no process of another start holds the directory; return its result.

    ``claim`` is told whether ``SETTLE_S`` is over: its ``is_settled``.

    Raises:
      LocalTierError: the holder is this process, or still holds it after ``wait_s`` seconds. The
        error names the process, its host and the newest step that it holds.
    """
    begun_s = time.monotonic()
    has_warned = False
    while True:
        waited_s = time.monotonic() - begun_s
        result = claim(waited_s >= SETTLE_S)
        if not isinstance(result, Holder):
            return result
        limit_s = wait_s if result.is_certain else max(wait_s, SETTLE_S)
        if result.is_this_process or waited_s >= limit_s:
            raise _error(result, run_id, waited_s)
        if result.is_certain and not has_warned:
            has_warned = True
            logging.warning(
                "waiting up to %.3g s for an earlier life of run %r to end: %s holds %s. %s",
                limit_s,
                run_id,
                result.describe(),
                result.path,
                _READS,
            )
        time.sleep(_INSPECTION_S)


def _error(holder: Holder, run_id: str, waited_s: float) -> LocalTierError:
    if holder.is_this_process:
        return LocalTierError(
            "start",
            f"run {run_id!r} in {holder.path}",
            f"this process has a checkpointer of that run already ({holder.describe()})",
            hint=f"stop or close it first. {_READS}",
        )
    step = _newest_step(holder)
    newest_text = "no step" if step is None else f"step {step}"
    return LocalTierError(
        "start",
        f"run {run_id!r} in {holder.path}",
        f"an earlier life of the run is not over: {holder.describe()} holds the directory, with"
        f" {newest_text}, after {waited_s:.3g} s",
        hint=f"end that process; a start waits for it for most of twice stall_timeout_s. {_READS}",
    )


def greatest_number(run_dir: Path) -> int:
    """Return the greatest number of a life on record in any directory of a run on this ramdisk."""
    numbers = [0]
    for path in process_directories(run_dir):
        with contextlib.suppress(OSError, CorruptData), ProcessFiles.opened(path) as place:
            numbers.append(number_of(place.ledger().incarnation))
    return max(numbers)


def _newest_step(holder: Holder) -> int | None:
    """Return the newest step in another process's directory, or None when none can be read."""
    steps: list[int] = []
    with contextlib.suppress(OSError), ProcessFiles.opened(holder.path) as place:
        for number in NUMBERS:
            with contextlib.suppress(CheckpointError):
                published = place.manifest(number)
                steps += [published.save.step] if published else []
        with contextlib.suppress(CheckpointError):
            complete = place.ledger().complete
            steps += [complete.step] if complete else []
    return max(steps, default=None)
