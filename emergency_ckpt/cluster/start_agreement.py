"""The first round of a start: equal settings on every process, and a name for the start.

It precedes everything that depends on a setting. A job in which ``dir`` differs would otherwise
wait in two places for processes that never come there.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Mapping

import msgspec

from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    Coordinator,
    deadline_left_s,
    joined_errors,
)
from emergency_ckpt.cluster.messages import by_process, decode_each, decode_message
from emergency_ckpt.core.limits import MAX_MESSAGE_BYTES
from emergency_ckpt.core.settings_agreement import differing_settings
from emergency_ckpt.errors import ConfigError, CoordinationError, DeadlineExceeded

_TOLD_LATE_S = 5.0
"""Time that the leader's decision may arrive after its deadline."""
_LOOK_S = 1.0
"""Interval at which the leader checks all processes while it waits for one."""
_PAUSE_S = 0.1
_MOST_LINES = 20


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    problem: str


class _Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``differ``: each process must publish its settings. ``start``: the name, on success."""

    start: str = ""
    error: str = ""
    missing: tuple[str, ...] = ()
    differ: bool = False


def tell_problem(coordinator: Coordinator, error: ConfigError) -> None:
    """Tell the others that this process's settings are invalid, so that none waits for it.

    Does not block. A coordination error is not raised, because the caller's error matters more.
    """
    problem = str(error)[:ERROR_LIMIT_CHARS]
    try:
        _say_hello(coordinator, _Hello("", problem))
        if coordinator.process_index == 0:
            _decide(coordinator, _Decision(error=f"process 0: {problem}"))
    except CoordinationError as failure:
        error.add_note(f"The other processes were not told: {failure}")


def agree_settings(coordinator: Coordinator, own: Mapping[str, str], timeout_s: float) -> str:
    """Return the unique name of this start of the job. Collective; blocks.

    ``own``: text of each setting that must be equal on all processes.

    Raises:
      ConfigError: a setting differs, or is invalid on some process; raised on all of them once the
        last process has come. DeadlineExceeded: a process did not come; names it.
    """
    deadline_s = time.monotonic() + timeout_s
    _say_hello(coordinator, _Hello(settings_digest(own), ""))
    decision = (
        _lead(coordinator, deadline_s)
        if coordinator.process_index == 0
        else _follow(coordinator, timeout_s)
    )
    if decision.missing:
        raise _not_all_came(timeout_s, decision.missing)
    if decision.differ:
        # Only when they differ, because the texts of all processes are large.
        coordinator.put(f"settings.told/{coordinator.process_index}", msgspec.json.encode(own))
        raise ConfigError(_learn_differences(coordinator, deadline_s))
    if decision.error:
        raise ConfigError([decision.error])
    return decision.start


def _say_hello(coordinator: Coordinator, hello: _Hello) -> None:
    coordinator.put(f"settings/{coordinator.process_index}", msgspec.json.encode(hello))


def _decide(coordinator: Coordinator, decision: _Decision) -> _Decision:
    coordinator.put("settings.decision", msgspec.json.encode(decision))
    return decision


def _follow(coordinator: Coordinator, timeout_s: float) -> _Decision:
    try:
        data = coordinator.get("settings.decision", timeout_s + _TOLD_LATE_S)
    except DeadlineExceeded as error:
        raise _not_all_came(timeout_s, ("process 0",)) from error
    name = "settings.decision, process 0"
    return decode_message(data, _Decision, name, limit_bytes=MAX_MESSAGE_BYTES)


def _lead(coordinator: Coordinator, deadline_s: float) -> _Decision:
    # Not a barrier, which would delay a process's error until the last one has come. One ``get``
    # for each process, because each that reaches its deadline costs the service memory.
    waited_for: set[int] = set()
    while True:
        found = by_process(coordinator.list("settings"), "settings", coordinator.process_count)
        hellos = decode_each(found, _Hello, "settings", lambda text: _Hello("", text))
        errors = joined_errors({p: hello.problem for p, hello in hellos.items()})
        if errors:
            return _decide(coordinator, _Decision(error=errors))
        missing = [p for p in range(coordinator.process_count) if p not in hellos]
        if not missing:
            break
        if time.monotonic() >= deadline_s:
            named = tuple(f"process {p}" for p in missing)
            return _decide(coordinator, _Decision(missing=named))
        # Then check again, since another process may have come.
        limit_s = min(_LOOK_S, deadline_left_s(deadline_s))
        if missing[0] in waited_for:
            time.sleep(min(_PAUSE_S, limit_s))
            continue
        waited_for.add(missing[0])
        with contextlib.suppress(DeadlineExceeded):
            coordinator.get(f"settings/{missing[0]}", limit_s)
    if len({hello.digest for hello in hellos.values()}) > 1:
        return _decide(coordinator, _Decision(differ=True))
    return _decide(coordinator, _Decision(start=secrets.token_hex(8)))


def _learn_differences(coordinator: Coordinator, deadline_s: float) -> list[str]:
    """Return the differences, computed by the leader, after its decision ``differ``."""
    name = "settings.differences"
    if coordinator.process_index != 0:
        data = coordinator.get(name, deadline_left_s(deadline_s) + _TOLD_LATE_S)
        return decode_message(data, list[str], f"{name}, process 0", limit_bytes=MAX_MESSAGE_BYTES)
    deadline_s += _TOLD_LATE_S / 2
    tables: dict[int, dict[str, str]] = {}
    unreadable: list[str] = []
    for process in range(coordinator.process_count):
        data = coordinator.get(f"settings.told/{process}", deadline_left_s(deadline_s))
        key = f"settings.told/{process}"
        try:
            tables[process] = decode_message(
                data, dict[str, str], key, limit_bytes=MAX_MESSAGE_BYTES
            )
        except CoordinationError as error:
            unreadable.append(str(error))
    lines = [*unreadable, *differing_settings(tables)][:_MOST_LINES]
    coordinator.put(name, msgspec.json.encode(lines))
    return lines


def settings_digest(settings: Mapping[str, str]) -> str:
    """Return a digest of the texts of ``settings``; equal for equal settings."""
    return hashlib.sha256(msgspec.json.encode(dict(settings), order="sorted")).hexdigest()


def _not_all_came(timeout_s: float, missing: tuple[str, ...]) -> DeadlineExceeded:
    return DeadlineExceeded(
        "start",
        "the job",
        f"not all processes came within {timeout_s:g} s",
        missing=missing,
        hint="look at the logs of the missing processes",
    )
