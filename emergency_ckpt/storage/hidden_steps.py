"""For how long steps have been hidden, by the clock of storage alone.

The log has the time of a save, by the clock of the host that saved. Neither this time nor that
clock says when the step was rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

from emergency_ckpt.core.step_log import Entry, Table
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.steps import StoredSteps


def hidden_since(
    storage: StorageDirectory, stored: StoredSteps, table: Table, entries: Sequence[Entry]
) -> dict[int, float]:
    """Return the latest Unix time at which each hidden step of ``table`` can have been hidden.

    A step is left out where storage does not say that. On a file system the hiding changes the name
    of the step's folder. A bucket has no renames: there the versions of the log show the time, and
    the oldest one that is left shows that a step was hidden before.
    """
    if storage.is_object_store:
        return _since_by_log(stored, table, entries)
    changed = {entry.step: storage.changed_s(entry.hidden_folder) for entry in entries}
    return {step: changed_s for step, changed_s in changed.items() if changed_s is not None}


def _since_by_log(stored: StoredSteps, table: Table, entries: Sequence[Entry]) -> dict[int, float]:
    since: dict[int, float] = {}
    hidden = {(entry.step, entry.incarnation) for entry in entries}
    for version, written_s in stored.log.versions_back(table.number):
        hidden &= {(e.step, e.incarnation) for e in version.steps if e.state == "hidden"}
        since |= {step: written_s for step, _ in hidden}
        if not hidden:
            break
    return since
