"""The metadata server of a GCE machine, which knows of preemption and of maintenance."""

from __future__ import annotations

import datetime
import http.client
import json
import os
import time
from typing import Any, Final, cast

from emergency_ckpt.core.limits import MAX_METADATA_BYTES
from emergency_ckpt.errors import CoordinationError

LEAD_S: Final = 90.0
"""How long before its window maintenance is a notice: a minute more than the default of
``preemption_grace_s``, rounded up."""
_DEFAULT_HOST = "metadata.google.internal"
_PATH = "/computeMetadata/v1/instance/"
_FLAVOR_HEADER, _FLAVOR = "Metadata-Flavor", "Google"
_TIMEOUT_S = 2.0
_HOST_TERMINATES: Final = "TERMINATE_ON_HOST_MAINTENANCE"
_QUIET_EVENTS: Final = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE")


class MetadataServer:
    """Looks at ``preempted``, ``maintenance-event`` and ``upcoming-maintenance``. For one thread.

    ``preempted`` is a notice whenever it is TRUE. The other two are one only when they become so
    under the eyes of this object: a job that was started on a host with announced maintenance
    would otherwise end at its first step, and so would each incarnation after it.
    """

    def __init__(self) -> None:
        """The host is that of the environment's GCE_METADATA_HOST, as for Google's clients."""
        self._host = os.environ.get("GCE_METADATA_HOST") or _DEFAULT_HOST
        self._old: dict[str, bool] = {}

    def inspect(self) -> str:
        """Return the notice, empty when there is none. Blocks for some seconds at most.

        Raises CoordinationError: the server is absent, hangs, or answers with something else. An
        error about one key hides no notice of another.
        """
        first: Exception | None = None
        for look in (self._preempted, self._maintenance_event, self._upcoming_maintenance):
            try:
                if notice := look():
                    return notice
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                first = first or error
        if first is None:
            return ""
        text = f"{type(first).__name__}: {first!s:.200}"
        raise CoordinationError("ask", f"the metadata server {self._host}", text) from first

    def _preempted(self) -> str:
        preempted = self._text("preempted")
        if preempted is None:
            raise ValueError(
                "it has no instance/preempted, so it is not the machine's own: behind Workload"
                " Identity GKE's answers in its place, and SIGTERM is the notice"
            )
        return preempted_notice(preempted)

    def _maintenance_event(self) -> str:
        text = self._text("maintenance-event") or "NONE"
        return self._new("event", maintenance_event_notice(text))

    def _upcoming_maintenance(self) -> str:
        document = json.loads(self._text("upcoming-maintenance") or '{"error": ""}')
        return self._new("coming", upcoming_maintenance_notice(document, time.time()))

    def _new(self, kind: str, notice: str) -> str:
        """Return ``notice`` unless it was there at the first look and has not gone since."""
        was_there = self._old.setdefault(kind, bool(notice))
        self._old[kind] = was_there and bool(notice)
        return "" if self._old[kind] else notice

    def _text(self, key: str) -> str | None:
        """Return the value of ``key``; None where the server has none (404)."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        connection = http.client.HTTPConnection(self._host, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", _PATH + key, headers={_FLAVOR_HEADER: _FLAVOR})
            answer: Any = connection.getresponse()
            if answer.getheader(_FLAVOR_HEADER) != _FLAVOR:
                raise ValueError("the answer lacks Metadata-Flavor: Google")
            if answer.status == http.client.NOT_FOUND:
                return None
            if answer.status != http.client.OK:
                raise ValueError(f"it answers {key} with status {answer.status}")
            data = b""
            while part := answer.read1(MAX_METADATA_BYTES + 1 - len(data)):
                data += part
                if len(data) > MAX_METADATA_BYTES:
                    raise ValueError(
                        f"its answer to {key} has more than {MAX_METADATA_BYTES} bytes"
                    )
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"its answer to {key} takes longer than {_TIMEOUT_S:g} s")
            return data.decode("ascii").strip()
        finally:
            connection.close()


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


def upcoming_maintenance_notice(document: Any, now_s: float) -> str:
    """Return the notice in ``instance/upcoming-maintenance``, empty when there is none yet.

    Maintenance is announced up to a week ahead and may be moved or withdrawn until then, so it is a
    notice only while it is under way or its window begins within ``LEAD_S``.

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
    if window.timestamp() - now_s > LEAD_S:
        return ""
    return f"the metadata server announces maintenance of the host at {start[:40]}"
