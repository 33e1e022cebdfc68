"""The start of a job's life: server, addresses and incarnation, agreed by all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from emergency_ckpt.cluster.collectives import gather, share
from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    Coordinator,
    deadline_left_s,
)
from emergency_ckpt.cluster.incarnations import new_incarnation
from emergency_ckpt.cluster.messages import decode_each, decode_message, text_of
from emergency_ckpt.core.limits import MAX_MESSAGE_BYTES
from emergency_ckpt.errors import CheckpointError, RestoreFailed
from emergency_ckpt.tiers.local.manifest import decode_contents
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import Contents, SaveId

_ADDRESS_TIMEOUT_S = 30.0


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: str
    error: str


class _Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    incarnation: str
    error: str


class Peers:
    """Access to the other processes of the job by process index. Thread-safe."""

    def __init__(self, coordinator: Coordinator, client: TransferClient) -> None:
        self._coordinator = coordinator
        self.client = client
        self._lock = threading.Lock()
        self._addresses: dict[int, str] = {}

    def address_of(self, process: int) -> str:
        """Return the transfer address of ``process``; asked of the coordination service once."""
        with self._lock:
            known = self._addresses.get(process)
        if known is None:
            key = f"address/{process}"
            known = text_of(self._coordinator.get(key, _ADDRESS_TIMEOUT_S), key)
            with self._lock:
                self._addresses[process] = known
        return known

    def push_host_state(
        self, process: int, save: SaveId, data: bytes, *, for_storage: bool = False
    ) -> None:
        """Send ``process`` a copy of this process's host state; published on return. Blocks.

        ``for_storage``: for a save to storage; it is in the memory of ``process`` on return.
        """
        me, count = self._coordinator.process_index, self._coordinator.process_count
        address = self.address_of(process)
        self.client.push_host_state(address, save, me, count, data, for_storage=for_storage)

    def fetch_contents(self, process: int, digest: str) -> Contents:
        """Return the contents of a manifest that ``process`` holds. Blocks."""
        return fetch_contents(self.client, self.address_of(process), digest)


def fetch_contents(client: TransferClient, address: str, digest: str) -> Contents:
    """Return the contents of a manifest at ``address``, checked against every rule of FORMAT.md.

    CorruptData when they break a rule or have another digest; TransferError when they do not
    arrive.
    """
    return decode_contents(client.fetch_contents_bytes(address, digest), digest)


def agree_start(coordinator: Coordinator, start: Callable[[], str], timeout_s: float) -> str:
    """Run ``start`` (which returns this process's address) on all; return the incarnation.

    Collective: when it fails on one process, every process raises.
    """
    deadline_s = time.monotonic() + timeout_s
    failure: Exception | None = None
    address = ""
    try:
        address = start()
        coordinator.put(f"address/{coordinator.process_index}", address.encode())
    except (CheckpointError, OSError) as error:
        failure = error
    hello = _Hello(address, "" if failure is None else str(failure)[:ERROR_LIMIT_CHARS])
    found = gather(coordinator, "hello", msgspec.json.encode(hello), deadline_left_s(deadline_s))
    verdict = None
    if coordinator.process_index == 0:
        hellos = decode_each(found, _Hello, "hello", lambda text: _Hello("", text))
        verdict = msgspec.json.encode(_Verdict(new_incarnation(), _objection(hellos)))
    data = share(coordinator, "started", verdict, deadline_left_s(deadline_s), "hello")
    agreed = decode_message(data, _Verdict, "started", limit_bytes=MAX_MESSAGE_BYTES)
    if failure is not None:
        raise failure
    if agreed.error:
        raise RestoreFailed("start", "the job", agreed.error)
    return agreed.incarnation


def _objection(hellos: dict[int, _Hello]) -> str:
    failed = {p: hello.error for p, hello in sorted(hellos.items()) if hello.error}
    return "; ".join(f"process {p}: {error}" for p, error in list(failed.items())[:4])
