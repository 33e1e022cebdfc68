"""Fields of an event log's lines. Others write a log: none is taken to have the type it should."""

from __future__ import annotations

import math

from emergency_ckpt.extras.event_log.records import LoggedEvent

MAX_TEXT_CHARS = 300
_MAX_WHOLE = 1 << 53
_ELLIPSIS = "..."


def whole(event: LoggedEvent, field: str) -> int | None:
    """Return a field that is a whole number from 0 to 2**53, or None."""
    value = event.fields.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_WHOLE:
        return None
    return value


def number(event: LoggedEvent, field: str) -> float | None:
    """Return a field that is a finite number of at least 0, or None."""
    value = event.fields.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _MAX_WHOLE and math.isfinite(value) else None


def text(event: LoggedEvent, field: str) -> str:
    """Return a field as text of at most ``MAX_TEXT_CHARS``; "" when there is none."""
    value = event.fields.get(field)
    if value is None:
        return ""
    return bounded_text(value if isinstance(value, str) else repr(value))


def bounded_text(value: str) -> str:
    """Return ``value`` in at most ``MAX_TEXT_CHARS``, without characters that control a display."""
    cut = value if len(value) <= MAX_TEXT_CHARS else value[: MAX_TEXT_CHARS - 3] + _ELLIPSIS
    return "".join(char if char.isprintable() else " " for char in cut)
