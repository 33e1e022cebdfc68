"""The processes that have left the job, and why, so that no process waits for them.

A leaving process makes two announcements. At once (``LEAVING``) the process announces the reason,
and the newest save that it has begun in each tier. The process still finishes these saves, so the
others wait for this process in these saves and not in later saves. When the process has released
everything, it announces that nothing more comes (``GONE``).

A process that dies announces nothing: ``peers.LostPeers`` ends the wait for it inside ``save``, and
the engine and JAX's heartbeats decide on the rest.

A process that begins a save takes no part in earlier saves that it left out, and reports that too
(``come_to``). ``LeftProcesses.absent`` combines all these reports.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import msgspec
from absl import logging

from emergency_ckpt.cluster.coordination import (
    Coordinator,
    by_process,
    decode_each,
    decode_message,
    reason_of,
)
from emergency_ckpt.core.limits import MAX_INT
from emergency_ckpt.core.timeline import number_of
from emergency_ckpt.core.wording import valid_text
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.types import PERSISTENT, SaveId, TierName

LEAVING = "leaving"
GONE = "gone"
_AT = "at"
_ASKED_ALONE = 2
"""The keys of so few processes are read one by one; the list of all keys grows with the job."""
_REASON_LIMIT_CHARS = 500

Place = tuple[int, int, str]
"""Number of a save's life, its step, and the part that a forced save adds to the incarnation."""
_LAST: Place = (MAX_INT, 0, "")
"""A place after every save: of a leaving process that takes part in the last save to storage."""


class _Leaving(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``begun``: the newest save begun in each tier, as ``in_order`` returns it."""

    reason: str
    begun: dict[str, Place]


def in_order(save: SaveId) -> Place:
    """Return a key that rises with each save: in later lives, and when a step is forced again."""
    return number_of(save.incarnation), save.step, save.incarnation.partition(".")[2]


def has_come_to(process: int, step: int) -> str:
    """Return the sentence about a process that takes no part in a save before ``step``."""
    return f"process {process} did not save it: it has come to the save of step {step}"


def leaving(coordinator: Coordinator) -> dict[int, str]:
    """Return the processes that begin no more saves, each with a sentence."""
    everyone = range(coordinator.process_count)
    announcements = sorted(_leaving(coordinator, everyone).items())
    return {p: f"process {p} has left: {leaving.reason}" for p, leaving in announcements}


def have_left(coordinator: Coordinator, processes: Collection[int]) -> dict[int, str]:
    """Return the processes among ``processes`` that have left for good, each with a sentence."""
    gone = _said(coordinator, GONE, processes)
    return {p: f"process {p} has left: {reason_of(why)}" for p, why in sorted(gone.items())}


def _leaving(coordinator: Coordinator, processes: Collection[int]) -> dict[int, _Leaving]:
    """Return the announcements; an unreadable announcement counts as one without a begun save."""
    values = _said(coordinator, LEAVING, processes)
    return decode_each(values, _Leaving, LEAVING, lambda text: _Leaving(text, {}))


def _said(coordinator: Coordinator, kind: str, processes: Collection[int]) -> dict[int, bytes]:
    """Return, by process, the values below the key ``kind`` that ``processes`` have set."""
    if len(processes) <= _ASKED_ALONE:
        answers = {process: coordinator.find(f"{kind}/{process}") for process in processes}
        return {process: value for process, value in answers.items() if value is not None}
    listed = by_process(coordinator.list(kind), kind, coordinator.process_count)
    return {process: value for process, value in listed.items() if process in processes}


class LeftProcesses:
    """Announces that this process leaves, and reads the others' announcements. Thread-safe."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def leave(
        self, reason: str, begun: Mapping[TierName, SaveId], *, stores_last: bool = False
    ) -> None:
        """Announce that this process begins no more saves. Idempotent; never raises.

        ``stores_last``: this process still takes part in the save to storage of RAM's newest step
        (``save.ending``).
        """
        saves: dict[str, Place] = {tier: in_order(s) for tier, s in begun.items()}
        if stores_last:
            saves[PERSISTENT] = _LAST
        leaving = _Leaving(valid_text(reason, _REASON_LIMIT_CHARS), saves)
        self._say(LEAVING, msgspec.json.encode(leaving))

    def gone(self, reason: str) -> None:
        """Announce that nothing more comes from this process. Idempotent; never raises."""
        self._say(GONE, valid_text(reason, _REASON_LIMIT_CHARS).encode())

    def come_to(self, tier: TierName, save: SaveId) -> None:
        """Report that this process begins ``save``, and takes part in no earlier save any more."""
        key = f"{_AT}/{tier}/{self._coordinator.process_index}"
        self._coordinator.replace(key, msgspec.json.encode(in_order(save)))

    def _say(self, kind: str, value: bytes) -> None:
        coordinator = self._coordinator
        if coordinator.process_count == 1:
            return
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        try:
            coordinator.put(f"{kind}/{coordinator.process_index}", value)
        except CheckpointError as error:
            # The service has ended too, so no process is left to read the announcement.
            logging.info("leaving without telling the other processes: %s", error)

    def absent(self, tier: TierName, save: SaveId, processes: Collection[int]) -> dict[int, str]:
        """Return which of ``processes`` take no part in ``save``, each with a sentence."""
        coordinator = self._coordinator
        sentences = have_left(coordinator, processes)
        for process, leaving in _leaving(coordinator, processes).items():
            if leaving.begun.get(tier, (-1, -1, "")) < in_order(save):
                sentences[process] = f"process {process} has left: {leaving.reason}"
        for process, step in self.passed(tier, save, processes).items():
            sentences[process] = has_come_to(process, step)
        return dict(sorted(sentences.items()))

    def passed(self, tier: TierName, save: SaveId, processes: Collection[int]) -> dict[int, int]:
        """Return which of ``processes`` have come to a later save than ``save``, with its step."""
        kind = f"{_AT}/{tier}"
        said = _said(self._coordinator, kind, processes)
        places = {process: _place(data, f"{kind}/{process}") for process, data in said.items()}
        return {process: at[1] for process, at in places.items() if at > in_order(save)}


def _place(data: bytes, name: str) -> Place:
    return decode_message(data, Place, name)
