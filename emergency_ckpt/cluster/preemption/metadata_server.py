"""Notices of a Compute Engine machine: its metadata server, asked with bounds and deadlines."""

from __future__ import annotations

import http.client
import json
import os
import time
from typing import Any

from emergency_ckpt.core.limits import MAX_METADATA_BYTES
from emergency_ckpt.core.save.notice_rules import (
    maintenance_event_notice,
    preempted_notice,
    upcoming_maintenance_notice,
)
from emergency_ckpt.errors import CoordinationError

_DEFAULT_HOST = "metadata.google.internal"
_PATH = "/computeMetadata/v1/instance/"
_FLAVOR = ("Metadata-Flavor", "Google")
_TIMEOUT_S = 2.0
_FURTHER_LEAD_S = 60.0


class MetadataServer:
    """Looks at ``preempted``, ``maintenance-event`` and ``upcoming-maintenance``. For one thread.

    ``preempted`` is a notice whenever it is TRUE. The other two are one only when they become so
    under the eyes of this process: a life that was started on a host with announced maintenance
    would otherwise end at its first step, and so would each life after it.
    """

    name = "gce"
    interval_s = 1.0

    def __init__(self, grace_s: float) -> None:
        """``grace_s``: the time that a preemption save may take.

        The host is that of the environment's GCE_METADATA_HOST, as for Google's own clients.
        """
        self._host = os.environ.get("GCE_METADATA_HOST") or _DEFAULT_HOST
        self._lead_s = grace_s + _FURTHER_LEAD_S
        self._old: dict[str, bool] = {}

    def look(self) -> str:
        """Return the notice, empty when there is none. Blocks for some seconds at most.

        Raises CoordinationError: the server is absent, hangs, or answers with something else.
        """
        try:
            return self._look()
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise CoordinationError(
                "ask",
                f"the metadata server {self._host}",
                f"{type(error).__name__}: {error!s:.200}",
            ) from error

    def _look(self) -> str:
        found = preempted_notice(self._text("preempted") or "FALSE")
        if found:
            return found
        event = maintenance_event_notice(self._text("maintenance-event") or "NONE")
        coming = upcoming_maintenance_notice(
            json.loads(self._text("upcoming-maintenance") or '{"error": ""}'),
            time.time(),
            self._lead_s,
        )
        return self._new("event", event) or self._new("coming", coming)

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
            connection.request("GET", _PATH + key, headers=dict([_FLAVOR]))
            answer: Any = connection.getresponse()
            if answer.getheader(_FLAVOR[0]) != _FLAVOR[1]:
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
