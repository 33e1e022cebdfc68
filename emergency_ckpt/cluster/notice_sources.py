"""Sources of preemption notices besides SIGTERM, each polled in a thread of its own.

A source may be absent, hang, lie or raise: that is reported once and costs training nothing.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from absl import logging

from emergency_ckpt.core.limits import MAX_METADATA_BYTES
from emergency_ckpt.core.save.notice_rules import (
    FILE_SCHEME,
    maintenance_event_notice,
    notice_sources,
    preempted_notice,
    upcoming_maintenance_notice,
)
from emergency_ckpt.errors import CoordinationError
from emergency_ckpt.events import EventSink
from emergency_ckpt.private_names import private_module

_DEFAULT_HOST = "metadata.google.internal"
_PATH = "/computeMetadata/v1/instance/"
_FLAVOR = ("Metadata-Flavor", "Google")
_TIMEOUT_S = 2.0
_FURTHER_LEAD_S = 60.0


class MetadataServer:
    """Looks at ``preempted``, ``maintenance-event`` and ``upcoming-maintenance``. For one thread.

    ``preempted`` is a notice whenever it is TRUE. The other two are one only when they become so
    under the eyes of this process: a job that was started on a host with announced maintenance
    would otherwise end at its first step, and so would each incarnation after it.
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

    def inspect(self) -> str:
        """Return the notice, empty when there is none. Blocks for some seconds at most.

        Raises CoordinationError: the server is absent, hangs, or answers with something else.
        """
        try:
            return self._inspect()
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise CoordinationError(
                "ask",
                f"the metadata server {self._host}",
                f"{type(error).__name__}: {error!s:.200}",
            ) from error

    def _inspect(self) -> str:
        preempted = self._text("preempted")
        if preempted is None:
            raise ValueError(
                "it has no instance/preempted, so it is not the machine's own: behind Workload"
                " Identity GKE's answers in its place, and SIGTERM is the notice"
            )
        found = preempted_notice(preempted)
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


_LONGEST_PAUSE_S = 10.0
_CLOSE_TIMEOUT_S = 0.5
_TEXT_LIMIT_CHARS = 300
_RAY_CONTEXT = "ray.train.v2._internal.execution.context"


class NoticeSource(Protocol):
    """Something that knows of preemptions. Called from one thread.

    ``interval_s``: time between two looks.
    """

    @property
    def name(self) -> str: ...
    @property
    def interval_s(self) -> float: ...

    def inspect(self) -> str:
        """Return the notice in words, empty when there is none. May block, and raise anything."""
        ...


class AskedFunction:
    """A user's function: a true value is a notice, and a text says which."""

    name = "function"
    interval_s = 1.0

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def inspect(self) -> str:
        found = self._function()
        return str(found) if isinstance(found, str) else "a function says so" if found else ""


class FlagFile:
    """A file whose existence is a notice.

    One that is older than this process was left over: it is no notice until it is written
    again. Nor is one that this process has acted on already.
    """

    interval_s = 1.0
    _acted_on: dict[Path, int] = {}  # noqa: RUF012 - of all checkpointers of the process

    def __init__(self, path: Path) -> None:
        self.name = f"{FILE_SCHEME}{path}"
        self._path = path
        self._started_s = process_start_s()
        self._has_named_old = False

    def inspect(self) -> str:
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return ""
        is_old = changed_ns / 1e9 < self._started_s
        if is_old or self._acted_on.get(self._path) == changed_ns:
            if not self._has_named_old:
                self._has_named_old = True
                logging.warning(
                    "%s is left over and no notice until it is written again", self.name
                )
            return ""
        self._acted_on[self._path] = changed_ns
        return f"the file {self._path} exists"


class RayTrain:
    """Ray Train's warning that nodes of this run will be drained; only in a Ray Train worker.

    The public ``ray.train.get_preemption_info`` is a collective call: made here, it would mix with
    those of the training loop. This is the value of this worker that it would have broadcast.
    """

    name = "ray"
    interval_s = 1.0

    def inspect(self) -> str:
        train = private_module(_RAY_CONTEXT, "get_train_context", project="ray")
        info = train.get_train_context().preemption_context.preemption_info
        return "" if info is None else f"Ray: {info!s:.200}"


def process_start_s() -> float:
    """Return the Unix time at which this process started, from Linux's /proc."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since boot; field 22 of proc(5)
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + started_s


def open_sources(given: object, grace_s: float) -> list[NoticeSource]:
    """Return the sources that the setting ``preemption_notice`` names, but for SIGTERM."""
    found: list[NoticeSource] = []
    for source in notice_sources(given):
        if callable(source):
            found.append(AskedFunction(cast("Callable[[], object]", source)))
        elif source == "gce":
            found.append(MetadataServer(grace_s))
        elif source == "ray":
            found.append(RayTrain())
        elif isinstance(source, str) and source.startswith(FILE_SCHEME):
            found.append(FlagFile(Path(source.removeprefix(FILE_SCHEME))))
    return found


class NoticePolls:
    """Polls every source until it has a notice, each in a daemon thread."""

    def __init__(
        self, sources: Sequence[NoticeSource], events: EventSink, notice: Callable[[], object]
    ) -> None:
        """``notice``: called at each source's notice, in the source's thread."""
        self._events = events
        self._notice = notice
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._poll, args=[each], name=f"eckpt-notice-{each.name[:4]}")
            for each in sources
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def close(self) -> None:
        """End the threads; one that is blocked in its source is left behind, without effect."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)

    def _poll(self, source: NoticeSource) -> None:
        has_failed, pause_s = False, source.interval_s
        while not self._stopping.wait(pause_s):
            try:
                found, pause_s = source.inspect(), source.interval_s
            except Exception as error:  # noqa: BLE001 - a source is foreign code, or a server
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                if not has_failed:
                    has_failed, text = True, f"{type(error).__name__}: {error}"[:_TEXT_LIMIT_CHARS]
                    self._events.emit("preemption.source_failed", source=source.name, text=text)
                continue
            if found and not self._stopping.is_set():
                text = found[:_TEXT_LIMIT_CHARS]
                self._events.emit("preemption.notice", source=source.name, text=text)
                self._notice()
                return
