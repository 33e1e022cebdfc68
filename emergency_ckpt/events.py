"""Events of the checkpointer, for logs, timelines, metrics and tests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

from absl import logging

from emergency_ckpt.progress_log import line_of


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
      name: dotted name, e.g. ``"save.published"``. ARCHITECTURE.md lists them all.
      fields: details; numbers, strings, booleans.
      time_s: Unix time, for display only.
    """

    name: str
    fields: Mapping[str, object]
    time_s: float


Listener = Callable[[Event], None]


class EventSink:
    """Passes each event to the log and to the listener, in the thread that emits it.

    A listener's error is logged and does not affect the checkpointer.
    """

    def __init__(self, listener: Listener | None, *, process_index: int) -> None:
        self._listener = listener
        self._process_index = process_index

    def emit(self, name: str, **fields: object) -> None:
        """Report the event ``name``. Blocks while the listener runs."""
        fields = {"process": self._process_index, **fields}
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        line = line_of(name, fields)
        if line is not None:
            level, words = line
            logging.log(level, "%s", words)
        else:
            logging.vlog(1, "%s %s", name, text)
        if self._listener is None:
            return
        try:
            self._listener(Event(name, fields, time.time()))
        except Exception:  # noqa: BLE001 - a listener's error is logged, never raised
            logging.exception("listener failed on event %s", name)
