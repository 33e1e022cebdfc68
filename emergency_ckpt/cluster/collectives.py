"""Collective calls over the coordination service: gather, share, agree.

Built from keys and counts alone, because the service never forgets the name of a barrier but
forgets a key as soon as it is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emergency_ckpt.cluster.coordination import JOINED_LIMIT_CHARS, Coordinator, joined_errors
from emergency_ckpt.cluster.departures import departed
from emergency_ckpt.cluster.messages import reason_of
from emergency_ckpt.cluster.round import wait_for_key
from emergency_ckpt.errors import CoordinationError, DeadlineExceeded, ForgedValue, PeerLeft

_ALL_CAME = "all have come"
"""The leader found all values itself: another writer has counted, or no process could."""


def gather(coordinator: Coordinator, name: str, value: bytes, timeout_s: float) -> dict[int, bytes]:
    """Gather one ``value`` per process at the leader, process 0; others get {}. Collective.

    Only the leader waits. DeadlineExceeded names the processes that did not come, and PeerLeft one
    that has left.
    """
    coordinator.put(f"{name}/{coordinator.process_index}", value)
    if coordinator.count(f"{name}.n") == coordinator.process_count:
        coordinator.put(f"{name}.all", b"")
    if coordinator.process_index != 0:
        return {}

    def why_to_stop() -> str:
        missing = _missing(coordinator, name)
        if not missing:
            return _ALL_CAME
        return "; ".join(departed(coordinator, missing).values())

    try:
        wait_for_key(coordinator, f"{name}.all", timeout_s, why_to_stop, prompt=True)
    except DeadlineExceeded as error:
        raise _not_all_came(coordinator, name, timeout_s) from error
    except PeerLeft as error:
        if error.problem != _ALL_CAME:
            raise
    return _all_values(coordinator, name)


def _all_values(coordinator: Coordinator, name: str) -> dict[int, bytes]:
    """Return the value of each process below ``name``, at the leader, once all have come."""
    found = coordinator.list(name)
    for process in range(coordinator.process_count):
        if str(process) not in found:
            raise ForgedValue(
                "gather",
                f"{name}/{process}",
                f"it is missing although all processes came: it was deleted, or {name}.n changed",
            )
    return {process: found[str(process)] for process in range(coordinator.process_count)}


def _missing(coordinator: Coordinator, name: str) -> list[int]:
    present = coordinator.list(name)
    return [p for p in range(coordinator.process_count) if str(p) not in present]


def _not_all_came(coordinator: Coordinator, name: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        "gather",
        name,
        f"not all processes came within {timeout_s:g} s",
        missing=[f"process {p}" for p in _missing(coordinator, name)],
        hint="look at the logs of the missing processes",
    )


def share(
    coordinator: Coordinator,
    name: str,
    value: bytes | None,
    timeout_s: float,
    gathered: str | None = None,
) -> bytes:
    """Return the leader's ``value`` on every process. Collective.

    ``gathered``: name of the ``gather`` on which the leader decides. DeadlineExceeded then names
    the processes for which it waits.
    """
    if coordinator.process_index == 0:
        if value is None:
            raise CoordinationError("share", name, "the leader has nothing to share")
        coordinator.put(name, value)
        return value
    return await_leader(coordinator, name, timeout_s, gathered)


def await_leader(
    coordinator: Coordinator, key: str, timeout_s: float, gathered: str | None = None
) -> bytes:
    """Return the leader's value at ``key``. Errors and ``gathered`` as for ``share``."""

    def who_never_comes() -> str:
        missing = {0} if gathered is None else {0, *_missing(coordinator, gathered)}
        return "; ".join(departed(coordinator, missing).values())

    try:
        return wait_for_key(coordinator, key, timeout_s, who_never_comes, prompt=True)
    except DeadlineExceeded as error:
        if gathered is None or not _missing(coordinator, gathered):
            raise
        raise _not_all_came(coordinator, gathered, timeout_s) from error


def exchange(
    coordinator: Coordinator,
    name: str,
    value: bytes,
    decide: Callable[[Mapping[int, bytes]], bytes],
    timeout_s: float,
) -> bytes:
    """Return the leader's decision on one ``value`` per process, on every process. Collective."""
    found = gather(coordinator, name, value, timeout_s)
    decision = decide(found) if coordinator.process_index == 0 else None
    return share(coordinator, f"{name}.agreed", decision, timeout_s, gathered=name)


def agree(coordinator: Coordinator, name: str, error: str, timeout_s: float) -> str:
    """Return the errors of all processes in one line, the same everywhere, or an empty text.

    Collective. ``error``: this process's own, empty when it has none.
    """
    own = error[:JOINED_LIMIT_CHARS].encode()

    def join(found: Mapping[int, bytes]) -> bytes:
        return joined_errors({p: reason_of(data) for p, data in found.items()}).encode()

    return reason_of(exchange(coordinator, name, own, join, timeout_s))
