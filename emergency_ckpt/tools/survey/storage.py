"""The steps of a persistent directory by its log, each with its own fault if it has one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from emergency_ckpt.core.restore.inventory import PersistentStep, RestoredSave, lives_from
from emergency_ckpt.core.shard_layout import state_size_bytes
from emergency_ckpt.core.step_log import Entry, Table
from emergency_ckpt.errors import CheckpointError, PersistentTierError
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.steps.inspection import FoundStep
from emergency_ckpt.storage.steps.stored import StoredSteps
from emergency_ckpt.tools.survey.places import Places, SaveState, SurveyedStep, SurveyFault
from emergency_ckpt.types import PERSISTENT, SaveId

_Item = tuple[PersistentStep, Entry | None, FoundStep | None]
"""A step, its entry in the log, and what a look found where the log does not name the step."""
_LEFTOVER = re.compile(r"(.*)\.(orbax-checkpoint-tmp|rolled-back-).*")


@dataclasses.dataclass(frozen=True)
class StoredDirectory:
    """A persistent directory.

    Attributes:
      steps: those that exist, newest first, also with a problem, and hidden ones.
      table: the newest version of the log that can be used; None without one.
      unfinished: folders of saves that have not ended; they do not count.
      hidden: folders of hidden steps.
    """

    directory: str
    steps: tuple[SurveyedStep, ...] = ()
    table: Table | None = None
    unfinished: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    faults: tuple[SurveyFault, ...] = ()

    @property
    def run_id(self) -> str:
        """Return the run on record that saves there; empty without a record."""
        return "" if self.table is None else self.table.run_id


def read_storage(
    places: Places, time_s: float, restored: Sequence[RestoredSave]
) -> StoredDirectory:
    """Describe the steps of ``places.directory``. Blocks for storage; errors are faults.

    No folder of a step is looked into that the log names: ``Survey.inspect_each`` does.

    Args:
      restored: the saves that the newest lives began from, by the ledgers in RAM.
    """
    try:
        tier = places.storage()
        _check_there(tier.storage)
        return _read(tier.found, places, time_s, restored)
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


def _read(
    stored: StoredSteps, places: Places, time_s: float, restored: Sequence[RestoredSave]
) -> StoredDirectory:
    view = stored.view()
    faults = [SurveyFault.of(fault.target, fault) for fault in view.log.faults]
    steps: list[_Item] = []
    unfinished: list[str] = []
    seen = [item for item in view.steps if item.is_seen]
    unseen = [item for item in view.steps if not item.is_seen]
    steps += [(item, view.entry(item.step, item.incarnation), None) for item in seen]
    for item, result in zip(unseen, stored.inspect_each(view, unseen), strict=True):
        where = f"{places.directory}/{item.step}"
        if result is None:
            unfinished += view.unlisted.get(item.step, ())
        elif isinstance(result, CheckpointError):
            faults.append(SurveyFault.of(where, result, item.step))
        elif not result.is_junk:
            steps.append((result.step, None, result))
    if view.log.number and view.table is None:
        faults.append(SurveyFault(stored.log.target, "no version of the step log can be used"))
    elif view.table is None and any(looked_at and looked_at.marker for _, _, looked_at in steps):
        faults.append(SurveyFault(stored.log.target, "the step log is gone"))
    faults += [
        SurveyFault(f"{places.directory}/{item.step}", item.problem, item.step)
        for item, _, _ in steps
        if item.problem
    ]
    steps += [
        (hidden, entry, None)
        for entry in (view.table.steps if view.table else ())
        if (hidden := view.hidden(entry.step)) is not None
    ]
    names = sorted(name for name in view.names if _LEFTOVER.fullmatch(name))
    return StoredDirectory(
        directory=places.directory,
        steps=tuple(
            _surveyed(*listed, view.table, time_s, restored)
            for listed in sorted(steps, key=lambda x: (x[0].step, x[0].incarnation), reverse=True)
        ),
        table=view.table,
        unfinished=(*unfinished, *(name for name in names if ".orbax-checkpoint-tmp" in name)),
        hidden=tuple(name for name in names if ".orbax-checkpoint-tmp" not in name),
        faults=tuple(faults),
    )


def _surveyed(
    item: PersistentStep,
    entry: Entry | None,
    looked_at: FoundStep | None,
    table: Table | None,
    time_s: float,
    restored: Sequence[RestoredSave],
) -> SurveyedStep:
    marker = None if looked_at is None else looked_at.marker
    run_id, size_bytes, saved_s, lives = "", None, None, 0
    if entry is not None:
        assert table is not None
        run_id = "" if entry.is_plain else table.run_id
        size_bytes = entry.size_bytes if entry.marker else None
        saved_s, lives = entry.saved_s or None, entry.lives
    elif marker is not None:
        run_id, size_bytes = marker.save.run_id, state_size_bytes(marker.leaves)
    if saved_s is None and looked_at is not None and looked_at.committed_ns:
        saved_s = looked_at.committed_ns / 1e9
    reason = ""
    if table is not None and table.chain is not None:
        reason = table.chain.rejection_reason(item.step, item.incarnation)
    state: SaveState = "rolled_back" if reason else "whole"
    if entry is not None and entry.state == "hidden":
        state = "rolled_back"
        reason = reason or "it was rolled back"
        reason += f"; its folder on a file system: {entry.hidden_folder}"
    elif item.problem:
        state, reason = "damaged", item.problem
    return SurveyedStep(
        tier=PERSISTENT,
        step=item.step,
        run_id=run_id,
        incarnation=item.incarnation,
        state=state,
        reason=reason,
        saved_s=saved_s,
        age_s=None if saved_s is None else time_s - saved_s,
        size_bytes=size_bytes,
        held_bytes=None,
        processes=item.process_count or None,
        holders=(),
        lives=max(lives, lives_from(SaveId(item.step, item.incarnation, run_id), restored)),
    )
