"""The steps of a persistent directory: the newest version of its log, and one listing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from emergency_ckpt.core.restore.inventory import PersistentStep
from emergency_ckpt.core.step_log import Entry, Table, greatest_number
from emergency_ckpt.core.timeline import is_same_save
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.inspection import GONE, FoundStep, StepInspection
from emergency_ckpt.storage.log import LogRead, StepLog
from emergency_ckpt.storage.marker import HOST_STATE, MARKER_NAME
from emergency_ckpt.storage.step_folders import INSPECTED_AT_ONCE, StepFolders


@dataclasses.dataclass(frozen=True)
class StoredView:
    """The contents of a directory, without a look into the folder of any step.

    Attributes:
      log: as read.
      names: of everything in the directory.
      unlisted: the folders of steps that the table does not name, by step.
      steps: at most one item per number, oldest first: the complete steps of the table, and the
        unlisted steps, which are not inspected yet (``is_seen``). A step of the table without a
        folder has a problem; so has a marker without tensors, listed where there are no steps.
      is_before_saves: there are steps, and none of them is in the log or has a marker.
    """

    log: LogRead
    names: frozenset[str]
    unlisted: Mapping[int, tuple[str, ...]]
    steps: tuple[PersistentStep, ...]
    is_before_saves: bool

    @property
    def table(self) -> Table | None:
        """Return the newest version that can be used."""
        return self.log.table

    @functools.cached_property
    def greatest(self) -> int:
        """Return the greatest incarnation that the log names; cached, since it is used often."""
        return greatest_number(self.table)

    def entry(self, step: int, incarnation: str) -> Entry | None:
        """Return the entry of the table, in any state."""
        entry = None if self.table is None else self.table.of(step)
        return entry if entry is not None and is_same_save(entry.incarnation, incarnation) else None

    def hidden(self, step: int) -> PersistentStep | None:
        """Return the hidden step of this number."""
        entry = None if self.table is None else self.table.of(step)
        return _item(entry) if entry is not None and entry.state == "hidden" else None

    def of(self, step: int) -> PersistentStep | None:
        """Return the step that counts as ``step``, or the hidden step of this number, or None."""
        item = next((item for item in self.steps if item.step == step), None)
        is_there = item is not None and not item.problem
        return item if is_there else self.hidden(step) or item


class StoredSteps:
    """Reads the steps of one directory. All methods block for storage, until their deadline.

    A step counts when the newest version of the log lists it as complete. A folder that the table
    does not name counts when it has both markers, as after a copy by hand or the loss of the log;
    a folder of plain Orbax counts as long as the log names no step.
    """

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage
        self.log = StepLog(storage)
        self._logged: set[str] = set()

    def inspection(self, number: int = 0, deadline_s: float | None = None) -> StepInspection:
        """Return an object that inspects single steps, with the arguments of its class."""
        return StepInspection(self._storage, self._logged, number, deadline_s)

    def view(self, deadline_s: float | None = None, log: LogRead | None = None) -> StoredView:
        """Return the contents of the directory. PersistentTierError; OtherFormat.

        The number of requests does not depend on the number of steps, except for a listing's pages.
        ``log``: as just read or written; None: the log is read.
        """
        deadline_s = self._storage.deadline_s(deadline_s)
        log = self.log.read(deadline_s) if log is None else log
        for fault in log.faults:
            self.inspection().tell(f"{fault}; the version before is used")
        names = frozenset(self._storage.names_in(deadline_s=deadline_s))
        entries = () if log.table is None else log.table.steps
        # On a file system a hidden step is under another name.
        stays = self._storage.is_object_store
        listed = {e.own_folder for e in entries if e.state != "hidden" or stays}
        unlisted = StepFolders(self._storage, deadline_s).steps(names, listed)
        if not names:
            self._storage.check_bucket(deadline_s)
        steps = {e.step: e for e in entries if e.state == "complete"}
        gone = self._gone([e for e in steps.values() if not _folders_of(e) & names], deadline_s)
        # Another folder of the same number may have come in place of a folder that is gone.
        replaced = gone & unlisted.keys()
        unreplaced = [e for e in steps.values() if e.step not in replaced]
        items = [_item(e, GONE if e.step in gone else "") for e in unreplaced]
        numbers = {e.step for e in entries} - replaced
        unseen = [step for step in unlisted if step not in numbers]
        items += [PersistentStep(step, 0, False, is_seen=False) for step in unseen]
        if not items:  # markers alone are no fresh start
            marked = self._marked(deadline_s)
            items = [PersistentStep(step, 0, False, problem=GONE) for step in marked]
        is_new = bool(unlisted) and not entries and not self._marked(deadline_s)
        return StoredView(log, names, unlisted, tuple(sorted(items)), is_new)

    def _gone(self, missing: Sequence[Entry], deadline_s: float) -> set[int]:
        """Return the steps of ``missing``, which the listing lacks, that really have no folder."""
        if self._storage.is_object_store:
            return {e.step for e in missing}

        # A file server's listing may be old; a look-up by name is current.
        def is_there(entry: Entry) -> bool:
            return any(self._storage.has_file(name, deadline_s) for name in _folders_of(entry))

        with ThreadPoolExecutor(INSPECTED_AT_ONCE, "eckpt-steps") as pool:
            there = list(pool.map(is_there, missing))
        return {e.step for e, has_folder in zip(missing, there, strict=True) if not has_folder}

    def _marked(self, deadline_s: float) -> list[int]:
        """Return the newest steps that have a marker."""
        numbers = sorted(self._storage.numbers_in(HOST_STATE, deadline_s), reverse=True)
        return [
            step
            for step in numbers[:INSPECTED_AT_ONCE]
            if self._storage.has_file(f"{HOST_STATE}/{step}/{MARKER_NAME}", deadline_s)
        ]

    def inspect(
        self, view: StoredView, item: PersistentStep, deadline_s: float | None = None
    ) -> FoundStep | None:
        """Return the step of an item of ``view``, as its files show it; None when it is no step.

        The step has another incarnation if another program has written it again.
        """
        stored_step = self._inspect(view, item, self._storage.deadline_s(deadline_s))
        if stored_step is None:
            return None
        return stored_step._replace(entry=view.entry(item.step, stored_step.step.incarnation))

    def _inspect(
        self, view: StoredView, item: PersistentStep, deadline_s: float
    ) -> FoundStep | None:
        entry = view.entry(item.step, item.incarnation) if item.is_seen else None
        names = view.unlisted.get(item.step)
        if entry is not None:
            stored_step = self.inspection(view.greatest, deadline_s).listed(entry)
            if stored_step.step.problem != GONE or not names:
                return stored_step
        if not names:
            return FoundStep(item, None, str(item.step))
        # Before the first save of the run, a step of plain Orbax is older than every life.
        number = 0 if view.is_before_saves else view.greatest
        stored_step = self.inspection(number, deadline_s).unlisted(item.step, names)
        if stored_step is None:
            return None
        if stored_step.is_plain and view.table is not None and view.table.steps:
            return stored_step.as_unlisted()
        other = view.entry(item.step, stored_step.step.incarnation)
        # Otherwise the table's entry shows that the step does not count.
        return stored_step if other is None or other.state == "complete" else None

    def inspect_each(
        self, view: StoredView, items: Iterable[PersistentStep], deadline_s: float | None = None
    ) -> list[FoundStep | CheckpointError | None]:
        """Return the result of ``inspect`` for each of ``items``, or its error, several at once."""
        deadline_s = self._storage.deadline_s(deadline_s)

        def inspect(item: PersistentStep) -> FoundStep | CheckpointError | None:
            try:
                return self.inspect(view, item, deadline_s)
            except CheckpointError as error:
                return error

        with ThreadPoolExecutor(INSPECTED_AT_ONCE, "eckpt-steps") as pool:
            return list(pool.map(inspect, items))

    def inspect_all(
        self, view: StoredView, items: Iterable[PersistentStep], deadline_s: float | None = None
    ) -> list[FoundStep | None]:
        """Return the result of ``inspect`` for each of ``items``; raise the first error."""
        steps: list[FoundStep | None] = []
        for result in self.inspect_each(view, items, deadline_s):
            if isinstance(result, CheckpointError):
                raise result
            steps.append(result)
        return steps

    def resolved(self, view: StoredView, deadline_s: float | None = None) -> list[PersistentStep]:
        """Return the steps of ``view``, oldest first, after an inspection of the unlisted steps."""
        unseen = [item for item in view.steps if not item.is_seen]
        steps = [item for item in view.steps if item.is_seen]
        for stored_step in self.inspect_all(view, unseen, deadline_s):
            if stored_step is not None and not stored_step.is_junk:
                steps.append(stored_step.step)
        return sorted(steps)

    def counting(
        self, deadline_s: float | None = None, view: StoredView | None = None
    ) -> list[PersistentStep]:
        """Return the steps that count by the log and its chain, oldest first."""
        deadline_s = self._storage.deadline_s(deadline_s)
        view = self.view(deadline_s) if view is None else view
        chain = None if view.table is None else view.table.chain
        return [
            item
            for item in self.resolved(view, deadline_s)
            if not item.problem
            and (chain is None or not chain.rejection_reason(item.step, item.incarnation))
        ]

    def find(self, step: int, deadline_s: float | None = None) -> FoundStep | None:
        """Return the step that counts as ``step``, or the hidden step, as its files show it."""
        deadline_s = self._storage.deadline_s(deadline_s)
        view = self.view(deadline_s)
        item, hidden = view.of(step), view.hidden(step)
        stored_step = None if item is None else self.inspect(view, item, deadline_s)
        is_step = stored_step is not None and not stored_step.is_junk
        return stored_step if is_step or hidden is None else self.inspect(view, hidden, deadline_s)


def _folders_of(entry: Entry) -> frozenset[str]:
    return frozenset({entry.own_folder, entry.hidden_folder})


def _item(entry: Entry, problem: str = "") -> PersistentStep:
    return PersistentStep(entry.step, entry.processes, entry.stateful, entry.incarnation, problem)
