"""Ask the holders of a copy, one after the other, and again while an error may be temporary.

1. ``HolderCalls`` makes each request that a restore has for the holders of some copy.
2. ``ManifestReads`` reads manifests that inventories name, for the leader, each at most once.

A copy is known to be of no use only after its holder's answer: the holder does not have the copy,
or sends bytes that are not those of capture time. A refused or reset connection, or silence, means
nothing for the copy: another attempt may succeed, after the other holders were asked.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from emergency_ckpt.cluster.peers import fetch_contents
from emergency_ckpt.cluster.shard_source import ProcessHoldings
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    HolderUnreachable,
    NotHeld,
    TransferError,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import Contents, SaveId
from emergency_ckpt.work_progress import WorkProgress

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_MANIFESTS_AT_ONCE = 16
_ENDS = ("state_mismatch", "host_state_count", "no_host_state", "foreign")
_ATTEMPTS = 3
"""So often the holders of a manifest are asked where the leader can choose without the manifest."""

_T = TypeVar("_T")


def is_about_copy(error: CheckpointError) -> bool:
    """Return whether the holder has answered, and its copy is of no use."""
    return isinstance(error, NotHeld | CorruptData)


class HolderCalls:
    """Calls to holders during one restore. From any thread.

    Attributes:
      progress: of the restore; no call is repeated after its deadline.
    """

    def __init__(self, client: TransferClient, events: EventSink, progress: WorkProgress) -> None:
        self.client = client
        self.events = events
        self.progress = progress
        self._got_s = -math.inf
        self._silent = set[str]()  # holders that did not answer when they were last asked

    def got_one(self) -> None:
        """Note that a part of what was asked for has come, so that it is worthwhile to ask on."""
        self._got_s = self.progress.clock.now_s()

    def note_failure(self, holder: str, address: str, error: CheckpointError) -> None:
        """Emit the event about a holder that gave no answer of use."""
        self.events.emit(
            "restore.peer_unreachable",
            role="holder",
            peer=holder,
            address=address,
            reason=str(error),
        )

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

        Holders are asked in the given order, but those last that did not answer an earlier call.
        Those that could not be reached are asked again, with growing pauses. Blocks until nothing
        moves any more, or no more of what is asked for comes.

        Args:
          ask: returns None when the holder has answered and has nothing (more) to give.
          failed: called with (holder, error) when an answer shows that the copy is of no use.
          attempts: how often a holder is asked at most; None: until the deadline.

        Raises:
          HolderUnreachable: no holder has answered with a copy of use, and the named holders could
            not be reached until the deadline.
        """
        clock = self.progress.clock
        askable, began_s = sorted(holders, key=self._silent.__contains__), clock.now_s()
        silent: dict[str, CheckpointError] = {}
        pause_s = FIRST_PAUSE_S
        for attempt in itertools.count(1):
            for holder in tuple(askable):
                try:
                    answer = ask(holder)
                except CheckpointError as error:
                    if is_about_copy(error):
                        silent.pop(holder, None)
                        askable.remove(holder)
                        failed(holder, error)
                        continue
                    if not isinstance(error, TransferError):
                        raise
                    if holder not in silent:
                        self.note_failure(holder, error.target, error)
                    silent[holder] = error
                    self._silent.add(holder)
                    continue
                silent.pop(holder, None)
                self._silent.discard(holder)
                self.progress.touch()
                if answer is not None:
                    return answer
                askable.remove(holder)
            patience_s = self.progress.limits.patience_s
            patience_s += max(began_s, self._got_s) - clock.now_s()
            if (
                not askable
                or attempt == attempts
                or pause_s >= min(patience_s, self.progress.left_s)
            ):
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if not silent:
            return None
        problem = "; ".join(f"{holder}: {error}" for holder, error in sorted(silent.items())[:4])
        raise HolderUnreachable("restore", target, f"no holder could be reached: {problem}")


class ManifestReads:
    """Contents by digest. A digest always names the same contents, so each is read at most once.

    Attributes:
      unread: the digests that were not read, each with the save of its manifest. A digest of which
        no holder has the manifest any more is not among them.
      unasked: those of ``unread`` whose holders were not asked yet.
    """

    def __init__(self, own: ProcessHoldings, calls: HolderCalls) -> None:
        self._own = own
        self._calls = calls
        self._contents: dict[str, Contents] = {}
        self._holders: dict[str, dict[str, str]] = {}
        self.unread: dict[str, SaveId] = {}
        self.unasked: dict[str, SaveId] = {}

    def note(self, holders: Sequence[HolderInventory]) -> dict[str, Contents]:
        """Note who holds which manifest; return the contents that were read before."""
        self._holders, saves = {}, dict[str, SaveId]()
        for holder in holders:
            for manifest in holder.tensors:
                self._holders.setdefault(manifest.digest, {})[holder.holder] = holder.address
                # One holder may report it under a save that is not its own.
                saves[manifest.digest] = max(
                    manifest.save, saves.get(manifest.digest, manifest.save)
                )
        self._contents = {d: c for d, c in self._contents.items() if d in saves}
        self.unread = {d: save for d, save in saves.items() if d not in self._contents}
        self.unasked = dict(self.unread)
        return dict(self._contents)

    def read(self, digests: Collection[str], *, is_patient: bool) -> dict[str, Contents]:
        """Read some of the ``unread``; return all contents that were read so far.

        ``is_patient``: holders that cannot be reached are asked until nothing moves any more, and
        not only a few times. HolderUnreachable when they still cannot be reached then.
        """
        unreachable = self._read_all(digests, attempts=None if is_patient else _ATTEMPTS)
        for digest in digests:
            self.unasked.pop(digest, None)
            if digest not in unreachable:
                self.unread.pop(digest, None)
        if is_patient and unreachable:
            raise next(iter(unreachable.values()))
        return dict(self._contents)

    def _read_all(
        self, digests: Collection[str], *, attempts: int | None
    ) -> dict[str, HolderUnreachable]:
        def read(digest: str) -> Contents | HolderUnreachable | None:
            if (own := self._own.contents(digest)) is not None:
                return own
            addresses = self._holders[digest]
            try:
                return self._calls.first(
                    f"manifest {digest[:12]}",
                    tuple(addresses),
                    lambda holder: fetch_contents(self._calls.client, addresses[holder], digest),
                    lambda holder, error: self._calls.note_failure(
                        holder, addresses[holder], error
                    ),
                    attempts=attempts,
                )
            except HolderUnreachable as error:
                return error

        unreachable: dict[str, HolderUnreachable] = {}
        # Several at once, each from another peer: a large job would wait long for one by one.
        with ThreadPoolExecutor(_MANIFESTS_AT_ONCE, "eckpt-manifests") as pool:
            for digest, answer in zip(digests, pool.map(read, digests), strict=True):
                if isinstance(answer, HolderUnreachable):
                    unreachable[digest] = answer
                elif answer is not None:
                    self._contents[digest] = answer
        return unreachable


def passed_over_unread(
    answer: RestorePlan | NoPlan,
    unread: Iterable[tuple[str, SaveId]],
    requested_step: int | None,
    *,
    stored: Mapping[int, str],
    loaded_steps: Container[int],
    is_patient: bool,
) -> list[str]:
    """Return the digests of unread manifests whose saves, if complete, would go before ``answer``.

    Pure. Without these manifests ``answer`` is not known to be the newest complete step. Where the
    answer is a step in storage, or an end at a step, the same step in RAM goes before it. Such a
    step is as good as the one in storage, and so not worth a long wait (``is_patient``), unless it
    lies in RAM because this restore has loaded it.
    """
    digests: list[str] = []
    for digest, save in unread:
        if requested_step not in (None, save.step):
            continue
        if requested_step is not None and not is_patient:
            # One that was not rolled back goes before one that was, of whatever incarnation.
            goes_before = not (isinstance(answer, RestorePlan) and answer.save == save)
        elif isinstance(answer, RestorePlan) and answer.save is not None:
            before = answer.save
            goes_before = (save.step, save.incarnation) > (before.step, before.incarnation)
        elif isinstance(answer, RestorePlan):
            goes_before = save.step > answer.step
            if save.step == answer.step:
                is_later = save.incarnation > stored[save.step]
                goes_before = not is_patient or is_later or save.step in loaded_steps
        elif answer.kind in _ENDS and answer.step is not None:
            goes_before = save.step > answer.step
            goes_before |= not is_patient and save.step == answer.step
        else:
            goes_before = True
        if goes_before:
            digests.append(digest)
    return digests
