"""The events of a run as its log has them, and the lives of a job: from one start or restore on.

Others write a log too: no field of a line is taken to have the type that it should have.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from emergency_ckpt.core.timeline import number_of
from emergency_ckpt.core.wording import count_text
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.extras.event_log import EventHistory, LoggedEvent, read_events
from emergency_ckpt.types import LOCAL, PERSISTENT

MAX_TEXT_CHARS = 300
_MAX_WHOLE = 1 << 53
_ELLIPSIS = "..."
_MAX_RUN_IDS = 5
_BEGINNINGS = frozenset({"start.link", "restore.stage.started"})
_BEGUN = frozenset({"restore.finished", "restore.nothing"})
_RESTORE_OVER = frozenset({*_BEGUN, "restore.failed", "start.link"})
_STEP = "train.step"
_DUE = "save.started"
_TRAINED = frozenset({_STEP, _DUE})
_FAULT = "fault.fired"


def whole(event: LoggedEvent, field: str) -> int | None:
    """Return a field that is a whole number from 0 to 2**53, or None."""
    value = event.fields.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_WHOLE:
        return None
    return value


def number(event: LoggedEvent, field: str) -> float | None:
    """Return a field that is a finite number of at least 0, or None."""
    value = event.fields.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _MAX_WHOLE and math.isfinite(value) else None


def text(event: LoggedEvent, field: str) -> str:
    """Return a field as text of at most ``MAX_TEXT_CHARS``; "" when there is none."""
    value = event.fields.get(field)
    if value is None:
        return ""
    return bounded_text(value if isinstance(value, str) else repr(value))


def bounded_text(value: str) -> str:
    """Return ``value`` in at most ``MAX_TEXT_CHARS``, without characters that control a display."""
    cut = value if len(value) <= MAX_TEXT_CHARS else value[: MAX_TEXT_CHARS - 3] + _ELLIPSIS
    return "".join(char if char.isprintable() else " " for char in cut)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobLife:
    """One life of the job.

    Attributes:
      number: from 0.
      begin_s, end_s: times of its first and of its last event.
      trains_from_s: time at which the last process had its state; that of the first step where the
        log has no restore; None when the life never trained.
      restored_step: step that all processes restored; None when there was none, or they disagree.
      from_step: step from which training went on, 0 for a beginning from nothing; None when it is
        not known: the processes disagree, or there is no restore and the first step is beyond 1.
      tier: tier of that step; "" when unknown.
      steps: step and the time at which the first process had finished it, ascending in both.
      every_step: True when each step was logged, False when only steps with a save were.
      fault_s: time of a fault that the launcher injected; None when there was none.
    """

    number: int
    begin_s: float
    end_s: float
    trains_from_s: float | None
    restored_step: int | None
    from_step: int | None
    tier: str
    steps: tuple[tuple[int, float], ...]
    every_step: bool
    fault_s: float | None

    @property
    def last_step(self) -> int | None:
        """Last step that is known to be finished; None when there is none."""
        return self.steps[-1][0] if self.steps else None

    @property
    def back_to(self) -> int:
        """As ``from_step``; the step before the first one when that is not known."""
        if self.from_step is not None:
            return self.from_step
        return max(0, self.steps[0][0] - 1) if self.steps else 0

    @property
    def stopped_s(self) -> float:
        """Time at which training ended: that of the injected fault, else of the last step."""
        if self.fault_s is not None:
            return self.fault_s
        return self.steps[-1][1] if self.steps else self.end_s

    def reached_s(self, step: int) -> float | None:
        """Return when ``step`` was finished, interpolated; None when it lies outside this life."""
        points = self.steps
        if self.trains_from_s is not None:
            first = (self.back_to, self.trains_from_s)
            points = (first, *(point for point in points if point[0] > first[0]))
        for (low, low_s), (high, high_s) in itertools.pairwise(points):
            if low <= step <= high:
                return low_s + (high_s - low_s) * (step - low) / (high - low)
        return next((time_s for at, time_s in points if at == step), None)


def number_lives(events: Iterable[LoggedEvent]) -> list[LoggedEvent]:
    """Return the events by time, each with the number of the job's life instead of the restarts.

    A process begins a life when it is restarted, and when it restores after it had trained or
    restored before. Lives of different processes are one life of the job where their incarnations
    are equal; a life that ended before it had an incarnation belongs to the life of the job that
    began next to it. An event of no process belongs to the life that began last before it.
    """
    of_process, of_job = [], []
    for event in events:
        (of_job if event.process is None else of_process).append(event)
    numbered = _numbered(_segments(of_process))
    begun: list[float] = []
    for event in numbered:
        begun += [event.time_s] * (event.life + 1 - len(begun))
    for event in of_job:
        life = max(0, bisect.bisect_right(begun, event.time_s) - 1)
        numbered.append(msgspec.structs.replace(event, life=life))
    return sorted(numbered, key=lambda event: event.time_s)


def _numbered(segments: Sequence[tuple[str, list[LoggedEvent]]]) -> list[LoggedEvent]:
    begun: dict[str, float] = {}
    for incarnation, part in segments:
        if incarnation:
            begun[incarnation] = min(begun.get(incarnation, part[0].time_s), part[0].time_s)
    if not begun:
        return _numbered_in_turn(segments)
    order = sorted(begun, key=lambda incarnation: (number_of(incarnation), begun[incarnation]))
    numbers = {incarnation: life for life, incarnation in enumerate(order)}
    numbered: list[LoggedEvent] = []
    for incarnation, part in segments:
        life = numbers.get(incarnation)
        if life is None:
            at_s = part[0].time_s
            life = numbers[min(order, key=lambda incarnation: abs(begun[incarnation] - at_s))]
        numbered += [msgspec.structs.replace(event, life=life) for event in part]
    return sorted(numbered, key=lambda event: event.time_s)


def _numbered_in_turn(segments: Sequence[tuple[str, list[LoggedEvent]]]) -> list[LoggedEvent]:
    counts: dict[int | None, int] = defaultdict(int)
    numbered: list[LoggedEvent] = []
    for _, part in segments:
        process = part[0].process
        numbered += [msgspec.structs.replace(event, life=counts[process]) for event in part]
        counts[process] += 1
    return sorted(numbered, key=lambda event: event.time_s)


def _segments(events: Iterable[LoggedEvent]) -> list[tuple[str, list[LoggedEvent]]]:
    """Return the lives of each process with the incarnation in which it trained."""
    by_process: dict[int | None, list[LoggedEvent]] = defaultdict(list)
    for event in events:
        by_process[event.process].append(event)
    segments: list[tuple[str, list[LoggedEvent]]] = []
    for of_process in by_process.values():
        of_process.sort(key=lambda event: event.time_s)
        parts: list[list[LoggedEvent]] = [[]]
        has_begun, trains_in = False, ""
        for event in of_process:
            is_other = bool(trains_in and event.incarnation and _life_name(event) != trains_in)
            is_other = is_other or bool(parts[-1] and parts[-1][-1].life != event.life)
            if is_other or (event.point in _BEGINNINGS and has_begun):
                parts.append([])
                has_begun, trains_in = False, ""
            has_begun = has_begun or event.name in _BEGUN or event.name in _TRAINED
            if event.name == _DUE:
                trains_in = trains_in or _life_name(event)
            parts[-1].append(event)
        segments += [(_incarnation_of(part), part) for part in parts if part]
    return segments


def _life_name(event: LoggedEvent) -> str:
    return event.incarnation.partition(".")[0]  # a forced save's lies below its life's


def _incarnation_of(part: Sequence[LoggedEvent]) -> str:
    """Return the incarnation in which a process trained; a restore renews the one before."""
    saving = (_life_name(event) for event in part if event.name == _DUE and event.incarnation)
    known = (_life_name(event) for event in reversed(part) if event.incarnation)
    return next(saving, "") or next(known, "")


def lives_of(events: Iterable[LoggedEvent]) -> tuple[JobLife, ...]:
    """Return the lives of the job in order, from events that are numbered by life."""
    by_life: dict[int, list[LoggedEvent]] = defaultdict(list)
    for event in events:
        by_life[event.life].append(event)
    return tuple(_life(number, by_life[number]) for number in sorted(by_life))


def _life(number: int, events: Sequence[LoggedEvent]) -> JobLife:
    begun = _begun(events)
    restored = [event for event in begun if event.name == "restore.finished"]
    restored_steps = {whole(event, "step") for event in restored}
    restored_step = restored_steps.pop() if len(restored_steps) == 1 else None
    every_step = any(event.name == _STEP for event in events)
    steps = _finished_steps(events, _STEP if every_step else _DUE)
    is_from_nothing = bool(begun) or bool(steps and steps[0][0] <= 1)
    faults = [event.time_s for event in events if event.name == _FAULT]
    tiers = {tier for event in restored if isinstance(tier := event.fields.get("tier"), str)}
    return JobLife(
        number=number,
        begin_s=min(event.time_s for event in events),
        end_s=max(event.time_s for event in events),
        trains_from_s=_trains_from_s(begun, steps),
        restored_step=restored_step,
        from_step=restored_step if restored else 0 if is_from_nothing else None,
        tier=tiers.pop() if len(tiers) == 1 and tiers <= {LOCAL, PERSISTENT} else "",
        steps=steps,
        every_step=every_step,
        fault_s=min(faults, default=None),
    )


def _begun(events: Iterable[LoggedEvent]) -> list[LoggedEvent]:
    """Return the ends of restores after which a process made its first step of a life, or none."""
    begun: list[LoggedEvent] = []
    trained: set[int | None] = set()
    for event in sorted(events, key=lambda event: event.time_s):
        if event.name in _TRAINED:
            trained.add(event.process)
        elif event.name in _BEGUN and event.process not in trained:
            begun.append(event)
    return begun


def _trains_from_s(
    begun: Sequence[LoggedEvent], steps: Sequence[tuple[int, float]]
) -> float | None:
    """Return when training began: after the restores, and not later than the first step."""
    restored_s = max((event.time_s for event in begun), default=None)
    if not steps:
        return restored_s
    first_s = steps[0][1]
    return first_s if restored_s is None else min(restored_s, first_s)


def _finished_steps(events: Iterable[LoggedEvent], name: str) -> tuple[tuple[int, float], ...]:
    first: dict[int, float] = {}
    for event in events:
        step = whole(event, "step") if event.name == name else None
        if step is not None:
            first[step] = min(first.get(step, event.time_s), event.time_s)
    finished: list[tuple[int, float]] = []
    for step in sorted(first):  # clocks of hosts may differ: time never goes back here
        finished.append((step, max(first[step], finished[-1][1]) if finished else first[step]))
    return tuple(finished)


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


def read_history(directory: Path) -> tuple[EventHistory, list[str]]:
    """Return the events of the log in ``directory``, and sentences about what they lack. Blocks.

    Raises:
      CheckpointError: it is no directory, or holds no log.
      OSError: it cannot be listed.
    """
    hint = "give the event_log of the job"
    if not directory.is_dir():
        raise CheckpointError("read", str(directory), "there is no such directory", hint=hint)
    history = read_events(directory)
    if not history.files and not history.unreadable:
        problem = "no file events_*.jsonl is there"
        raise CheckpointError("read", str(directory), problem, hint=hint)
    return history, _warnings_of(history)


def read_log(directory: Path) -> ReportRun:
    """Return the run of the log in ``directory``, with what the report cannot know. Blocks.

    Raises:
      CheckpointError: it is no directory, holds no log, or none with an event.
      OSError: it cannot be listed.
    """
    history, warnings = read_history(directory)
    if not history.events:
        problem = " ".join(["no event is in it.", *warnings]).rstrip(".")
        hint = "let the job write at least one event"
        raise CheckpointError("read", str(directory), problem, hint=hint)
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
    """Return the events as figures need them, by time and numbered by life.

    A step that an object of Orbax's has loaded beside the RAM tier ends a restore, as others do.
    """
    of_run: list[LoggedEvent] = []
    restoring: set[int | None] = set()
    for event in sorted(events, key=lambda event: event.time_s):
        name, fields = bounded_text(event.name), event.fields
        if event.point == "restore.stage.started":
            restoring.add(event.process)
        elif name in _RESTORE_OVER:
            restoring.discard(event.process)
        elif event.point == "restore.stage.loaded" and event.process not in restoring:
            name = "restore.finished"
            fields = {field: value for field, value in fields.items() if field != "stage"}
        of_run.append(msgspec.structs.replace(event, name=name, fields=fields))
    return number_lives(of_run)


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
        warnings.append("The log is large; its oldest events are left out.")
    lost = sum(event.name == "log.lost" for event in history.events)
    if lost:
        times = count_text(lost, "time", "times")
        warnings.append(f"The log itself lost events, {times} (log.lost).")
    return warnings
