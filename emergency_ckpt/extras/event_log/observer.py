"""``EventLogObserver``: the event log of a checkpointer's process, as an observer."""

from __future__ import annotations

import os
from pathlib import Path

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.extras.event_log.log_writer import (
    LOG_VARIABLE,
    EventLog,
    life_of,
    open_event_log,
)
from emergency_ckpt.observer import JobView, Observer


class EventLogObserver(Observer):
    """Keeps the events of this process in ``directory``: a value of ``on_event``.

    Raises:
      ConfigError: ``directory`` is no absolute path.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        if not self._directory.is_absolute():
            raise ConfigError([f"event log {str(directory)!r} is not an absolute path"])
        self._logs: list[EventLog] = []

    def begin(self, process_index: int) -> None:
        """Open the log of this process."""
        self._logs.append(open_event_log(self._directory, process_index, life=life_of(os.environ)))

    def join(self, job: JobView) -> None:
        """Keep each step that the loop names on record: the event ``train.step``."""
        log, events = self._logs[-1], job.events
        job.progress.watch(lambda step: log(events.made("train.step", step=int(step))))

    def __call__(self, event: Event) -> None:
        """Append ``event``; never blocks or raises."""
        if self._logs:
            self._logs[-1](event)

    def close(self) -> None:
        """Write what waits. Blocks for a silent file system, 5 s."""
        if self._logs:
            self._logs.pop().close()


def from_text(argument: str) -> EventLogObserver:
    """Return the log of the text ``"event_log(<directory>)"``.

    Without a directory it is that of the variable ECKPT_EVENT_LOG, which ``eckpt launch`` sets.

    Raises:
      ConfigError: there is no directory, or it is no absolute path.
    """
    directory = argument or os.environ.get(LOG_VARIABLE, "")
    if not directory:
        example = "event_log(/logs/run7)"
        problem = f"the observer event_log has no directory: name one, as in {example!r}, or set"
        raise ConfigError([f"{problem} {LOG_VARIABLE}"])
    return EventLogObserver(directory)
