"""Collective calls over the coordination service: gather, share, agree.

Built from keys and counts alone, because the service never forgets the name of a barrier but
forgets a key as soon as it is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from emergency_ckpt.cluster.coordination import JOINED_LIMIT_CHARS, Coordinator, joined_errors
from emergency_ckpt.cluster.messages import by_process, reason_of
from emergency_ckpt.errors import CoordinationError, DeadlineExceeded, ForgedValue, PeerLeft

GONE = "gone"
"""Prefix of the keys of processes that have left; see ``departures``."""
DIED = "died"
"""Prefix of the keys of processes that others have found dead."""
_ALL_CAME = "all have come"
"""The leader found all values itself: another writer has counted, or no process could."""
_FIRST_LOOK_S = 1.0
_LONGEST_SLICE_S = 8.0
_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


def wait_for_key(
    coordinator: Coordinator,
    key: str,
    timeout_s: float,
    look: Callable[[], str] | None = None,
    *,
    prompt: bool = False,
) -> bytes:
    """Return the value of ``key`` once it is set.

    Args:
      look: called at intervals while the key is not set; returns the reason why it never will be,
        or an empty text. After a reason the key is read once more. An error of ``look`` ends the
        wait.
      prompt: return as soon as it is set, at the price of some 15 kB of the service's memory for
        each wait until then. Otherwise the call returns up to two seconds later, and no thread
        stays inside the service's client for longer than a second.

    Raises:
      PeerLeft: ``look`` gave a reason. DeadlineExceeded. CoordinationError.
    """
    deadline_s = time.monotonic() + timeout_s
    slice_s, pause_s = _FIRST_LOOK_S, _SHORTEST_PAUSE_S
    value: bytes | None = _get_within(coordinator, key, min(timeout_s, slice_s))
    while value is None:
        reason = "" if look is None else look()
        value = coordinator.find(key)
        if value is not None:
            break
        if reason:
            raise PeerLeft("wait for", key, reason)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("wait for", key, f"not set within {timeout_s:g} s")
        if prompt:
            slice_s = min(2 * slice_s, _LONGEST_SLICE_S)
            value = _get_within(coordinator, key, min(slice_s, left_s))
        else:
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return value


def _get_within(coordinator: Coordinator, key: str, timeout_s: float) -> bytes | None:
    try:
        return coordinator.get(key, timeout_s)
    except DeadlineExceeded:
        return None


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
        return "; ".join(gone for p, gone in departed(coordinator).items() if p in missing)

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


def departed(coordinator: Coordinator) -> dict[int, str]:
    """Return a sentence for each process that has left this job for good; see ``departures``."""
    found: dict[int, str] = {}
    for prefix, verb in ((DIED, "died"), (GONE, "left")):
        each = by_process(coordinator.list(prefix), prefix, coordinator.process_count)
        found.update({p: f"process {p} has {verb}: {reason_of(why)}" for p, why in each.items()})
    return dict(sorted(found.items()))


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
        gone = departed(coordinator)
        missing = {0} if gathered is None else {0, *_missing(coordinator, gathered)}
        return "; ".join(text for p, text in gone.items() if p in missing)

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
