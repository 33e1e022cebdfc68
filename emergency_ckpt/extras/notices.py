"""Sources of preemption notices besides SIGTERM, as observers: ``on_event=Notices(has_notice)``.

A source is a function that a thread of its own calls once a second. Its first notice becomes a call
of ``JobView.request_preemption``. A source may be absent, hang, lie or raise: that is said once and
costs training nothing.

The texts are ``"notices(gce)"``, ``"notices(ray)"``, ``"notices(file:/path)"`` and
``"notices(signal:USR1)"``.
"""

from __future__ import annotations

import datetime
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

from absl import logging

from emergency_ckpt.core.limits import MAX_METADATA_BYTES
from emergency_ckpt.errors import CheckpointError, ConfigError, CoordinationError
from emergency_ckpt.events import EventSink
from emergency_ckpt.observer import JobView, Observer
from emergency_ckpt.private_names import private_module

_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0
_CLOSE_TIMEOUT_S = 0.5
_TEXT_LIMIT_CHARS = 300
_FILE_SCHEME, _SIGNAL_SCHEME = "file:", "signal:"
_SIGNALS = ("USR1", "USR2", "HUP", "ALRM", "URG", "WINCH")
"""Those that schedulers send, such as Slurm USR1 a while before a job's time is over."""
_RAY_CONTEXT = "ray.train.v2._internal.execution.context"


class Notices(Observer):
    """Takes a true value of ``inspect`` for a notice of a preemption; a text says which.

    Args:
      inspect: called in a thread of its own; may block, and raise anything.
      name: of the source, in events.
    """

    def __init__(self, inspect: Callable[[], object], name: str = "function") -> None:
        self._source: Callable[[], Callable[[], object]] = lambda: inspect
        self._name = name
        self._polls: dict[JobView, _Poll] = {}

    @classmethod
    def made_for_each_job(cls, source: Callable[[], Callable[[], object]], name: str) -> Notices:
        """Return an observer that makes ``inspect`` by ``source`` at the start of each job.

        For a source that remembers what it saw: the look of one job is no look of another.
        """
        notices = cls(source, name)
        notices._source = source
        return notices

    def join(self, job: JobView) -> None:
        """Begin to look."""
        inspect = self._source()
        self._polls[job] = _Poll(inspect, self._name, job.events, job.request_preemption)

    def leave(self, job: JobView) -> None:
        """Look no more."""
        poll = self._polls.pop(job, None)
        if poll is not None:
            poll.close()


class SignalNotices(Notices):
    """Takes a signal for a notice, from the start of a checkpointer to its end.

    An earlier handler of Python's is called too.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(self._watch, f"{_SIGNAL_SCHEME}{number.name}")
        self._source = self._watch  # a function for each job, as by ``made_for_each_job``
        self._number = number
        self._count = 0
        self._earlier: Any = None
        self._users = 0
        self._begun: list[int] = []

    def begin(self, process_index: int) -> None:
        """Set the handler, before which the signal ends the process. ConfigError: not possible."""
        del process_index
        if threading.current_thread() is not threading.main_thread():
            name = self._number.name
            problem = f"notices(signal:{name}): only the main thread can set a handler of {name}"
            raise ConfigError([f"{problem}: make the checkpointer there"])
        self._users += 1
        self._begun.append(self._count)
        if self._users == 1:
            self._earlier = signal.getsignal(self._number)
            signal.signal(self._number, self._on_signal)

    def close(self) -> None:
        """After the last ``begin``, set the earlier handler again, unless another was set since."""
        self._users -= 1
        del self._begun[self._users :]  # of one that ended before it watched
        in_main = threading.current_thread() is threading.main_thread()
        is_ours = signal.getsignal(self._number) == self._on_signal
        if self._users == 0 and in_main and is_ours:
            # None: a handler of C, which Python cannot set again.
            signal.signal(self._number, signal.SIG_DFL if self._earlier is None else self._earlier)

    def _watch(self) -> Callable[[], str]:
        """Return a function that says in words that the signal has come since its last call.

        The first call of the function looks back to the ``begin`` that the function belongs to.
        """
        seen_count = self._begun.pop(0) if self._begun else self._count

        def inspect() -> str:
            nonlocal seen_count
            before, seen_count = seen_count, self._count
            return f"{self._number.name} has come" if seen_count > before else ""

        return inspect

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if callable(self._earlier):
            self._earlier(number, frame)


class _Poll:
    """Calls ``inspect`` until it has a notice, in a daemon thread."""

    def __init__(
        self,
        inspect: Callable[[], object],
        name: str,
        events: EventSink,
        notice: Callable[[], object],
    ) -> None:
        self._inspect, self._name, self._events, self._notice = inspect, name, events, notice
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"eckpt-notice-{name[:4]}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that is blocked in its source is left behind, without effect."""
        self._stopping.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        has_failed, pause_s = False, _PAUSE_S
        while not self._stopping.wait(pause_s):
            try:
                notice, pause_s = self._inspect(), _PAUSE_S
            except Exception as error:  # noqa: BLE001 - a source is foreign code, or a server
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                if not has_failed:
                    has_failed, text = True, f"{type(error).__name__}: {error}"[:_TEXT_LIMIT_CHARS]
                    self._events.emit("preemption.unheard", source=self._name, text=text)
                continue
            if notice and not self._stopping.is_set():
                text = notice[:_TEXT_LIMIT_CHARS] if isinstance(notice, str) else "it says so"
                self._events.emit("preemption.notice", source=self._name, text=text)
                try:
                    self._notice()
                except CheckpointError as error:
                    text = str(error)[:_TEXT_LIMIT_CHARS]
                    self._events.emit("preemption.unheard", source=self._name, text=text)
                return


class FlagFile:
    """A file whose existence is a notice, as one job sees it.

    A file is left over, and no notice until it is written again, if it is older than this process,
    or if a job of this process had acted on it when this object was made. Jobs that run beside each
    other all act on one file.
    """

    _acted_on: dict[Path, int] = {}  # noqa: RUF012 - of all jobs of the process

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left_over_ns = self._acted_on.get(path)
        self._started_s = process_start_s()
        self._has_named_old = False

    def inspect(self) -> str:
        """Return the notice in words, empty when there is none."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return ""
        is_old = changed_ns / 1e9 < self._started_s
        if is_old or self._left_over_ns == changed_ns:
            if not self._has_named_old:
                self._has_named_old = True
                logging.warning(
                    "%s is left over and no notice until it is written again", self._path
                )
            return ""
        self._acted_on[self._path] = self._left_over_ns = changed_ns
        return f"the file {self._path} exists"


def process_start_s() -> float:
    """Return the Unix time at which this process started, from Linux's /proc."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since boot; field 22 of proc(5)
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + started_s


def ray_notice() -> str:
    """Return Ray Train's warning that nodes of this run will be drained; only in its workers.

    The public ``ray.train.get_preemption_info`` is a collective call: made here, it would mix with
    those of the training loop. This is the value of this worker that it would have broadcast.
    """
    train = private_module(_RAY_CONTEXT, "get_train_context", project="ray")
    info = train.get_train_context().preemption_context.preemption_info
    return "" if info is None else f"Ray: {info!s:.200}"


def from_text(argument: str) -> Notices:
    """Return the source that ``argument`` names. ConfigError: there is none of this name."""
    if argument == "gce":
        return Notices.made_for_each_job(lambda: MetadataServer().inspect, "gce")
    if argument == "ray":
        return Notices(ray_notice, "ray")
    path = argument.removeprefix(_FILE_SCHEME)
    if path != argument and path[:1] == "/" and path.isprintable():
        return Notices.made_for_each_job(lambda: FlagFile(Path(path)).inspect, argument)
    name = argument.removeprefix(_SIGNAL_SCHEME)
    short = name.removeprefix("SIG")
    if name != argument and short in _SIGNALS:
        return SignalNotices(signal.Signals[f"SIG{short}"])
    raise ConfigError(
        [
            f"notices({argument}): a source of notices is gce, ray, file: and an absolute path, or"
            " signal: and a name such as USR1"
        ]
    )


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
