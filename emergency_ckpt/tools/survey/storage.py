"""The steps of a persistent directory by its log, each with its own fault if it has one."""

from __future__ import annotations

import dataclasses
import re

from emergency_ckpt.core.restore.inventory import PersistentStep
from emergency_ckpt.core.shard_layout import state_size_bytes
from emergency_ckpt.core.step_log import Entry, Table
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CheckpointError, PersistentTierError
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.steps.inspection import FoundStep
from emergency_ckpt.storage.steps.stored import StoredSteps
from emergency_ckpt.tools.survey.places import Places, SurveyFault

_LEFTOVER = re.compile(r"(.*)\.(orbax-checkpoint-tmp|rolled-back-).*")


@dataclasses.dataclass(frozen=True)
class ListedEntry:
    """One step of the directory, by the log; by a look where the log does not name it.

    Attributes:
      entry: of the log; None for a step that it does not name.
      found: by the inspection; None without one.
    """

    step: PersistentStep
    entry: Entry | None
    found: FoundStep | None = None

    @property
    def size_bytes(self) -> int | None:
        """Return the bytes of its arrays; None when only Orbax knows."""
        if self.entry is not None and self.entry.marker:
            return self.entry.size_bytes
        marker = self.found.marker if self.found else None
        return None if marker is None else state_size_bytes(marker.leaves)

    @property
    def saved_s(self) -> float | None:
        """Return the Unix time of its save; None when it is not known."""
        if self.entry is not None and self.entry.saved_s:
            return self.entry.saved_s
        return self.found.committed_ns / 1e9 if self.found and self.found.committed_ns else None


@dataclasses.dataclass(frozen=True)
class StoredDirectory:
    """A persistent directory.

    Attributes:
      steps: those that exist, oldest first, also with a problem, and hidden ones.
      table: the newest version of the log that can be used; None without one.
      unfinished: folders of saves that have not ended; they do not count.
      hidden: folders of hidden steps.
    """

    directory: str
    steps: tuple[ListedEntry, ...] = ()
    table: Table | None = None
    unfinished: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    faults: tuple[SurveyFault, ...] = ()

    @property
    def timeline(self) -> Timeline | None:
        """Return the binding chain of the log."""
        return None if self.table is None else self.table.chain

    @property
    def run_id(self) -> str:
        """Return the run on record that saves there; empty without a record."""
        return "" if self.table is None else self.table.run_id


def read_storage(places: Places) -> StoredDirectory:
    """Describe the steps of ``places.directory``. Blocks for storage; errors are faults.

    No folder of a step is looked into that the log names: ``Survey.look_at`` does.
    """
    try:
        tier = places.storage()
        _check_there(tier.storage)
        return _read(tier.found, places)
    except CheckpointError as error:
        return StoredDirectory(places.directory, faults=(SurveyFault.of(places.directory, error),))


def _check_there(storage: StorageDirectory) -> None:
    """Raise PersistentTierError unless the directory exists; an empty prefix of a bucket does."""
    if storage.is_object_store:
        return
    if not storage.do("list", "", storage.path.is_dir):
        raise PersistentTierError(
            "list", str(storage.path), "not a directory", hint="correct --dir"
        )


def _read(stored: StoredSteps, places: Places) -> StoredDirectory:
    view = stored.view()
    faults = [SurveyFault.of(fault.target, fault) for fault in view.log.faults]
    steps: list[ListedEntry] = []
    unfinished: list[str] = []
    seen = [item for item in view.steps if item.is_seen]
    unseen = [item for item in view.steps if not item.is_seen]
    steps += [ListedEntry(item, view.entry(item.step, item.incarnation)) for item in seen]
    for item, result in zip(unseen, stored.inspect_each(view, unseen), strict=True):
        where = f"{places.directory}/{item.step}"
        if result is None:
            unfinished += view.unlisted.get(item.step, ())
        elif isinstance(result, CheckpointError):
            faults.append(SurveyFault.of(where, result, item.step))
        elif not result.is_junk:
            steps.append(ListedEntry(result.step, None, result))
    if view.log.number and view.table is None:
        faults.append(SurveyFault(stored.log.target, "no version of the step log can be used"))
    elif view.table is None and any(x.found and x.found.marker for x in steps):
        faults.append(SurveyFault(stored.log.target, "the step log is gone"))
    faults += [
        SurveyFault(f"{places.directory}/{listed.step.step}", listed.step.problem, listed.step.step)
        for listed in steps
        if listed.step.problem
    ]
    steps += [
        ListedEntry(hidden, entry)
        for entry in (view.table.steps if view.table else ())
        if (hidden := view.hidden(entry.step)) is not None
    ]
    names = sorted(name for name in view.names if _LEFTOVER.fullmatch(name))
    return StoredDirectory(
        directory=places.directory,
        steps=tuple(sorted(steps, key=lambda listed: (listed.step.step, listed.step.incarnation))),
        table=view.table,
        unfinished=(*unfinished, *(name for name in names if ".orbax-checkpoint-tmp" in name)),
        hidden=tuple(name for name in names if ".orbax-checkpoint-tmp" not in name),
        faults=tuple(faults),
    )
