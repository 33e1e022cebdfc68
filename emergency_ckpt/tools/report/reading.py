"""Reading of an event log for a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from emergency_ckpt.core.wording import count_text
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.extras.event_log.reader import EventHistory, read_events
from emergency_ckpt.extras.event_log.records import LoggedEvent
from emergency_ckpt.tools.event_fields import bounded_text
from emergency_ckpt.tools.report.lives import number_lives

_MAX_RUN_IDS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportRun:
    """One run in the page.

    Attributes:
      title: heading of the run.
      events: of all processes, numbered by life.
      warnings: sentences in a box: damaged lines and the like.
    """

    title: str
    events: Sequence[LoggedEvent]
    warnings: Sequence[str] = ()


def read_log(directory: Path) -> ReportRun:
    """Return the run of the log in ``directory``, with what the report cannot know. Blocks.

    Raises:
      CheckpointError: it is no directory, holds no log, or none with an event.
      OSError: it cannot be listed.
    """
    if not directory.is_dir():
        raise _error(directory, "there is no such directory", hint="give the event_log of the job")
    history = read_events(directory)
    if not history.files and not history.unreadable:
        raise _error(
            directory, "no file events_*.jsonl is there", hint="give the event_log of the job"
        )
    warnings = _warnings_of(history)
    if not history.events:
        text = " ".join(["no event is in it.", *warnings]).rstrip(".")
        raise _error(directory, text, hint="let the job write at least one event")
    named = sorted({event.run_id for event in history.events if event.run_id})
    if len(named) > 1:
        warnings.append("The log has events of several runs, which are shown as one.")
    runs = ", ".join(map(bounded_text, named[:_MAX_RUN_IDS]))
    return ReportRun(
        title=f"Run {runs}" if runs else "Run",
        events=run_events(history.events),
        warnings=warnings,
    )


def run_events(events: Sequence[LoggedEvent]) -> list[LoggedEvent]:
    """Return the events as figures need them, by time and numbered by life."""
    return number_lives(
        msgspec.structs.replace(event, name=bounded_text(event.name)) for event in events
    )


def _error(directory: Path, problem: str, *, hint: str) -> CheckpointError:
    return CheckpointError("report", str(directory), problem, hint=hint)


def _warnings_of(history: EventHistory) -> list[str]:
    warnings: list[str] = []
    if history.bad_lines:
        more = history.bad_lines - len(history.damaged)
        named = [*history.damaged, *([f"and {more} more"] if more > 0 else [])]
        count = count_text(history.bad_lines, "line is", "lines are")
        warnings.append(f"{count} no event and left out: {'; '.join(map(bounded_text, named))}.")
    if history.unreadable:
        named_files = "; ".join(map(bounded_text, history.unreadable[:_MAX_RUN_IDS]))
        count = count_text(len(history.unreadable), "file", "files")
        warnings.append(f"{count} could not be read: {named_files}.")
    if history.is_cut:
        warnings.append("The log is larger than a report takes; its oldest events are left out.")
    lost = sum(event.name == "log.lost" for event in history.events)
    if lost:
        times = count_text(lost, "time", "times")
        warnings.append(f"The log itself lost events, {times} (log.lost).")
    return warnings
