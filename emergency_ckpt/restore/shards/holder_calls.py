"""Ask the holders of a copy for it, one after the other, again while an error may pass.

Only a holder's answer says something about its copy: that it does not hold it, or bytes that are
not those of capture time. A refused or reset connection and silence say nothing; another attempt
may succeed, at another holder first.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    HolderUnreachable,
    NotHeld,
    TransferError,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.names import each_address

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_EXTRA_HOLDER_S = 10.0
"""Longest wait for a configured holder that does not answer: it may be gone for good."""
_THREADS = 32

_T = TypeVar("_T")


def is_about_copy(error: CheckpointError) -> bool:
    """Return whether the holder answered, and its answer says that its copy is of no use."""
    return isinstance(error, NotHeld | CorruptData)


class HolderCalls:
    """Calls to holders during one restore. From any thread.

    Attributes:
      deadline_s: of ``time.monotonic``; no call is repeated after it.
      check: called before a call is repeated; what it raises ends the call.
    """

    def __init__(self, events: EventSink, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.check: Callable[[], None] = lambda: None
        self._events = events

    def first(
        self,
        target: str,
        holders: Sequence[str],
        ask: Callable[[str], _T | None],
        failed: Callable[[str, CheckpointError], None],
        *,
        attempts: int | None = None,
    ) -> _T | None:
        """Return the first answer of ``ask(holder)``; None when no copy is of use.

        Holders are asked in the given order, and those that could not be reached again, with
        growing pauses. Blocks until the deadline at most.

        Args:
          ask: returns None when the holder has answered and has nothing (more) to give.
          failed: told (holder, error) when an answer says that the holder's copy is of no use.
          attempts: how often a holder is asked at most; None: until the deadline.

        Raises:
          HolderUnreachable: no holder has answered with a copy of use, and these could not be
            reached until the deadline.
        """
        left = list(holders)
        silent: dict[str, CheckpointError] = {}
        pause_s = FIRST_PAUSE_S
        for attempt in itertools.count(1):
            for holder in tuple(left):
                try:
                    answer = ask(holder)
                except CheckpointError as error:
                    if not self._may_be_repeated(holder, error, failed, silent):
                        left.remove(holder)
                    continue
                silent.pop(holder, None)
                if answer is not None:
                    return answer
                left.remove(holder)
            if not left or attempt == attempts or time.monotonic() + pause_s >= self.deadline_s:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self.check()
        if not silent:
            return None
        problem = "; ".join(f"{holder}: {error}" for holder, error in sorted(silent.items())[:4])
        raise HolderUnreachable("restore", target, f"no holder could be reached: {problem}")

    def _may_be_repeated(
        self,
        holder: str,
        error: CheckpointError,
        failed: Callable[[str, CheckpointError], None],
        silent: dict[str, CheckpointError],
    ) -> bool:
        if is_about_copy(error):
            silent.pop(holder, None)
            failed(holder, error)
            return False
        if not isinstance(error, TransferError):
            raise error
        if holder not in silent:
            self._events.emit(
                "restore.holder_unreachable",
                holder=holder,
                address=error.target,
                reason=str(error),
            )
        silent[holder] = error
        return True


def ask_extra_holders(
    client: TransferClient, events: EventSink, addresses: Sequence[str], deadline_s: float
) -> list[HolderInventory]:
    """Return the inventories of holders outside of the job: ``eckpt serve`` without its trainer.

    Those that do not answer in time are named by an event.

    A name with several addresses, such as that of a headless service, stands for a server at each.
    ``deadline_s``: of the restore, by ``time.monotonic``.
    """
    if not addresses:
        return []

    def ask(address: str) -> HolderInventory | None:
        left_s = deadline_s - time.monotonic()
        calls = HolderCalls(events, time.monotonic() + min(_EXTRA_HOLDER_S, left_s / 8))
        what = f"inventory of {address}"
        try:
            return calls.first(what, [address], client.inventory, lambda _, error: None)
        except CheckpointError as error:
            events.emit("restore.holder_unreachable", address=address, reason=str(error))
            return None

    with ThreadPoolExecutor(_THREADS, "eckpt-holders") as pool:
        found = dict.fromkeys(each for some in pool.map(each_address, addresses) for each in some)
        answers = list(pool.map(ask, found))
    return [answer for answer in answers if answer is not None]
