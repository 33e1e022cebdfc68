"""Access to the other processes, the start of an incarnation, and peers that died silently."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping

import msgspec

from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    Coordinator,
    deadline_left_s,
    decode_each,
    decode_message,
    joined_errors,
)
from emergency_ckpt.cluster.left_processes import have_left
from emergency_ckpt.cluster.round import Round
from emergency_ckpt.core.timeline import new_incarnation
from emergency_ckpt.core.wording import unexpected_text, valid_text
from emergency_ckpt.errors import CheckpointError, PeerLeft, RestoreFailed
from emergency_ckpt.ram.manifest import decode_contents
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import Contents, SaveId

_HELLO = "hello"
"""The round in which all processes join."""
_ADDRESS_TIMEOUT_S = 30.0
_GREETING_TIMEOUT_S = 1.0


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Knowledge of the run in RAM or storage when an incarnation begins.

    Attributes:
      greatest: the greatest number of an incarnation; 0 without any.
      newest_step: the newest step that was not rolled back; -1 without any.
      complete: the newest save that is on record in RAM as complete on all processes.
      unread: why storage, which may know of the run, could not be read; else empty.
    """

    greatest: int = 0
    newest_step: int = -1
    complete: SaveId | None = None
    unread: str = ""


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message of a process at the start. It stays in the service: peers read its address."""

    address: str
    known: Known
    error: str


class Started(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An incarnation that has begun on all processes, and the newest that any of them knew.

    Attributes:
      unread: why storage could not be read; else empty.
      error: why the incarnation has not begun; empty when it has.
    """

    incarnation: str
    newest_step: int = -1
    complete: SaveId | None = None
    unread: str = ""
    error: str = ""


class Peers:
    """Access to the other processes of the job by process index. Thread-safe."""

    def __init__(self, coordinator: Coordinator, client: TransferClient) -> None:
        self._coordinator = coordinator
        self.client = client
        self._lock = threading.Lock()
        self._addresses: dict[int, str] = {}

    def address_of(self, process: int) -> str:
        """Return the transfer address of ``process``, read from the coordination service once."""
        with self._lock:
            address = self._addresses.get(process)
        if address is None:
            key = f"{_HELLO}/{process}"
            data = self._coordinator.get(key, _ADDRESS_TIMEOUT_S)
            hello: _Hello = decode_message(data, _Hello, key)
            address = hello.address
            with self._lock:
                self._addresses[process] = address
        return address

    def known(self) -> frozenset[int]:
        """Return the processes that this process has made requests to."""
        with self._lock:
            return frozenset(self._addresses) - {self._coordinator.process_index}

    def push_host_state(
        self, process: int, save: SaveId, data: bytes, *, for_storage: bool = False
    ) -> None:
        """Send ``process`` a copy of this process's host state; published on return. Blocks.

        ``for_storage``: for a save to storage; the copy is in the memory of ``process`` on return.
        """
        me, count = self._coordinator.process_index, self._coordinator.process_count
        address = self.address_of(process)
        self.client.push_host_state(address, save, me, count, data, for_storage=for_storage)

    def fetch_contents(self, process: int, digest: str) -> Contents:
        """Return the contents of a manifest that ``process`` holds. Blocks."""
        return fetch_contents(self.client, self.address_of(process), digest)


class LostPeers:
    """Finds peers that died without a report, for a wait inside ``save``. For the training thread.

    The arrays of a state may wait for a dead process in a collective. JAX ends its wait for an
    array only by its heartbeats, 100 s later. When a process dies, its host's kernel closes the
    process's connections and refuses new connections to its port; both together are the proof of a
    death. A server that has closed an idle connection still takes new connections: a handshake with
    it proves the run's secret, so that the peer sees no stranger, and the new connection is kept,
    so that the peer is no suspect any longer. A partition, or a host that is gone, neither closes
    nor refuses connections: such losses are left to JAX's heartbeats and to the engine that runs
    the job.
    """

    def __init__(self, coordinator: Coordinator, peers: Peers) -> None:
        self._coordinator = coordinator
        self._peers = peers
        self._turn = 0

    def inspect(self) -> None:
        """Check one suspect, another one each time. Blocks for about a second at most.

        Raises:
          PeerLeft: the suspect has died.
        """
        suspects = [peer for peer in sorted(self._peers.known()) if self._has_closed(peer)]
        if not suspects:
            return
        self._turn += 1
        suspect = suspects[self._turn % len(suspects)]
        if not self._refuses(suspect):
            return
        try:
            if suspect in have_left(self._coordinator, [suspect]):
                return  # it has ended as intended: it announced that, and then closed its port
        except CheckpointError:
            return  # without the service, a death cannot be distinguished from an end
        problem = (
            f"process {suspect} has died: its connections were closed, and its host refuses new"
            " ones to its port"
        )
        hint = "restart the job; it finds the newest complete step"
        raise PeerLeft("wait for", "the other processes", problem, hint=hint)

    def _has_closed(self, peer: int) -> bool:
        try:
            return self._peers.client.has_closed(self._peers.address_of(peer))
        except CheckpointError:
            return False  # the peer's address is not known

    def _refuses(self, peer: int) -> bool:
        """Return whether the peer's port is closed; make a new connection to keep where it is not.

        A reset or a silence is no refusal.
        """
        try:
            self._peers.client.greet(self._peers.address_of(peer), _GREETING_TIMEOUT_S)
        except CheckpointError as error:
            return isinstance(error.__cause__, ConnectionRefusedError)
        return False


def fetch_contents(client: TransferClient, address: str, digest: str) -> Contents:
    """Return the contents of a manifest at ``address``, checked against every rule of FORMAT.md.

    CorruptData when the contents break a rule or have another digest; TransferError when they do
    not arrive.
    """
    return decode_contents(client.fetch_contents(address, digest), digest)


@contextlib.contextmanager
def start_told(coordinator: Coordinator) -> Generator[None]:
    """Report an error inside to the others, which wait for this process in ``agree_start``.

    Does not block. A coordination error is not raised, because the caller's error matters more.
    """
    try:
        yield
    except Exception as error:
        text = _text_of(error)
        try:
            hello_round = Round(coordinator, _HELLO, 0.0)
            hello_round.say(msgspec.json.encode(_Hello("", Known(), text)))
            if coordinator.process_index == 0:
                hello_round.tell(msgspec.json.encode(Started("", error=f"process 0: {text}")))
        except CheckpointError as failure:
            error.add_note(f"The other processes got no report of this: {failure}")
        raise


def _text_of(error: Exception) -> str:
    """Return what the others are told of ``error``, whatever characters its text has."""
    text = str(error)
    if not isinstance(error, CheckpointError | OSError):
        text = unexpected_text(error)
    return valid_text(text, ERROR_LIMIT_CHARS)


def agree_start(
    coordinator: Coordinator,
    start: Callable[[], tuple[str, Known]],
    timeout_s: float,
    stored: Callable[[], Known] = Known,
) -> Started:
    """Run ``start`` on all processes, and begin an incarnation after all that are known anywhere.

    Collective: when it fails on one process, every process raises.

    Args:
      start: returns this process's address and what its RAM knows.
      stored: returns what storage knows; called at the leader once all processes have come.
    """
    deadline_s = time.monotonic() + timeout_s
    failure: Exception | None = None
    address, knowledge = "", Known()
    try:
        address, knowledge = start()
    except Exception as error:  # noqa: BLE001 - raised below; the others wait for this process
        failure = error
    hello = _Hello(address, knowledge, "" if failure is None else _text_of(failure))
    hello_round = Round(coordinator, _HELLO, deadline_left_s(deadline_s), prompt=True)

    def begin(said: Mapping[int, bytes]) -> bytes:
        hellos = decode_each(said, _Hello, "hello", lambda text: _Hello("", Known(), text))
        error = joined_errors({process: hello.error for process, hello in hellos.items()})
        if error:
            return msgspec.json.encode(Started("", error=error))
        try:
            reports = [stored(), *(hello.known for hello in hellos.values())]
            greatest = max(report.greatest for report in reports)
            incarnation = new_incarnation(greatest, secrets.token_hex(8))
        except CheckpointError as refusal:  # the other processes wait for the answer
            return msgspec.json.encode(
                Started("", error=valid_text(str(refusal), ERROR_LIMIT_CHARS))
            )
        complete = max((report.complete for report in reports if report.complete), default=None)
        newest_step = max(report.newest_step for report in reports)
        unread = valid_text(reports[0].unread, ERROR_LIMIT_CHARS)
        return msgspec.json.encode(Started(incarnation, newest_step, complete, unread))

    try:
        data = hello_round.hold(msgspec.json.encode(hello), hello_round.when_all(begin))
    except CheckpointError as error:
        if failure is not None:
            raise failure from error
        raise
    agreed = decode_message(data, Started, "hello.told")
    if failure is not None:
        raise failure
    if agreed.error:
        raise RestoreFailed("start", "the job", agreed.error)
    return agreed
