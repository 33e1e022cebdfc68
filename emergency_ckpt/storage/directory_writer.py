"""Changes of a persistent directory: its claim, a step's place, its publication, its removal.

Each change of the steps that count is one new version of the log. Files are hidden or deleted after
the version that excludes them, and by the table alone, so a crash at any instant leaves work that
the next life repeats.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from absl import logging

from emergency_ckpt.core.shard_layout import state_size_bytes
from emergency_ckpt.core.step_log import (
    Entry,
    LogWriter,
    Table,
    begun,
    decide_claim,
    following,
    given_to,
    greatest_number,
    in_state,
    listing,
    reserved,
    with_lives,
    without,
    without_lives,
)
from emergency_ckpt.core.step_names import (
    COMMITTED,
    OWN_TEMPORARY,
    STEP_METADATA,
    TEMPORARY_SUFFIX,
    commits_of,
    folders_of,
    is_name_of,
    steps_by_kind,
)
from emergency_ckpt.core.timeline import Timeline, life_of, number_of
from emergency_ckpt.errors import DirectoryInUse, PersistentTierError, StorageLost
from emergency_ckpt.events import EventSink
from emergency_ckpt.storage.directory import Generations, StorageDirectory, written_for
from emergency_ckpt.storage.inspection import FoundStep, items_of
from emergency_ckpt.storage.log import LogRead, StepLog
from emergency_ckpt.storage.marker import HOST_STATE
from emergency_ckpt.storage.pinned import Pinned
from emergency_ckpt.storage.step_folders import INSPECTED_AT_ONCE, StepFolders
from emergency_ckpt.storage.steps import StoredSteps, StoredView
from emergency_ckpt.types import SaveId

_ATTEMPTS = 8
_MANY_WRITERS = "other writers write there at the same time"
_REMOVED = f"{TEMPORARY_SUFFIX}-removed"


class _Overtaken(PersistentTierError):
    """Another writer of this life has written between a look and a change."""


class _Crowded(PersistentTierError):
    """Other writers came first again and again."""


class DirectoryWriter:
    """Writes the log of one directory and hides or removes its steps. Thread-safe; blocks.

    For one process of a job. All methods raise PersistentTierError, which is DirectoryInUse when
    another run saves there, or a newer life of this run. ``run_id``, ``from_dir``, ``writer``: as
    in ``Table``. ``emit``: gets the events; None: the events are only logged.
    """

    def __init__(
        self,
        storage: StorageDirectory,
        stored: StoredSteps,
        *,
        run_id: str,
        from_dir: bool,
        writer: str = "",
        emit: Callable[..., object] | None = None,
    ) -> None:
        self._storage = storage
        self._directory = storage.path
        self._found = stored
        self._log: StepLog = stored.log
        self._mine = LogWriter(run_id, from_dir, "", writer)
        self._emit = emit or EventSink(process_index=0).emit
        self._lock = threading.RLock()
        self._removed = threading.Condition(self._lock)
        self._removing: set[int] = set()
        self._read = LogRead()
        self._is_held = False
        self._has_begun = False
        self._is_lost = False
        self._dirty: set[int] = set()
        self._stuck: set[int] = set()  # steps that this life cannot clear: the next life tries
        self._damaged: set[int] = set()  # unlisted steps that stay until their numbers are saved

    # The claim.

    @property
    def table(self) -> Table | None:
        """Return the version that this writer read or wrote last; do not wait for changes."""
        return self._read.table

    @property
    def run_id(self) -> str:
        """Return the run whose writer this is."""
        return self._mine.run_id

    @property
    def has_seen(self) -> bool:
        """Return whether this life has seen a version: then the directory exists, or was lost."""
        return self._log.seen.number > 0

    def find(self, deadline_s: float | None = None) -> LogRead:
        """Read and return the log; write nothing. DirectoryInUse when another run is on record."""
        with self._lock:
            self._refresh(deadline_s)
            table = self._read.table
            if table is not None:
                self._decide(table, self._mine._replace(incarnation=table.incarnation))
            return self._read

    def known(self, deadline_s: float | None = None) -> tuple[int, int]:
        """Return the greatest incarnation on record, and the newest step; (0, -1) without any.

        Both come from the log that ``find`` read. Where the log names no complete step, as when
        another program has removed the log, they come from the newest markers, else from the steps
        that the first save adopts.
        """
        with self._lock:
            table = self._read.table
            if table is not None and (counting := table.counting()):
                return greatest_number(table), counting[-1].step
            marked = self._newest_marked(deadline_s)
            numbers = [number_of(step.incarnation) for step in marked]
            newest = marked[0].step if marked else self._newest_plain(deadline_s)
            return max(greatest_number(table), *numbers, 0), newest

    def hold(self, incarnation: str, deadline_s: float | None = None) -> None:
        """Make sure, as each change must, that the newest version names ``incarnation``.

        One request, as long as no other writer writes there.
        """
        with self._lock:
            mine = self._mine._replace(incarnation=life_of(incarnation))
            if mine != self._mine:
                self._mine, self._is_held, self._has_begun = mine, False, False
            if self._is_held and self._log.is_newest(self._read.number, deadline_s):
                return
            self._refresh(deadline_s)
            if self._decide(self._read.table, mine) == "write":
                self._append(lambda table: table, deadline_s)
            self._is_held = True

    def check(self) -> None:
        """Before a commit: raise DirectoryInUse when another writer has come since ``hold``."""
        with self._lock:
            self.hold(self._mine.incarnation)

    def adopt(self, run_id: str | None = None) -> list[Entry]:
        """List the complete steps of other programs that no entry names; return their entries.

        The call makes no claim. Nothing is listed where the log names no step: the first save
        adopts all existing steps. A step that a job saves meanwhile stays as it is. ``run_id``: the
        run to which the directory belongs from then on, and no more to the run on record.
        """
        with self._lock:
            self.find()
            seen = self._read.table
            if seen is None:
                return []
            view = self._found.view(log=self._read)
            stored_steps = self._found.inspect_all(view, view.steps)
            entries = [self._entry_for(s) for s in stored_steps if s and s.step.is_foreign]

            def change(table: Table) -> Table:
                new = (e for e in entries if table.of(e.step) == seen.of(e.step))
                return given_to(listing(table, *new), run_id)

            self._append_beside(change)
            return [e for e in entries if self._entry_of(e.step) == e]

    def enter(self, incarnation: str, deadline_s: float) -> None:
        """At a start, reserve the number of ``incarnation``; claim a directory without a run."""
        with self._lock:
            if self._read.table is None:
                self.hold(incarnation, deadline_s)
                return
            # A start does not fail because many other writers came first.
            with contextlib.suppress(_Crowded):
                self._append_beside(lambda table: reserved(table, incarnation), deadline_s)

    def note_lives(self, step: int, incarnation: str, lives: int) -> None:
        """Record, without a claim, how many lives in a row began from a step that the log lists."""
        with self._lock:
            self.find()
            self._append_beside(lambda table: with_lives(table, lives, step, incarnation))

    def _append_beside(
        self, change: Callable[[Table], Table], deadline_s: float | None = None
    ) -> None:
        """Write the next version with ``change``, beside a writer with a claim, which may go on.

        Nothing is written where nothing is changed, or no run has a claim.
        """
        for _ in range(_ATTEMPTS):
            before = self._read.table
            table = None if before is None else change(before)
            if table is None or table == before or self._append_once(table, deadline_s):
                return
        raise _Crowded("write", self._log.target, _MANY_WRITERS)

    def _append(self, change: Callable[[Table], Table], deadline_s: float | None = None) -> None:
        """Write the next version with ``change``, after the versions that others have written."""
        for _ in range(_ATTEMPTS):
            self._decide(self._read.table, self._mine)  # another thread may have read a newer claim
            if self._append_once(change(begun(self._read.table, self._mine)), deadline_s):
                return
        raise _Crowded("write", self._log.target, _MANY_WRITERS)

    def _append_once(self, table: Table, deadline_s: float | None) -> bool:
        """Write ``table`` as the next version. If another writer came first, read the log again."""
        before = self._read
        table = msgspec.structs.replace(table, number=before.number + 1)
        written = self._log.append(table, deadline_s)
        if written is None:
            self._refresh(deadline_s)
            return False
        self._read = written
        try:
            self._log.remove_old(written, before, deadline_s)
        except PersistentTierError as error:
            # Older versions are ignored, and the next life removes them.
            logging.warning("an older version of the step log stays: %s", error)
        return True

    def _objects(self, step: int, *prefixes: str) -> Generations:
        """Return the objects of a bucket with these names that a change of ``step`` may touch.

        The log is read after the objects were listed. A newer life puts itself on record before it
        writes, so none of these objects is of its saves, and its later objects have other
        generations. Once a newer life is on record, the change ends with an error.
        """
        target = f"/{prefixes[0].rstrip('/')}"
        objects = self._storage.do(
            "list", target, lambda: self._storage.objects_with(*prefixes), changes=step
        )
        if objects:
            self._look_again(target)
        return objects

    def _pinned(self, step: int, *names: str, temporary_of: Collection[str] = ()) -> Pinned:
        """Return the entries of a file system that a change of ``step`` may touch, as ``_objects``.

        ``temporary_of``: names of steps whose temporary folders are in the result too.
        """

        def pin() -> Pinned:
            pinned_names = dict.fromkeys(names)
            for name in temporary_of:
                pinned_names |= dict.fromkeys(temporary_folders(self._storage, name))
            return Pinned(self._directory, pinned_names)

        pinned = self._storage.do("inspect", f"/{names[0]}", pin, changes=step)
        if pinned.names:
            self._look_again(f"/{names[0]}")
        return pinned

    def _look_again(self, target: str) -> None:
        """End with an error, as ``hold`` does, when another writer has come."""
        with self._lock:
            if not (self._is_held and self._log.is_newest(self._read.number)):
                self._refresh(None)
                if self._decide(self._read.table, self._mine) != "hold":
                    self._is_held = False
                    problem = "another writer of this life has come, which may have changed it"
                    raise _Overtaken("change", f"{self._directory}{target}", problem)

    def _refresh(self, deadline_s: float | None) -> None:
        try:
            self._read = self._log.read(deadline_s)
        except StorageLost as error:
            if not self._is_lost:
                self._emit("persistent.problem", cause="log_lost", reason=str(error)[:500])
            self._is_lost = True
            raise
        self._is_lost = False
        for fault in self._read.faults:
            self._emit("persistent.problem", cause="log_damaged", reason=str(fault)[:500])
        if self._read.faults and self._read.table is None:
            self._read = self._read._replace(table=self._by_markers(deadline_s))

    def _by_markers(self, deadline_s: float | None) -> Table | None:
        """Return a table from the newest marker, so that no other run begins there; None without.

        For a log of which no version can be used.
        """
        marked = self._newest_marked(deadline_s)
        if not marked:
            return None
        save, greatest = marked[0], max(number_of(step.incarnation) for step in marked)
        life = life_of(save.incarnation)
        return Table(self._read.number, save.run_id, False, life, greatest=greatest)

    def _newest_marked(self, deadline_s: float | None) -> list[SaveId]:
        """Return the saves of the newest markers that count, the newest step first."""
        numbers = sorted(self._storage.numbers_in(HOST_STATE, deadline_s), reverse=True)
        inspection = self._found.inspection(deadline_s=deadline_s)
        with ThreadPoolExecutor(INSPECTED_AT_ONCE, "eckpt-markers") as pool:
            saves = list(pool.map(inspection.marked, numbers[:INSPECTED_AT_ONCE]))
        return [save for save in saves if save is not None]

    def _newest_plain(self, deadline_s: float | None) -> int:
        """Return the newest complete step that the first save adopts; -1 without any."""
        if self._entries():
            return -1
        names = self._storage.names_in(deadline_s=deadline_s)
        folders = StepFolders(self._storage, deadline_s).steps(names, ())
        for step in sorted(folders, reverse=True):
            if self._unlisted(step, folders[step], deadline_s) is not None:
                return step
        return -1

    def _decide(self, there: Table | None, mine: LogWriter) -> str:
        what, reason = decide_claim(there, mine, held=self._is_held)
        if what == "refuse":
            self._is_held = False
            raise DirectoryInUse(
                "save in",
                str(self._directory),
                reason,
                hint="give this job its own dir, or set save_every=0 to only read there; if"
                " no other job saves there, restart this one, after 'eckpt doctor --adopt --dir'"
                " with this directory and '--run-id' with this run where it belongs to another",
            )
        return what

    # The first change of a life.

    def begin(self, incarnation: str, chain: Timeline | None = None) -> None:
        """Claim the directory and clear the remains of earlier lives; later calls only ``hold``.

        Lists steps that count and have no entry, completes the changes that the table records, and
        removes the remains of saves that did not end. No process may be saving. ``chain``: a new
        binding chain.
        """
        with self._lock:
            self.hold(incarnation)
            if self._has_begun:
                self._clear_failed()
                if chain is not None:
                    self._follow(chain)
                return
            self._has_begun = True
            try:
                self._begin(chain)
            except BaseException:
                self._has_begun = False
                raise

    def _begin(self, chain: Timeline | None) -> None:
        deadline_s = self._storage.deadline_s(None)
        view = self._found.view(deadline_s, self._read)
        beside = self._storage.numbers_in(HOST_STATE, deadline_s)
        new_entries, unfinished = self._sort(view, deadline_s)
        gone = [
            entry
            for item in view.steps
            if item.is_seen and item.problem and (entry := view.entry(item.step, item.incarnation))
        ]

        def change(table: Table) -> Table:
            remaining = without(table, gone)
            return following(
                listing(remaining, *(e for e in new_entries if remaining.of(e.step) is None)), chain
            )

        for entry in new_entries:  # before they are listed: a crash here repeats this
            if not entry.is_plain:
                self._tidy(entry.step, functools.partial(self._clear_second_names, entry.step))
        table = self._read.table
        if table is None or change(table) != table:
            self._append(change)
        for entry in gone:
            reason = f"another program has removed it from {self._directory}"
            self._tell_removal("missing", entry.step, reason=reason)
        listed_steps = {entry.step for entry in self._entries()}
        # A folder of plain Orbax alone may be of a save under way. A folder of this package is of a
        # life that claimed the place late, after a newer life had cleared the host states.
        began = self._found.inspection(deadline_s=deadline_s).is_begun_by_us
        remains = {
            step
            for step in unfinished - listed_steps
            if step in beside or began(view.unlisted.get(step, ()))
        }
        remains |= {entry.step for entry in gone} - listed_steps
        # A listing of a file server may lack the folder of a step.
        lone = beside - listed_steps - view.unlisted.keys()
        remains |= {s for s in lone if not self._has_file(str(s), self._storage.name_of(s))}
        for step in sorted(remains):
            if self._storage.is_changing(step):
                self._has_begun = False  # a call that was given up: the next save tries again
                continue
            if self._tidy(step, lambda step=step: self._clear(step)) is None:
                self._tell_removal("removed", step)
        self._finish_removal(self._failed_removals())
        self._clear_temporary()
        self._hide_excluded()

    def _clear_temporary(self) -> None:
        """Remove the temporary folders of this package's saves that did not end.

        Such a folder may be beside a step that counts in another folder. Or the folder has no host
        states: a stalled life may write the folder after a newer life has cleared the place.
        """
        if self._storage.is_object_store:
            return
        for name in sorted(self._storage.names_in()):
            step_name, is_own, _ = name.partition(OWN_TEMPORARY)
            numbers = list(folders_of(steps_by_kind([step_name])))
            if is_own and numbers and not self._storage.is_changing(numbers[0]):
                clear = functools.partial(self._clear_entry, numbers[0], name)
                self._tidy(numbers[0], clear)

    def _clear_second_names(self, step: int) -> None:
        """Remove the temporary names of a complete step's small files.

        A writer leaves such a name if it is killed between its link to the file and the removal.
        """
        documents = f"{HOST_STATE}/{step}"
        if not self._storage.is_object_store:
            for name in filter(written_for, self._storage.names_in(documents)):
                self._clear_entry(step, f"{documents}/{name}")

    def _clear_entry(self, step: int, name: str) -> None:
        work = functools.partial(self._pinned(step, name).clear, name)
        self._storage.do("remove", f"/{name}", work, changes=step)

    def _tidy(self, step: int, work: Callable[[], object]) -> PersistentTierError | None:
        """Do a part of the clean-up for ``step``; return its error, which makes no save fail.

        Raises only the errors that forbid this life to write.
        """
        try:
            work()
        except (DirectoryInUse, StorageLost, _Overtaken):
            raise
        except PersistentTierError as error:
            self._tell_removal("failed", step, reason=str(error)[:500])
            if not error.retryable:
                self._stuck.add(step)
            return error
        self._stuck.discard(step)
        return None

    def _clear_failed(self) -> None:
        """Remove the remains of this life's failed saves."""
        for step in sorted(self._dirty - self._stuck):
            clear = functools.partial(self._clear_unless_taken, step)
            if not self._storage.is_changing(step) and self._tidy(step, clear) is None:
                self._dirty.discard(step)

    def _clear_unless_taken(self, step: int) -> None:
        """Remove the remains of a save; if the save has its marker, list the step instead."""
        if self._entry_of(step) is not None:
            return
        stored_step = self._unlisted(step)
        if stored_step is not None and stored_step.marker is not None:
            self._append(lambda table: listing(table, self._entry_for(stored_step)))
            return
        self._clear(step)
        self._tell_removal("removed", step)

    def _unlisted(
        self, step: int, names: Sequence[str] = (), deadline_s: float | None = None
    ) -> FoundStep | None:
        """Return the complete step that no entry names, in the folders ``names`` or its own."""
        number, names = greatest_number(self._read.table), names or (self._storage.name_of(step),)
        stored_step = self._found.inspection(number, deadline_s).unlisted(step, names)
        return None if stored_step is None or stored_step.step.problem else stored_step

    def _has_file(self, *names: str) -> bool:
        """Return whether a file system has one of ``names``; False for a bucket."""
        return not self._storage.is_object_store and any(map(self._storage.lexists, names))

    def _entry_of(self, step: int) -> Entry | None:
        return None if self._read.table is None else self._read.table.of(step)

    def _entries(self) -> tuple[Entry, ...]:
        return () if self._read.table is None else self._read.table.steps

    def _sort(self, view: StoredView, deadline_s: float) -> tuple[list[Entry], set[int]]:
        """Return entries for steps that the table lacks, and the steps of unfinished saves."""
        entries: list[Entry] = []
        garbage: set[int] = set()
        unseen = [item for item in view.steps if not item.is_seen]
        answers = self._found.inspect_all(view, unseen, deadline_s)
        for item, stored_step in zip(unseen, answers, strict=True):
            if stored_step is None:
                garbage.add(item.step)
            elif stored_step.step.problem and not stored_step.is_junk:
                self._damaged.add(item.step)
            elif not stored_step.is_junk:
                entries.append(self._entry_for(stored_step))
        return entries, garbage

    @staticmethod
    def _entry_for(stored_step: FoundStep) -> Entry:
        step, marker, name = stored_step.step, stored_step.marker, stored_step.folder
        return Entry(
            step=step.step,
            incarnation=step.incarnation,
            marker=stored_step.marker_digest,
            processes=step.process_count,
            stateful=step.has_host_state,
            saved_s=stored_step.committed_ns / 1e9,
            metrics=stored_step.metrics,
            folder="" if name == str(step.step) else name,
            size_bytes=0 if marker is None else state_size_bytes(marker.leaves),
        )

    # A step's place.

    def make_room(
        self, step: int, chain: Timeline | None = None, left_by: Timeline | None = None
    ) -> None:
        """Clear the place of ``step`` for a save, after ``begin``.

        Where ``chain`` excludes the step at this place, ``chain`` is put on record first. A step of
        this number that does not count, or cannot be used, is removed. PersistentTierError, for
        this save alone, where a step of this number counts, where a complete step is not in the
        log, where a file system has files of another program, or where files cannot be removed.
        ``left_by``: a chain that is not on record yet; the step at this place cannot be used if
        this chain excludes the step.
        """
        with self._lock:
            while step in self._removing:
                self._removed.wait()
            if self._may_have_files(step):
                self.check()  # ``begin`` may have been long ago
                self._vacate(step, chain, left_by)
            self._dirty.add(step)

    def _may_have_files(self, step: int) -> bool:
        if step in self._dirty | self._damaged or self._entry_of(step) is not None:
            return True
        if self._storage.is_changing(step):
            return True
        # In a bucket the claim of the place has a precondition, and fails if another writer has it.
        return self._has_file(self._storage.name_of(step), f"{HOST_STATE}/{step}")

    def _vacate(self, step: int, chain: Timeline | None, left_by: Timeline | None) -> None:
        entry, target = self._entry_of(step), f"{self._directory}/{step}"
        if entry is not None:
            is_complete = entry.state == "complete"
            if is_complete and chain and chain.rejection_reason(step, entry.incarnation):
                self._follow(chain)
                entry = self._entry_of(step) or entry
            is_left = left_by and left_by.rejection_reason(step, entry.incarnation)
            if not is_left and self._is_needed(entry):
                problem = f"the step of {entry.incarnation} there has the same number, and counts"
                hint = "saves of other numbers go on; restore before the first save, to continue"
                raise PersistentTierError("save", target, problem, hint=hint)
            text = "step %d of %s is removed from %s: the job went on without it, and saves it anew"
            logging.warning(text, step, entry.incarnation, self._directory)
            self._remove([entry])
        if self._unlisted(step) is not None:
            problem = "a complete step that the step log does not name is in its place"
            hint = "move it elsewhere, or take it in with 'eckpt doctor --adopt'"
            raise PersistentTierError("save", target, problem, hint=hint)
        name = self._storage.name_of(step)
        if self._has_file(name) and not self._found.inspection().is_of_a_save(name):
            target, problem = (
                f"{self._directory}/{name}",
                "this package did not write what is there",
            )
            hint = "move it elsewhere: a folder named like a step may contain only that step"
            raise PersistentTierError("save", target, problem, hint=hint)
        self._clear(step)

    def _is_needed(self, entry: Entry) -> bool:
        """Return whether a step counts by the log, and has all that its save stored."""
        table = self._read.table
        if entry.state != "complete" or table is None or table.rejection_reason(entry):
            return False
        stored_step = self._found.inspection(greatest_number(table)).listed(entry)
        is_whole = entry.is_plain or stored_step.marker is not None
        return is_whole and not stored_step.step.problem

    def has(self, save: SaveId) -> bool:
        """Return whether the log has ``save`` itself as complete, and its files are not damaged."""
        with self._lock:
            entry = self._entry_of(save.step)
            if entry is None or entry.incarnation != save.incarnation:
                return False
            return self._is_needed(entry)

    # Publication.

    def publish(self, entry: Entry, chain: Timeline | None) -> None:
        """List ``entry``, whose files are complete: now its step counts, and ``chain`` binds.

        Steps that ``chain`` excludes do not count from now on; ``settle`` hides them.
        """
        with self._lock:
            self._append(lambda table: following(listing(without_lives(table), entry), chain))
            self._dirty.discard(entry.step)
            self._emit("persistent.stage", stage="published", step=entry.step)

    def _follow(self, chain: Timeline) -> None:
        table = self._read.table
        if table is not None and following(table, chain) != table:
            self._append(lambda table: following(table, chain))
        self._hide_excluded()

    def try_to_settle(self) -> None:
        """Settle after a publication, whose step counts in any case: a failure is logged.

        A later save or the next life hides the steps, and a later save raises an error that forbids
        this life to write.
        """
        try:
            self.settle()
        except PersistentTierError as error:
            logging.warning("rolled-back steps are not hidden yet: %s", error)

    def settle(self) -> None:
        """Hide the steps that the chain excludes."""
        with self._lock:
            self._hide_excluded()

    def _hide_excluded(self) -> None:
        """Hide excluded steps, then record that, so that a recorded step needs no further look."""
        table = self._read.table
        if table is None:
            return
        hidden: list[Entry] = []
        for entry in table.left():
            hide = functools.partial(self._hide, entry)
            if entry.step not in self._stuck and self._tidy(entry.step, hide) is None:
                hidden.append(entry)
        if not hidden:
            return
        self._append(lambda table: listing(table, *in_state("hidden", hidden)))
        for entry in hidden:
            folder, reason = self._hidden_folder(entry), table.rejection_reason(entry)
            self._tell_removal("hidden", entry.step, kept_as=folder, reason=reason)

    def _hidden_folder(self, entry: Entry) -> str:
        return entry.own_folder if self._storage.is_object_store else entry.hidden_folder

    def _hide(self, entry: Entry) -> None:
        """Hide a step from Orbax, and keep its bytes. Idempotent.

        A file system renames the folder. A bucket has no renames: the files of Orbax's commit go.
        """
        if not self._found.inspection().is_in_own_folder(entry):
            return  # hidden before
        storage, own, work = self._storage, entry.own_folder, ("hide", f"/{entry.own_folder}")
        if storage.is_object_store:
            names = commits_of(items_of(storage.bytes_of(f"{own}/{STEP_METADATA}")))
            commits = self._objects(entry.step, *(f"{own}/{name}" for name in names))
            storage.do(*work, lambda: delete_step(storage, commits), changes=entry.step)
            return
        pinned = self._pinned(entry.step, own)

        def move() -> None:
            if not storage.lexists(entry.hidden_folder):
                pinned.move(own, entry.hidden_folder)

        storage.do(*work, move, changes=entry.step)

    # Removal.

    def remove(self, steps: Collection[int], incarnation: str) -> None:
        """Remove ``steps``, under any name.

        1. A version records that the steps are being removed: they no longer count. If one of them
           has no entry, this version lists all steps that count without an entry, as ``begin``
           does: beside an entry, no step of plain Orbax counts without one.
        2. Orbax's commit is deleted, so that plain Orbax ignores the step, then all other files.
        3. A version leaves the entries out.
        """
        with self._lock:
            self.hold(incarnation)
            entries = [e for s in steps if (e := self._entry_of(s)) is not None]
            unlisted: list[Entry] = []
            if missing := set(steps) - {e.step for e in entries}:
                deadline_s = self._storage.deadline_s(None)
                view = self._found.view(deadline_s, self._read)
                if missing & view.unlisted.keys():
                    unlisted, _ = self._sort(view, deadline_s)
                entries += [e for e in unlisted if e.step in missing]
            going = [e for e in entries if e.state != "hidden"]
            self._remove(going, unlisted, beside=self._failed_removals())

    def retire(self, step: int) -> None:
        """Remove a listed ``step`` as ``remove`` does, but without an error for files that stay.

        For the life that has saved last through this writer.
        """
        with self._lock:
            self.check()
            if (entry := self._entry_of(step)) is not None and entry.state != "hidden":
                self._remove_listed([entry, *self._failed_removals()])

    def remove_hidden(self, saves: Collection[tuple[int, str]], incarnation: str) -> set[int]:
        """Remove hidden steps for good, as a user asks; return those that were removed.

        ``saves``: (step, incarnation) of each. Another save of the same step stays, and so does a
        step that is not hidden any more.
        """
        with self._lock:
            self.hold(incarnation)
            hidden = [entry for entry in self._entries() if entry.state == "hidden"]
            going = [entry for entry in hidden if (entry.step, entry.incarnation) in saves]
            self._remove(going)
            return {entry.step for entry in going}

    def _remove(
        self,
        entries: Sequence[Entry],
        unlisted: Sequence[Entry] = (),
        beside: Sequence[Entry] = (),
    ) -> None:
        """Remove all ``entries``, or raise the error of the first entry that cannot be deleted.

        ``beside``: other entries to remove, without an error for files that stay.
        """
        errors = self._remove_listed((*entries, *beside), unlisted) if entries else {}
        for entry in entries:
            if entry.step in errors:
                raise errors[entry.step]

    def _failed_removals(self) -> list[Entry]:
        """Return the entries whose deletion did not end, and may succeed now.

        No other removal waits for a call that was given up and may still end.
        """
        removing = (entry for entry in self._entries() if entry.state == "removing")
        return [
            entry
            for entry in removing
            if entry.step not in self._stuck and not self._storage.is_changing(entry.step)
        ]

    def _remove_listed(
        self, entries: Sequence[Entry], unlisted: Sequence[Entry] = ()
    ) -> dict[int, PersistentTierError]:
        """Remove ``entries``; return, by step, the errors of entries that cannot be deleted.

        ``unlisted``: entries to list in the same version, where the table has none of the number.
        """
        by_step = {e.step: e for e in entries if e.step not in self._removing}
        leaving = in_state("removing", by_step.values())

        def change(table: Table) -> Table:
            new = (e for e in unlisted if table.of(e.step) is None)
            return listing(table, *new, *leaving)

        self._append(change)
        for entry in leaving:
            self._tell_removal("begun", entry.step)
        return self._finish_removal(leaving)

    def _finish_removal(self, entries: Collection[Entry]) -> dict[int, PersistentTierError]:
        """Delete the files of ``entries``, as the newest version records; then drop the entries.

        Return, by step, the errors of entries that cannot be deleted, and stay.
        """
        errors: dict[int, PersistentTierError] = {}
        for entry in entries:
            error = self._tidy(entry.step, functools.partial(self._delete_removed, entry))
            if error is not None:
                errors[entry.step] = error
        if gone := [e for e in entries if e.step not in errors]:
            self._append(lambda table: without(table, gone))
        return errors

    def _delete_removed(self, entry: Entry) -> None:
        self._removing.add(entry.step)
        try:
            folders = self._folders_to_delete(entry)
            # Not under the lock: it may take long, and saves go on meanwhile.
            self._lock.release()
            try:
                self._delete(entry.step, folders)
            finally:
                self._lock.acquire()
        finally:
            self._removing.discard(entry.step)
            self._removed.notify_all()
        self._tell_removal("removed", entry.step)

    def _folders_to_delete(self, entry: Entry) -> set[str]:
        inspection, is_bucket = self._found.inspection(), self._storage.is_object_store
        hidden = set[str]() if is_bucket else {entry.hidden_folder}
        is_own = inspection.is_in_own_folder(entry)
        # In a bucket a removal begins with the commit, and then the rest identifies no plain step.
        is_own = is_own or (entry.is_plain and not inspection.is_committed(entry.own_folder))
        # Otherwise another program may have written into its place.
        return hidden | ({entry.own_folder} if is_own else self._remains_of(entry.step))

    def _tell_removal(self, stage: str, step: int, **fields: object) -> None:
        self._emit("persistent.removal", step=step, stage=stage, **fields)

    def _clear(self, step: int) -> None:
        """Remove the remains of a save in the place of ``step``, even if the save did not end.

        The files of other programs stay.
        """
        names = {self._storage.name_of(step), *self._remains_of(step)}
        self._delete(step, names, unfinished=True)

    def _remains_of(self, step: int) -> set[str]:
        """Return the names that this package gave to folders of ``step``, which has no place now.

        An earlier life may have named steps in another way.
        """
        names = self._storage.names_in()
        written = {name.partition(TEMPORARY_SUFFIX)[0] for name in names}
        began = self._found.inspection().is_begun_by_us
        return {
            name
            for name in written
            if is_name_of(step, name) and (name not in names or began([name]))
        }

    def _delete(self, step: int, folders: Collection[str], *, unfinished: bool = False) -> None:
        """Remove ``folders`` and documents of ``step``.

        ``unfinished``: remove temporary folders too. Of all these folders, remove only files that a
        save of this package wrote.
        """
        storage, documents = self._storage, f"{HOST_STATE}/{step}"
        below = sorted(folders)
        work = ("remove", f"/{below[0] if below else documents}")
        if storage.is_object_store:
            objects = self._objects(step, *(f"{name}/" for name in (*below, documents)))
            if unfinished:
                objects = self._found.inspection().of_a_save(objects)
            storage.do(*work, lambda: delete_step(storage, objects), changes=step)
            return
        removed = [f"{name}{_REMOVED}" for name in below]  # of a removal that did not end
        temporary_of = below if unfinished else ()
        is_of_a_save = self._found.inspection().is_of_a_save
        going = [name for name in below if not unfinished or is_of_a_save(name)]
        pinned = self._pinned(step, *going, documents, *removed, temporary_of=temporary_of)

        def delete() -> None:
            for name in below:
                remove_tensors(pinned, name)
            pinned.clear(documents)

        storage.do(*work, delete, changes=step)


def delete_step(storage: StorageDirectory, objects: Generations) -> None:
    """Delete objects of a step in a bucket, in an order in which the rest never misleads a reader.

    Orbax's commit is deleted first: without it Orbax ignores the step. ``_CHECKPOINT_METADATA``
    follows all other files of Orbax's: as long as it exists, no other writer can claim the place,
    and mistake a file of the same bytes, which is about to be deleted, for its own. The files in
    ``host_state`` are last: without them the rest would look like a step of plain Orbax. For use
    inside ``do``.
    """
    by_rank = sorted(objects, key=_rank)
    for _, names in itertools.groupby(by_rank, _rank):
        storage.delete_objects({name: objects[name] for name in names})
    storage.delete_empty_folders(objects)


_FILE = 2
"""The rank of a file by which a step is neither recognised nor claimed."""


def _rank(name: str) -> int:
    folder, _, below = name.partition("/")
    if folder == HOST_STATE:
        return 4
    if below.endswith(f"/{COMMITTED}"):
        return 1
    return {COMMITTED: 0, STEP_METADATA: 3}.get(below, _FILE)


def temporary_folders(storage: StorageDirectory, name: str) -> list[str]:
    """Return the temporary folders of this package's saves and removals of the step ``name``.

    Another program may be saving in its own. For use inside ``do``.
    """
    ends = (f"{OWN_TEMPORARY}*", _REMOVED)
    return [path.name for end in ends for path in storage.path.glob(f"{name}{end}")]


def remove_tensors(pinned: Pinned, name: str) -> None:
    """Make Orbax ignore the step ``name`` of a file system, then remove its folder.

    For use inside ``do``. Pinned temporary folders of a save or a removal that did not end are
    removed too.
    """
    for temporary in pinned.names:
        if temporary.startswith(f"{name}{TEMPORARY_SUFFIX}"):
            pinned.clear(temporary)
    removed = f"{name}{_REMOVED}"
    pinned.move(name, removed)
    pinned.clear(name, at=removed)
