"""Holders outside of the job: ``eckpt serve`` on hosts whose trainer is not part of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.events import EventSink
from emergency_ckpt.restore.shards.holder_calls import HolderCalls
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.names import each_address

_TIMEOUT_S = 10.0
"""Longest wait for a configured holder that does not answer: it may be gone for good."""
_THREADS = 32


def ask_extra_holders(
    client: TransferClient, events: EventSink, addresses: Sequence[str], deadline_s: float
) -> list[HolderInventory]:
    """Return the inventories of those that answer in time; the others are named by an event.

    A name with several addresses, such as that of a headless service, stands for a server at each.
    ``deadline_s``: of the restore, by ``time.monotonic``.
    """
    if not addresses:
        return []

    def ask(address: str) -> HolderInventory | None:
        left_s = deadline_s - time.monotonic()
        calls = HolderCalls(events, time.monotonic() + min(_TIMEOUT_S, left_s / 8))
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
