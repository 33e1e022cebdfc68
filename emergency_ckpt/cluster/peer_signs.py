"""Signs that other processes have died, and the watch that looks for them while somebody waits.

A process that dies announces nothing. Its connections close, its port refuses new ones, or its host
answers no more; ``core.peer_state`` has the rule. Who finds a process dead says so to all
(``left_processes``), because only its peers had a connection to it.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from absl import logging

from emergency_ckpt.core.address import parse_address, split_holder
from emergency_ckpt.core.peer_state import PRESENT, PeerState, Signs, decide
from emergency_ckpt.errors import CheckpointError, PeerAbsent, PeerLeft

_PROBE_TIMEOUT_S = 1.0
_PROBED_AT_ONCE = 4
_PAUSE_S = 1.0
_IDLE_S = 5.0
"""The watch ends this long after the last look."""


class Greeter(Protocol):
    """The part of a transfer client that meets a peer; see ``transfer.client.TransferClient``."""

    def greet(self, address: str, within_s: float, *, fresh: bool = False) -> None:
        """Complete a handshake. TransferError."""
        ...

    def has_closed(self, address: str) -> bool:
        """Return whether a kept connection was closed from there, and none was made since."""
        ...


class PeerSigns:
    """Signs of the processes that this one has asked. Thread-safe."""

    def __init__(self, address_of: Callable[[int], str], client: Greeter | None = None) -> None:
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


class Announcements(Protocol):
    """The announcements of those that left or were found dead; see ``LeftProcesses``."""

    def left(self) -> Collection[int]:
        """Return the processes that have left."""
        ...

    def died(self) -> dict[int, str]:
        """Return the processes that were found dead, by any process, each with a reason."""
        ...

    def say_died(self, process: int, reason: str) -> None:
        """Announce that ``process`` was found dead. Never raises."""
        ...


class DeathWatch:
    """Looks at a few peers at a time, in a thread of its own, while somebody waits. Thread-safe."""

    def __init__(
        self,
        signs: PeerSigns,
        peers: Callable[[], Collection[int]],
        announcements: Announcements,
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

    def look(self) -> None:
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
