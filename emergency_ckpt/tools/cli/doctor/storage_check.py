"""Checks of the persistent directory: writes, preconditions, the clock, the size of a state."""

from __future__ import annotations

import time

from emergency_ckpt.core.wording import size_text
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.probe import measure_clock, probe_storage
from emergency_ckpt.tools.cli.doctor.findings import Finding

_SKEW_S = 30.0
"""Above it the times in logs may mislead people who read them."""


def check_storage(directory: str, name: str, timeout_s: float) -> list[Finding]:
    """Write, read and remove small files there, as a start does. Blocks for ``timeout_s``.

    ``name``: part of the files' names that nobody else uses.
    """
    storage = StorageDirectory(directory, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    try:
        probe_storage(storage, name, deadline_s, conditions=True)
        ahead_s, doubt_s = measure_clock(storage, name, deadline_s)
    except CheckpointError as error:
        mend = _sentence(error.hint or "check that the directory is reachable and writable")
        problem = f"{error.operation} {error.target}: {error.problem}"
        return [Finding("storage", "failure", problem, mend)]
    honoured = "generation preconditions are" if storage.is_object_store else "'create if new' is"
    text = f"{directory} takes, returns and removes a file, and {honoured} honoured"
    return [Finding("storage", "ok", text), _clock(ahead_s, doubt_s)]


def _clock(ahead_s: float, doubt_s: float) -> Finding:
    """Return the finding about this host's clock, of which the storage's is ``ahead_s`` ahead."""
    measured = {"storage_ahead_s": ahead_s, "uncertainty_s": doubt_s}
    side = "ahead of" if ahead_s >= 0 else "behind"
    text = f"storage's clock is {abs(ahead_s):.1f} s {side} this host's (within {doubt_s:.1f} s)"
    if abs(ahead_s) <= _SKEW_S + doubt_s:
        return Finding("clock", "ok", text, measured=measured)
    return Finding("clock", "warning", text, "Synchronise this host's clock (NTP).", measured)


def newest_state_bytes(directory: str, timeout_s: float) -> tuple[Finding, int | None]:
    """Return the size of the newest step of this package, of one replica, or None without one."""
    # Orbax, which these import, takes a second to load.
    from emergency_ckpt.storage.steps.stored import StoredSteps  # noqa: PLC0415

    try:
        table = StoredSteps(StorageDirectory(directory, timeout_s)).view().table
    except CheckpointError as error:
        return Finding("state", "warning", str(error), "Give --state-gib."), None
    found = [] if table is None else [e for e in table.counting() if not e.is_plain]
    if not found:
        text = f"{directory} has no step from which the size of the state could be taken"
        return Finding("state", "warning", text, "Give --state-gib."), None
    newest = found[-1]
    size_bytes = newest.size_bytes
    text = f"{size_text(size_bytes)}, as step {newest.step} in {directory}"
    return Finding("state", "ok", text, measured={"state_bytes": size_bytes}), size_bytes


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
