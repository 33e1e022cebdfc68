"""Preemption notices: their sources' names, and the documents of a metadata server. Pure."""

from __future__ import annotations

import datetime
from typing import Any, Final, cast

PLAIN_SOURCES: Final = ("sigterm", "ray", "gce")
FILE_SCHEME: Final = "file:"
MOST_NAMED: Final = 8
_HOST_TERMINATES: Final = "TERMINATE_ON_HOST_MAINTENANCE"
_QUIET_EVENTS: Final = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE")


def notice_problems(given: object) -> list[str]:
    """Return a line for each fault of a value of ``preemption_notice``."""
    sources = notice_sources(given)
    if not 0 < len(sources) <= MOST_NAMED:
        return [f"preemption_notice must name 1 to {MOST_NAMED} sources, not {len(sources)}"]
    return [
        f"preemption_notice must be {', '.join(map(repr, PLAIN_SOURCES))}, 'file:' and an absolute"
        f" path, a function, or a tuple of these, not {source!r}"
        for source in sources
        if not (callable(source) or _is_name(source))
    ]


def notice_sources(given: object) -> tuple[object, ...]:
    """Return the sources that a value of ``preemption_notice`` names, in its order."""
    if isinstance(given, tuple | list):
        return tuple(cast("tuple[object, ...] | list[object]", given))
    return (given,)


def _is_name(source: object) -> bool:
    if not isinstance(source, str):
        return False
    path = source.removeprefix(FILE_SCHEME)
    return source in PLAIN_SOURCES or (path != source and path[:1] == "/" and path.isprintable())


def preempted_notice(text: str) -> str:
    """Return the notice in the value of ``instance/preempted``, empty when there is none.

    ValueError: it is no such value.
    """
    if text not in ("TRUE", "FALSE"):
        raise ValueError(f"instance/preempted is {text[:40]!r} (expected TRUE or FALSE)")
    return "the metadata server says that the machine is preempted" if text == "TRUE" else ""


def maintenance_event_notice(text: str) -> str:
    """Return the notice in the value of ``instance/maintenance-event``, empty when there is none.

    A live migration is none: the processes go on. ValueError: it is no such value.
    """
    if text == _HOST_TERMINATES:
        return f"the metadata server announces {text}"
    if text not in _QUIET_EVENTS:
        raise ValueError(f"instance/maintenance-event is {text[:40]!r}")
    return ""


def upcoming_maintenance_notice(document: Any, now_s: float, lead_s: float) -> str:
    """Return the notice in ``instance/upcoming-maintenance``, empty when there is none yet.

    Maintenance is announced up to a week ahead and may be moved or withdrawn until then, so it is a
    notice only while it is under way or its window begins within ``lead_s``.

    Args:
      document: the decoded JSON. ``now_s``: Unix time.

    ValueError: it is no such document.
    """
    if not isinstance(document, dict):
        raise ValueError("instance/upcoming-maintenance is no JSON object")
    fields = cast("dict[str, object]", document)
    if "error" in fields:  # so the server says that nothing is announced
        return ""
    status = fields.get("maintenance_status")
    if status == "ONGOING":
        return "the metadata server says that maintenance of the host is under way"
    start = fields.get("window_start_time")
    if status != "PENDING" or not isinstance(start, str):
        raise ValueError("instance/upcoming-maintenance has no known status or no window")
    window = datetime.datetime.fromisoformat(start[:40])
    if window.tzinfo is None:
        raise ValueError(f"instance/upcoming-maintenance: {start[:40]!r} has no time zone")
    is_near = window.timestamp() - now_s <= lead_s
    return f"the metadata server announces maintenance of the host at {start[:40]}" * is_near
