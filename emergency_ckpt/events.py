"""Events of the checkpointer, for logs, timelines, metrics and tests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from emergency_ckpt.progress_log import line_of


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
      name: dotted name, e.g. ``"save.published"``. docs/operations.md lists them all.
      fields: details; numbers, strings, booleans.
      time_s: Unix time, for display only.
      origin: the process, the run and its life.
    """

    name: str
    fields: Mapping[str, object]
    time_s: float
    origin: Origin


Listener = Callable[[Event], None]


class EventSink:
    """Passes each event to the log and to the listeners, in the thread that emits it.

    A listener's error is logged and does not affect the checkpointer.
    """

    def __init__(self, listener: Listener | None, *, process_index: int) -> None:
        self._of_user: tuple[Listener, ...] = () if listener is None else (listener,)
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

    def emit(self, name: str, **fields: object) -> None:
        """Report the event ``name``. Blocks while the listeners run."""
        origin = self._origin
        fields = {"process": origin.process_index, **fields}
        line = line_of(name, fields)
        if line is not None:
            level, words = line
            logging.log(level, "%s", words)
        elif logging.vlog_is_on(1):
            text = " ".join(f"{key}={value}" for key, value in fields.items())
            logging.vlog(1, "%s %s", name, text)
        if not self._listeners:
            return
        event = Event(name, fields, time.time(), origin)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - a listener's error is logged, never raised
                logging.exception("listener failed on event %s", name)

    def close(self) -> None:
        """Call what ``on_close`` was given; later events reach the user only. Idempotent."""
        closers, self._closers = self._closers, []
        self._listeners = self._of_user
        for close in reversed(closers):
            try:
                close()
            except Exception:  # noqa: BLE001 - the rest must be closed in any case
                logging.exception("a listener of events could not be closed")
