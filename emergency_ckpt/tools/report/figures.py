"""The figures of a run: the use of its time, and its recoveries; as numbers and in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from emergency_ckpt.core.wording import TIER_WORDS, count_text, seconds_text
from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.report.lives import JobLife, lives_of, number
from emergency_ckpt.tools.report.spans import marks_of

MOST_FAILURES = 20
MOST_RECOVERIES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunGoodput:
    """Seconds of a run, by their use; ``wall_s`` is the sum of the others.

    Attributes:
      wall_s: from the first event to the last.
      start_s: until the first life had its state (start, compilation).
      training_s: steps that count at the end, without stalls.
      stalled_s: longest stalls of a process's training thread for saves.
      redone_s: steps that were lost and done again, and what was trained after the last step known.
      recovery_s: from the end of training in a life until the next one had its state.
      end_s: after the last step: waits for saves, and the end of the processes.
    """

    wall_s: float
    start_s: float
    training_s: float
    stalled_s: float
    redone_s: float
    recovery_s: float
    end_s: float

    @property
    def share(self) -> float:
        """Goodput: training that counts, of the whole; 0 for a run without time."""
        return self.training_s / self.wall_s if self.wall_s > 0 else 0.0


def goodput_of(lives: Sequence[JobLife], events: Iterable[LoggedEvent]) -> RunGoodput:
    """Return the use of the run's time. Lives are in order; their times may overlap a little."""
    if not lives:
        return RunGoodput(
            wall_s=0, start_s=0, training_s=0, stalled_s=0, redone_s=0, recovery_s=0, end_s=0
        )
    begin_s = min(life.begin_s for life in lives)
    over_s = max(life.end_s for life in lives)
    start_s = recovery_s = kept_s = redone_s = 0.0
    mark_s, has_trained, keeps = begin_s, False, _last_kept_steps(lives)
    for life, keep in zip(lives, keeps, strict=True):
        if life.trains_from_s is None or not life.steps:
            continue
        from_s = max(mark_s, life.trains_from_s)
        if has_trained:
            recovery_s += from_s - mark_s
        else:
            start_s += from_s - mark_s
        last_s = max(from_s, life.steps[-1][1])
        kept_until_s = from_s if keep is None else life.reached_s(keep)
        split_s = min(last_s, max(from_s, from_s if kept_until_s is None else kept_until_s))
        kept_s += split_s - from_s
        redone_s += last_s - split_s
        mark_s, has_trained = last_s, True
    if not has_trained:
        start_s = over_s - begin_s
        mark_s = over_s
    stalled_s = min(kept_s, _stalls_s(events))
    return RunGoodput(
        wall_s=over_s - begin_s,
        start_s=start_s,
        training_s=kept_s - stalled_s,
        stalled_s=stalled_s,
        redone_s=redone_s,
        recovery_s=recovery_s,
        end_s=max(0.0, over_s - mark_s),
    )


def _last_kept_steps(lives: Sequence[JobLife]) -> list[int | None]:
    """Return for each life its last step that no later life did again."""
    keeps: list[int | None] = []
    lowest: int | None = None
    for life in reversed(lives):
        last = life.last_step
        keeps.append(last if lowest is None or last is None else min(last, lowest))
        if life.trains_from_s is not None and life.steps:
            lowest = life.back_to if lowest is None else min(lowest, life.back_to)
    return keeps[::-1]


def _stalls_s(events: Iterable[LoggedEvent]) -> float:
    """Return the sum over all saves of the longest stall that a process had for it."""
    longest: dict[tuple[int, object, object], float] = {}
    for event in events:
        stall_s = number(event, "seconds") if event.name == "save.captured" else None
        if stall_s is not None:
            key = (event.life, event.fields.get("tier"), event.fields.get("step"))
            longest[key] = max(longest.get(key, 0.0), stall_s)
    return sum(longest.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecovery:
    """The way from one life of the job to training in the next.

    Attributes:
      life: number of the new life.
      last_step: last step that is known to be finished before; None when none is.
      restored_step: None when there was nothing to restore, or the processes disagree.
      tier: as ``TierName``; "" when it is not known.
      steps_lost: steps to be done again; None when unknown.
      at_least: True when only steps with a save were logged, so that more may have been lost.
      lost_s: recovery point (RPO): seconds of training between the restored step and the last one.
      recovery_s: recovery time (RTO): seconds from the end of training to the first sign of
        training in the new life; None when the new life never trained.
      restore_s: longest ``restore`` of a process, in seconds; None when there was none.
    """

    life: int
    last_step: int | None
    restored_step: int | None
    tier: str
    steps_lost: int | None
    at_least: bool
    lost_s: float | None
    recovery_s: float | None
    restore_s: float | None


def recoveries_of(
    lives: Sequence[JobLife], events: Sequence[LoggedEvent]
) -> tuple[RunRecovery, ...]:
    """Return one recovery for each life but the first that had something to recover from."""
    restores = [event for event in events if event.name == "restore.finished"]
    return tuple(
        _recovery(lives[:index], life, [event for event in restores if event.life == life.number])
        for index, life in enumerate(lives)
        if index
    )


def _recovery(
    before: Sequence[JobLife], life: JobLife, restores: Sequence[LoggedEvent]
) -> RunRecovery:
    trained = [earlier for earlier in before if earlier.steps] or [before[-1]]
    last = trained[-1]
    back_to = life.from_step
    lost = lost_s = None
    if back_to is not None and last.last_step is not None:
        lost, lost_s = max(0, last.last_step - back_to), _lost_s(trained, back_to)
    times = [number(event, "seconds") or 0.0 for event in restores]
    return RunRecovery(
        life=life.number,
        last_step=last.last_step,
        restored_step=life.restored_step,
        tier=life.tier,
        steps_lost=lost,
        at_least=not last.every_step,
        lost_s=lost_s,
        recovery_s=_recovery_s(last, life),
        restore_s=max(times, default=None),
    )


def _lost_s(trained: Sequence[JobLife], back_to: int) -> float | None:
    """Return the seconds of training after ``back_to`` in each life that went beyond it."""
    total = 0.0
    for life in reversed(trained):
        if life.last_step is None or life.last_step <= back_to:
            break
        end_s, reached_s = life.steps[-1][1], life.reached_s(back_to)
        if reached_s is not None:
            return total + end_s - reached_s
        if life.trains_from_s is None:
            return None
        total += end_s - life.trains_from_s
        if life.back_to <= back_to:
            break
    return total


def _recovery_s(last: JobLife, life: JobLife) -> float | None:
    if life.trains_from_s is None:
        return None
    until_s = life.steps[0][1] if life.every_step and life.steps else life.trains_from_s
    return max(0.0, until_s - last.stopped_s)


def _period_of(events: Sequence[LoggedEvent], lives: Sequence[JobLife]) -> str:
    """Return the size of the run, and when the run was."""
    processes = len({event.process for event in events} - {None})
    begin, end = (_clock(choose(event.time_s for event in events)) for choose in (min, max))
    return (
        f"{count_text(processes, 'process', 'processes')},"
        f" {count_text(len(lives), 'life', 'lives')},"
        f" {begin} to {end} UTC, {count_text(len(events), 'event', 'events')}"
    )


def _figures_of(
    use: RunGoodput, recoveries: Sequence[RunRecovery], events: Sequence[LoggedEvent]
) -> dict[str, str]:
    """Return the figures of the whole run by their names."""
    lost = [recovery.steps_lost for recovery in recoveries if recovery.steps_lost is not None]
    points = [recovery.lost_s for recovery in recoveries if recovery.lost_s is not None]
    times = [recovery.recovery_s for recovery in recoveries if recovery.recovery_s is not None]
    least = "at least " if any(recovery.at_least for recovery in recoveries) else ""
    failed = sum(event.name in ("save.incomplete", "persistent.failed") for event in events)
    return {
        "goodput": f"{use.share:.1%}",
        "run": seconds_text(use.wall_s),
        "recoveries": str(len(recoveries)),
        "steps lost, all": f"{least}{sum(lost)}" if lost else "-",
        "RPO, longest": f"{least}{seconds_text(max(points))}" if points else "-",
        "RTO, longest": seconds_text(max(times)) if times else "-",
        "failed saves": str(failed),
    }


def summary_lines(events: Sequence[LoggedEvent]) -> list[str]:
    """Return the figures, the newest recoveries and the newest failures, a line each."""
    lives = lives_of(events)
    recoveries = recoveries_of(lives, events)
    figures = _figures_of(goodput_of(lives, events), recoveries, events)
    begin_s = min(event.time_s for event in events)
    failures = [mark for mark in marks_of(events) if mark.is_failure]
    lines = [_period_of(events, lives), *(f"{name}: {value}" for name, value in figures.items())]
    if len(recoveries) > MOST_RECOVERIES:
        lines.append(f"{len(recoveries) - MOST_RECOVERIES} older recoveries are left out")
    lines += [_words_of(recovery) for recovery in recoveries[-MOST_RECOVERIES:]]
    if len(failures) > MOST_FAILURES:
        lines.append(f"{len(failures) - MOST_FAILURES} older failures are left out")
    lines += [
        f"failure after {mark.time_s - begin_s:.1f} s,"
        f" {'job' if mark.process is None else f'process {mark.process}'}: {mark.name}"
        + (f": {mark.label}" if mark.label else "")
        for mark in failures[-MOST_FAILURES:]
    ]
    return lines


def _words_of(recovery: RunRecovery) -> str:
    tier = TIER_WORDS.get(recovery.tier, "nothing")
    if recovery.steps_lost is None:
        return f"life {recovery.life}: it never trained, or the step is not known"
    least = "at least " if recovery.at_least else ""
    steps = count_text(recovery.steps_lost, "step", "steps")
    text = (
        f"life {recovery.life}: back to step {recovery.restored_step or 0} from {tier} after step"
        f" {recovery.last_step}, {least}{steps} lost"
    )
    if recovery.lost_s is not None:
        text += f" (RPO {seconds_text(recovery.lost_s)})"
    if recovery.recovery_s is not None:
        text += f", {seconds_text(recovery.recovery_s)} until training went on (RTO)"
    return text


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
