"""The figures of a run in words, for the page and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from emergency_ckpt.core.wording import TIER_WORDS, count_text, seconds_text
from emergency_ckpt.extras.event_log.records import LoggedEvent
from emergency_ckpt.tools.report.figures import RunGoodput, RunRecovery, goodput_of, recoveries_of
from emergency_ckpt.tools.report.lives import JobLife, lives_of
from emergency_ckpt.tools.report.spans import marks_of

MOST_FAILURES = 20
MOST_RECOVERIES = 100


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
    lines += [_recovery(recovery) for recovery in recoveries[-MOST_RECOVERIES:]]
    if len(failures) > MOST_FAILURES:
        lines.append(f"{len(failures) - MOST_FAILURES} older failures are left out")
    lines += [
        f"failure after {mark.time_s - begin_s:.1f} s,"
        f" {'job' if mark.process is None else f'process {mark.process}'}: {mark.name}"
        + (f": {mark.label}" if mark.label else "")
        for mark in failures[-MOST_FAILURES:]
    ]
    return lines


def _recovery(recovery: RunRecovery) -> str:
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
