"""Events of the checkpointer, for timelines, metrics and tests, and their lines in the log."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from emergency_ckpt.core.wording import TIER_WORDS, count_text, seconds_text, size_text

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The place that an event comes from.

    Attributes:
      process_index, slice_index: the process and its slice; the slice is None before it is known.
      run_id, incarnation: of the checkpointer; empty before they are known. The events of a restore
        have the incarnation before it.
    """

    process_index: int
    slice_index: int | None = None
    run_id: str = ""
    incarnation: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
      name: dotted name, e.g. ``"save.complete"``. docs/monitoring.md lists them all.
      fields: details; numbers, strings, booleans.
      time_s: Unix time, for display only.
      origin: the process, the run and its life.
    """

    name: str
    fields: Mapping[str, object]
    time_s: float
    origin: Origin

    @property
    def point(self) -> str:
        """Return the name, with the stage or the cause if there is one: ``"save.stage.copied"``."""
        return point_of(self.name, self.fields)


def point_of(name: str, fields: Fields) -> str:
    """Return the point of the work that an event marks: its name, with its stage or its cause."""
    part = fields.get("stage") or fields.get("cause")
    return f"{name}.{part}" if part else name


Listener = Callable[[Event], None]


class EventSink:
    """Passes each event to the log and to the listeners, in the thread that emits it.

    A listener's error is logged and does not affect the checkpointer; outside of the main thread
    ``SystemExit`` is an error, too.
    """

    def __init__(self, *listeners: Listener | None, process_index: int) -> None:
        self._of_user = tuple(listener for listener in listeners if listener is not None)
        self._listeners = self._of_user
        self._closers: list[Callable[[], None]] = []
        self._origin = Origin(process_index)

    def add(self, listener: Listener) -> None:
        """Pass later events to ``listener`` too, until ``close``."""
        self._listeners = (*self._listeners, listener)

    def on_close(self, close: Callable[[], None]) -> None:
        """Call ``close`` at the end; the last one first."""
        self._closers.append(close)

    def locate(self, **place: Any) -> None:
        """Set attributes of the ``Origin`` of later events."""
        self._origin = dataclasses.replace(self._origin, **place)

    def made(self, name: str, **fields: object) -> Event:
        """Return the event ``name`` of this place and this moment, which no listener is given."""
        origin = self._origin
        return Event(name, {"process": origin.process_index, **fields}, time.time(), origin)

    def emit(self, name: str, **fields: object) -> None:
        """Report the event ``name``. Blocks while the listeners run."""
        fields = {"process": self._origin.process_index, **fields}
        line = line_of(name, fields)
        if line is not None:
            level, words = line
            logging.log(level, "%s", words)
        elif logging.vlog_is_on(1):
            text = " ".join(f"{key}={value}" for key, value in fields.items())
            logging.vlog(1, "%s %s", name, text)
        if not self._listeners:
            return
        event = Event(name, fields, time.time(), self._origin)
        for listener in self._listeners:
            try:
                listener(event)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code
                _log(error, "listener failed on event %s", name)

    def close(self) -> None:
        """Call what ``on_close`` was given; later events reach the user only. Idempotent."""
        closers, self._closers = self._closers, []
        self._listeners = self._of_user
        for close in reversed(closers):
            try:
                close()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the rest must be closed
                _log(error, "a listener of events could not be closed")


def _log(error: BaseException, text: str, *parts: str) -> None:
    """Log the error that a listener has raised; raise the exit that may be the program's own.

    ``sys.exit`` ends a thread without a word, and the work of the checkpointer in this thread. In
    the main thread a signal handler may have interrupted the listener, as one that ends the program
    at SIGTERM: this exit passes, as KeyboardInterrupt does.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and isinstance(error, SystemExit):
        raise error
    logging.error(text, *parts, exc_info=error)


def line_of(name: str, fields: Fields) -> tuple[int, str] | None:
    """Return the absl level and the log text of an event; None for most events.

    Saves are logged by process 0 alone; a start and a restore by each process, which has its own
    RAM and its own bytes.
    """
    point = point_of(name, fields)
    line = _LINES.get(point)
    if line is None and point in _LEADERS_LINES:
        if fields["process"]:
            return None
        line = _LEADERS_LINES[point]
    if line is not None:
        level = logging.WARNING if point in _WARNINGS else logging.INFO
        return level, line.format(**fields) if isinstance(line, str) else line(fields)
    if point in _WARNINGS:
        words = [str(fields[key]) for key in _WORDS if fields.get(key)]
        words += [f"{k}={v}" for k, v in fields.items() if k not in _UNNAMED]
        return logging.WARNING, f"{point}: {' '.join(words)}"
    return None


def _start(fields: Fields) -> str:
    # Without ``dir`` a face may have given storage to an object of Orbax's.
    storage = f"; storage: {fields['persistent']} in {fields['dir']}" if fields["dir"] else ""
    return (
        f"{count_text(fields['processes'], 'process', 'processes')}"
        f" in {count_text(fields['slices'], 'slice', 'slices')};"
        f" RAM: {fields['local']}, {count_text(fields['copies'], 'copy', 'copies')},"
        f" {size_text(fields['ram_bytes'])} reserved by this process{storage}"
    )


def _restore(fields: Fields) -> str:
    text = (
        f"restored step {fields['step']} from {TIER_WORDS[fields['tier']]}"
        f" in {seconds_text(fields['seconds'])}: {size_text(fields['bytes_local'])} from own RAM,"
        f" {size_text(fields['bytes_peer'])} from peers,"
        f" {size_text(fields['bytes_persistent'])} from storage"
    )
    return f"{text}; passed over {fields['passed_over']}" if fields["passed_over"] else text


def _progress(work: str) -> Callable[[Fields], str]:
    def line(fields: Fields) -> str:
        if fields["doing"] == "over":
            return f"{work}: over"
        own = _left(fields, "") if fields["doing"] else "this process waits for the others"
        text = f"{work}: {own}"
        last = fields.get("slowest")
        return text if last is None else f"{text}; process {last}: {_left(fields, 'slowest_')}"

    return line


def _left(fields: Fields, of: str) -> str:
    left, rate = fields[f"{of}bytes_left"], fields[f"{of}bytes_per_second"]
    return f"{size_text(left)} left at {size_text(rate)}/s"


def _saved(tier: str) -> Callable[[Fields], str]:
    return lambda f: f"saved step {f['step']} to {tier} in {seconds_text(f['seconds'])}"


_Line = str | Callable[[Fields], str]
"""The text of an event in the log: a template of its fields, or a function of them."""
_LINES: dict[str, _Line] = {
    "start.ready": _start,
    "restore.finished": _restore,
    "restore.nothing": "nothing to restore: no step of this run was ever saved",
    "restore.note": "restore: {text}",
    "persistent.problem.waiting": "{text}",
}
_LEADERS_LINES: dict[str, _Line] = {
    "restore.progress": _progress("restore"),
    "persistent.progress": _progress("save to storage"),
    "save.complete": _saved("RAM"),
    "persistent.complete": _saved("storage"),
    "save.skipped.older": (
        "save of step {step} ignored: step {newest}, which was saved or restored, is newer; nothing"
        " is saved until the loop has passed it"
    ),
    "preemption.reached": lambda fields: (
        f"preemption notice: acted on at step {fields['step']},"
        f" {seconds_text(fields['grace_s'])} left"
    ),
    "warning.single_copy": "{text}",
    "warning.without_restore": (
        "step {step} is saved without a restore, in a run that has steps up to {newest}: once a"
        " save of this start is complete, restore() takes what it saved, and the older steps by"
        " their numbers only"
    ),
    "warning.restore_without_host_state": (
        "step {step} has a host_state, and restore was given none: the data starts again from the"
        " beginning; give host_state, or tensors_only=True where that is meant"
    ),
    "warning.save_without_host_state": (
        "step {step} is saved without a host_state, and restore was given one: a restart from this"
        " step would begin the data anew; give host_state to save, too"
    ),
}
_WORDS = ("text", "reason")
"""Fields that are sentences: a warning has them first, and without their names."""
_UNNAMED = frozenset({"process", "stage", "cause", *_WORDS})
"""Fields that a warning does not name: its point has the stage or the cause."""
_WARNINGS = frozenset(
    {
        "preemption.notice",
        "preemption.unheard",
        "save.skipped.older",
        "save.skipped.unfit",
        "save.non_finite",
        "save.unchanged",
        "stop.not_saved",
        "ramdisk.run_removed",
        "ram.off.full",
        "ram.off.given_up",
        "restore.quarantined",
        "restore.stage.replanned",
        "restore.suspect",
        "persistent.problem.in_use",
        "persistent.problem.log_damaged",
        "persistent.problem.log_lost",
        "persistent.problem.log_missing",
        "persistent.problem.unreachable",
        "persistent.removal.failed",
        "persistent.removal.missing",
        "divergence",
        "warning.restore_without_host_state",
        "warning.save_without_host_state",
        "warning.setting",
        "warning.single_copy",
        "warning.without_restore",
    }
)
