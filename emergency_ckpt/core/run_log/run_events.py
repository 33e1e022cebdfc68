"""One event of a run, as the figures of a report need it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

MAX_TEXT_CHARS = 300
_MAX_WHOLE = 1 << 53
_ELLIPSIS = "..."


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """One event of one process, or of what started the job.

    Attributes:
      time_s: Unix time by the clock of the process's host; finite.
      name: dotted name.
      process: None for what started the job.
      slice_index: slice of the process, None when unknown.
      incarnation: that of the process when it wrote the event; "" when unknown.
      life: number of the job's life, from 0; before ``lives.number_lives`` that of the restarts by
        the launcher, 0 without it.
      fields: as logged. Read them with ``whole``, ``number`` and ``text`` alone.
    """

    time_s: float
    name: str
    process: int | None = None
    slice_index: int | None = None
    incarnation: str = ""
    life: int = 0
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])


def whole(event: RunEvent, field: str) -> int | None:
    """Return a field that is a whole number from 0 to 2**53, or None."""
    value = event.fields.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_WHOLE:
        return None
    return value


def number(event: RunEvent, field: str) -> float | None:
    """Return a field that is a finite number of at least 0, or None."""
    value = event.fields.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _MAX_WHOLE and math.isfinite(value) else None


def text(event: RunEvent, field: str) -> str:
    """Return a field as text of at most ``MAX_TEXT_CHARS``; "" when there is none."""
    value = event.fields.get(field)
    if value is None:
        return ""
    return bounded_text(value if isinstance(value, str) else repr(value))


def bounded_text(value: str) -> str:
    """Return ``value`` in at most ``MAX_TEXT_CHARS``, without characters that control a display."""
    cut = value if len(value) <= MAX_TEXT_CHARS else value[: MAX_TEXT_CHARS - 3] + _ELLIPSIS
    return "".join(char if char.isprintable() else " " for char in cut)
