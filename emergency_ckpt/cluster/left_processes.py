"""The processes that have left the job or died, and why, so that no process waits for them.

A leaving process announces it twice. At once (``LEAVING``): the reason, and the newest save that it
has begun in each tier. It still finishes these, so the others wait for it in them and not in later
ones. When it has released everything (``GONE``): nothing more comes from it.

A process that dies announces nothing. Its connections close, its port refuses new ones, or its host
answers no more; ``core.peer_state`` has the rule. Who finds it dead announces it in its place
(``DIED``), because only its peers had a connection to it.

A process that has come to a later save, and so takes no part in one that it left out, says that too
(``come_to``). ``LeftProcesses.absent`` puts all of this together: nobody else says who is absent.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping

import msgspec
from absl import logging

from emergency_ckpt.cluster.coordination import (
    Coordinator,
    by_process,
    decode_each,
    decode_message,
    reason_of,
)
from emergency_ckpt.core.address import parse_address, split_holder
from emergency_ckpt.core.limits import MAX_MESSAGE_BYTES
from emergency_ckpt.core.peer_state import PRESENT, PeerState, Signs, decide
from emergency_ckpt.core.timeline import number_of
from emergency_ckpt.errors import CheckpointError, PeerAbsent, PeerLeft
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import SaveId, TierName

_PROBE_TIMEOUT_S = 1.0
_PROBED_AT_ONCE = 4
_PAUSE_S = 1.0
_IDLE_S = 5.0
"""The watch ends this long after the last look."""


class PeerSigns:
    """Signs of the processes that this one has asked. Thread-safe."""

    def __init__(
        self, address_of: Callable[[int], str], client: TransferClient | None = None
    ) -> None:
        """``client``: greets, so that a sound peer is asked politely; None: only connects."""
        self._address_of = address_of
        self._client = client
        self._lock = threading.Lock()
        self._silent_since_s: dict[int, float] = {}

    def is_suspect(self, process: int) -> bool:
        """Return whether there is a sign against ``process`` already. Asks nobody."""
        with self._lock:
            if process in self._silent_since_s:
                return True
        address = self._address(process)
        return bool(address and self._client and self._client.has_closed(address))

    def probe(self, process: int) -> PeerState:
        """Try to connect to ``process``, and decide. Blocks for two seconds at most.

        A process whose address is not known yet is present.
        """
        address = self._address(process)
        if address is None:
            return PRESENT
        closed = self._client is not None and self._client.has_closed(address)
        error = self._failure(address)
        refused = error is not None and error.errno == errno.ECONNREFUSED
        with self._lock:
            if error is None or refused:
                self._silent_since_s.pop(process, None)
                return decide(Signs(closed, refused) if refused else Signs())
            now_s = time.monotonic()
            silent_s = now_s - self._silent_since_s.setdefault(process, now_s)
        return decide(Signs(closed, silent_s=silent_s))

    def _address(self, process: int) -> str | None:
        try:
            return self._address_of(process)
        except CheckpointError:
            return None

    def _failure(self, address: str) -> OSError | None:
        """Return why no connection can be made to ``address``; None where its host accepts one."""
        if self._client is not None:
            try:
                self._client.greet(address, _PROBE_TIMEOUT_S, fresh=True)
            except CheckpointError:
                pass  # a slow or busy process: the kernel of its host says whether it is there
            else:
                return None
        try:
            place = parse_address(split_holder(address)[1])
            with socket.create_connection(place, _PROBE_TIMEOUT_S):
                return None
        except OSError as error:
            return error


LEAVING = "leaving"
GONE = "gone"
DIED = "died"
_AT = "at"
_ASKED_ALONE = 2
"""So few processes are asked for by their keys; the list of all grows with the job."""
_REASON_LIMIT_CHARS = 500
_PROBED_AT_MOST = 4


Place = tuple[int, int, str]
"""Number of a save's life, its step, and the part that a forced save adds to the incarnation.

Short, because every process says it with each save."""


class _Leaving(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``begun``: the newest save begun in each tier, as of ``in_order``."""

    reason: str
    begun: dict[str, Place]


def in_order(save: SaveId) -> Place:
    """Return a key that rises with each save of a process.

    Later lives sort later, and so does a step that is forced again within one.
    """
    return number_of(save.incarnation), save.step, save.incarnation.partition(".")[2]


def has_come_to(process: int, step: int) -> str:
    """Return the sentence about a process that takes no part in a save before ``step``."""
    return f"process {process} did not save it: it has come to the save of step {step}"


def leaving(coordinator: Coordinator) -> dict[int, str]:
    """Return the processes that begin no more saves, each with a sentence."""
    everyone = range(coordinator.process_count)
    found = sorted(_leaving(coordinator, everyone).items())
    return {p: f"process {p} has left: {leaving.reason}" for p, leaving in found}


def have_left(coordinator: Coordinator, processes: Collection[int]) -> dict[int, str]:
    """Return those of ``processes`` that have left for good or died, each with a sentence."""
    found: dict[int, str] = {}
    for kind, verb in ((DIED, "died"), (GONE, "left")):
        each = _said(coordinator, kind, processes)
        found.update({p: f"process {p} has {verb}: {reason_of(why)}" for p, why in each.items()})
    return dict(sorted(found.items()))


def _leaving(coordinator: Coordinator, processes: Collection[int]) -> dict[int, _Leaving]:
    """Return the announcements; an unreadable one counts as left, without any save begun."""
    found = _said(coordinator, LEAVING, processes)
    return decode_each(found, _Leaving, LEAVING, lambda text: _Leaving(text, {}))


def _said(coordinator: Coordinator, kind: str, processes: Collection[int]) -> dict[int, bytes]:
    """Return the values below ``kind`` of those of ``processes`` that have one."""
    if len(processes) <= _ASKED_ALONE:
        each = {process: coordinator.find(f"{kind}/{process}") for process in processes}
        return {process: value for process, value in each.items() if value is not None}
    found = by_process(coordinator.list(kind), kind, coordinator.process_count)
    return {process: value for process, value in found.items() if process in processes}


class LeftProcesses:
    """The announcement of this process, and those of the others. Thread-safe."""

    def __init__(self, coordinator: Coordinator, signs: PeerSigns | None = None) -> None:
        """``signs``: of the other processes; None: dead ones are not detected."""
        self._coordinator = coordinator
        self._signs = signs
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def leave(self, reason: str, begun: Mapping[TierName, SaveId]) -> None:
        """Announce that this process begins no more saves. Idempotent; never raises."""
        saves: dict[str, Place] = {tier: in_order(s) for tier, s in begun.items()}
        leaving = _Leaving(reason[:_REASON_LIMIT_CHARS], saves)
        self._say(LEAVING, msgspec.json.encode(leaving))

    def gone(self, reason: str) -> None:
        """Announce that nothing more comes from this process. Idempotent; never raises."""
        self._say(GONE, reason[:_REASON_LIMIT_CHARS].encode())

    def come_to(self, tier: TierName, save: SaveId) -> None:
        """Say that this process has come to ``save``: it takes part in none before it."""
        key = f"{_AT}/{tier}/{self._coordinator.process_index}"
        self._coordinator.replace(key, msgspec.json.encode(in_order(save)))

    def left(self) -> Collection[int]:
        """Return the processes that have left for good."""
        return _said(self._coordinator, GONE, range(self._coordinator.process_count)).keys()

    def died(self) -> dict[int, str]:
        """Return the processes that were found dead, by any process, each with a reason."""
        found = _said(self._coordinator, DIED, range(self._coordinator.process_count))
        return {process: reason_of(data) for process, data in found.items()}

    def say_died(self, process: int, reason: str) -> None:
        """Announce that ``process`` was found dead. Never raises; another may have said it."""
        text = f"process {self._coordinator.process_index} found: {reason}"
        try:
            self._coordinator.put(f"{DIED}/{process}", text[:_REASON_LIMIT_CHARS].encode())
        except CheckpointError as error:
            logging.info("process %d was found dead; it is not announced: %s", process, error)

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
            # The service has ended too, so no process is left to read it.
            logging.info("leaving without telling the other processes: %s", error)

    def absent(self, tier: TierName, save: SaveId, processes: Collection[int]) -> dict[int, str]:
        """Return those of ``processes`` that take no part in ``save``, each with a sentence.

        Blocks for about a second for each of at most a few processes whose hosts do not answer.
        """
        coordinator = self._coordinator
        found = have_left(coordinator, processes)
        for process, leaving in _leaving(coordinator, processes).items():
            if leaving.begun.get(tier, (-1, -1, "")) < in_order(save):
                found[process] = f"process {process} has left: {leaving.reason}"
        kind = f"{_AT}/{tier}"
        for process, data in _said(coordinator, kind, processes).items():
            name = f"{kind}/{process}"
            at: Place = decode_message(data, Place, name, limit_bytes=MAX_MESSAGE_BYTES)
            if at > in_order(save):
                found[process] = has_come_to(process, at[1])
        return dict(sorted(found.items())) or self._without_signs_of_life(processes)

    def _without_signs_of_life(self, processes: Collection[int]) -> dict[int, str]:
        if self._signs is None:
            return {}
        found: dict[int, str] = {}
        for process in sorted(processes)[:_PROBED_AT_MOST]:
            if process == self._coordinator.process_index:
                continue
            state = self._signs.probe(process)
            if state.kind == "dead":
                self.say_died(process, state.reason)
            if state.kind != "present":
                found[process] = f"process {process} has ended: {state.reason}"
        return found


class DeathWatch:
    """Looks at a few peers at a time, in a thread of its own, while somebody waits. Thread-safe."""

    def __init__(
        self,
        signs: PeerSigns,
        peers: Callable[[], Collection[int]],
        announcements: LeftProcesses,
    ) -> None:
        """``peers``: the processes that this one has had to do with."""
        self._signs = signs
        self._peers = peers
        self._announcements = announcements
        self._lock = threading.Lock()
        self._asked_s = 0.0
        self._is_running = False
        self._turn = 0
        self._found: dict[int, PeerState] = {}

    def inspect(self) -> None:
        """Raise PeerLeft when a process was found dead, PeerAbsent when one gives no sign of life.

        Does not block: what is found is known a second or two after the first look.
        """
        with self._lock:
            self._asked_s = time.monotonic()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="eckpt-deaths", daemon=True).start()
            found = sorted(self._found.items())
        for process, state in found:
            if state.kind == "dead":
                hint = "restart the job; it finds the newest complete step"
                problem = f"process {process} has died: {state.reason}"
                raise PeerLeft("wait for", "the other processes", problem, hint=hint)
        for process, state in found:
            if state.kind == "absent":
                hint = "training goes on where it comes back; JAX ends the job where it does not"
                problem = f"process {process} gives no sign of life: {state.reason}"
                raise PeerAbsent("wait for", "the other processes", problem, hint=hint)

    def _run(self) -> None:
        while True:
            with self._lock:
                if time.monotonic() - self._asked_s > _IDLE_S:
                    self._found = {}  # a later wait looks anew
                    self._is_running = False
                    return
            try:
                self._round()
            except CheckpointError as error:
                # Without it nobody can tell a death from an end, and JAX ends the process soon.
                logging.warning("it is not known who has left or died: %s", error)
            time.sleep(_PAUSE_S)

    def _round(self) -> None:
        peers = sorted(self._peers())
        asked = min(_PROBED_AT_ONCE, len(peers))
        self._turn += asked
        turn = {peers[(self._turn + i) % len(peers)] for i in range(asked)}
        suspects = [process for process in peers if self._signs.is_suspect(process)]
        turn.update(suspects[:_PROBED_AT_ONCE])
        found = {process: self._signs.probe(process) for process in sorted(turn)}
        # Who has left has closed its port; it had said so before.
        left, died = self._announcements.left(), self._announcements.died()
        found.update({process: decide(Signs(said=reason)) for process, reason in died.items()})
        with self._lock:
            self._found = {p: s for p, s in {**self._found, **found}.items() if p not in left}
        for process, state in found.items():
            if state.kind == "dead" and process not in {*left, *died}:
                self._announcements.say_died(process, state.reason)
