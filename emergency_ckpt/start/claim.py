"""The leader's check, at a start, of the run that saves in the persistent directory."""

from __future__ import annotations

import time

import msgspec

from emergency_ckpt.cluster.coordination import ERROR_LIMIT_CHARS, Coordinator
from emergency_ckpt.cluster.storage.claim import DirectoryClaim
from emergency_ckpt.errors import CoordinationError, DirectoryInUse, PersistentTierError
from emergency_ckpt.events import EventSink

_KEY = "directory"
_WRITE_TIMEOUT_S = 5.0
"""Short, because all processes wait for it."""


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``life``: this run's recorded life. ``refusal``: why this run may not save, or empty."""

    life: str = ""
    target: str = ""
    refusal: str = ""
    hint: str = ""


class ClaimAtStart:
    """The leader's part of a start: a check first, and the claim after everything succeeded."""

    def __init__(self, claim: DirectoryClaim, coordinator: Coordinator, events: EventSink) -> None:
        self._claim = claim
        self._coordinator = coordinator
        self._events = events
        self._life = ""
        self._refusal: DirectoryInUse | None = None
        self._is_free = False

    def look(self, deadline_s: float) -> None:
        """Read the claim. Blocks for storage; PersistentTierError when it cannot be read."""
        try:
            self._life = self._claim.find(deadline_s)
            self._is_free = not self._life
        except DirectoryInUse as error:
            self._refusal = error

    def check(self) -> None:
        """Raise DirectoryInUse when another run has the claim, after telling the others."""
        if self._refusal is not None:
            self._tell(self._refusal)
            raise self._refusal

    def finish(self) -> None:
        """Claim a directory that no run has. DirectoryInUse when another run has just claimed it.

        Call last, because a start that fails must not keep a directory from other runs. A storage
        failure now is left to the saves.
        """
        if self._is_free:
            try:
                self._claim.hold(deadline_s=time.monotonic() + _WRITE_TIMEOUT_S)
            except DirectoryInUse as error:
                self._tell(error)
                raise
            except PersistentTierError as error:
                self._events.emit("persistent.unreachable", reason=str(error)[:500])
        self._tell(None)

    def _tell(self, refusal: DirectoryInUse | None) -> None:
        told = _Told(self._life)
        if refusal is not None:
            cut = ERROR_LIMIT_CHARS
            told = _Told("", refusal.target[:cut], refusal.problem[:cut], refusal.hint[:cut])
        self._coordinator.put(_KEY, msgspec.json.encode(told))


def told_refusal(coordinator: Coordinator) -> DirectoryInUse | None:
    """Return the leader's refusal, or None; on any process, once all have come."""
    told = _told(coordinator)
    if told is None or not told.refusal:
        return None
    return DirectoryInUse("save in", told.target, told.refusal, hint=told.hint)


def known_lives(coordinator: Coordinator) -> tuple[str, ...]:
    """Return the life that was recorded when this job started, and is over; CoordinationError."""
    told = _told(coordinator)
    return () if told is None or not told.life else (told.life,)


def _told(coordinator: Coordinator) -> _Told | None:
    data = coordinator.find(_KEY)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=_Told)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CoordinationError("read", _KEY, f"not the leader's result: {error!s:.300}") from error
