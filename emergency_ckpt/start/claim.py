"""The persistent directory at a start: its step log is read, and a free directory is claimed."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.coordination import ERROR_LIMIT_CHARS, Coordinator
from emergency_ckpt.cluster.peers import Known
from emergency_ckpt.cluster.stored_chain import told_of_wait
from emergency_ckpt.core.step_log import greatest_number
from emergency_ckpt.errors import (
    CoordinationError,
    CorruptData,
    DirectoryInUse,
    PersistentTierError,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.storage.steps.writer import DirectoryWriter

_KEY = "directory"
_WRITE_TIMEOUT_S = 5.0
"""Short, because all processes wait for it."""


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``refusal``: why this run may not save, or empty."""

    target: str = ""
    refusal: str = ""
    hint: str = ""


class ClaimAtStart:
    """The leader's part of a start: a look first, and the claim after everything succeeded."""

    def __init__(
        self,
        writer: DirectoryWriter,
        events: EventSink,
        failures: Failures,
        *,
        saves_there: bool,
        deadline_s: float,
    ) -> None:
        """``saves_there``: the job saves to storage, so no other run may."""
        self._deadline_s = deadline_s
        self._writer = writer
        self._events = events
        self._failures = failures
        self._saves_there = saves_there
        self._refusal: DirectoryInUse | None = None
        self.has_read = False

    def look(self, directory: str, create: Callable[[float], None]) -> Known:
        """Read the log; return what it knows of the run. Blocks for storage.

        Never raises, because RAM may be enough. ``create``: makes the directory until a deadline.
        """
        try:
            with told_of_wait(self._events, directory, self._deadline_s):
                create(self._deadline_s)
                table = self._writer.find(self._deadline_s).table
        except DirectoryInUse as error:
            self._refusal = error if self._saves_there else None
            table = self._writer.table
        except (PersistentTierError, CorruptData) as error:
            # Storage may be down just when RAM is needed; saves try it again.
            self._events.emit("persistent.unreachable", reason=str(error))
            self._failures.record(error)
            return Known()
        self.has_read = True
        counting = [] if table is None else table.counting()
        return Known(greatest_number(table), counting[-1].step if counting else -1)

    def check(self, coordinator: Coordinator) -> None:
        """Raise DirectoryInUse when another run has the claim, after telling the others."""
        if self._refusal is not None:
            _tell(coordinator, self._refusal)
            raise self._refusal

    def finish(self, coordinator: Coordinator, incarnation: str) -> None:
        """Claim a directory that no run has; in one of this run take the number of this life.

        DirectoryInUse when another run has just claimed it. Call last, because a start that fails
        must not keep a directory from other runs. A storage failure now is left to the saves.
        """
        if self.has_read and self._saves_there:
            try:
                self._writer.enter(incarnation, time.monotonic() + _WRITE_TIMEOUT_S)
            except DirectoryInUse as error:
                _tell(coordinator, error)
                raise
            except (PersistentTierError, CorruptData) as error:
                self._events.emit("persistent.unreachable", reason=str(error)[:500])


def _tell(coordinator: Coordinator, refusal: DirectoryInUse) -> None:
    cut = ERROR_LIMIT_CHARS
    told = _Told(refusal.target[:cut], refusal.problem[:cut], refusal.hint[:cut])
    coordinator.put(_KEY, msgspec.json.encode(told))


def told_refusal(coordinator: Coordinator) -> DirectoryInUse | None:
    """Return the leader's refusal, or None; on any process, once all have come."""
    data = coordinator.find(_KEY)
    if data is None:
        return None
    try:
        told = msgspec.json.decode(data, type=_Told)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CoordinationError("read", _KEY, f"not the leader's result: {error!s:.300}") from error
    return DirectoryInUse("save in", told.target, told.refusal, hint=told.hint)
