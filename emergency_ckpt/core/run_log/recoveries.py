"""Recoveries of a run: steps and seconds of training lost, and seconds until training went on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from emergency_ckpt.core.run_log.lives import JobLife
from emergency_ckpt.core.run_log.run_events import RunEvent, number


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
      away_s: seconds of those until the first event of the new life.
      restore_s: longest ``restore`` of a process, in seconds; None when there was none.
      overlapped_s: longest time that a prefetch ran before ``restore`` was called.
    """

    life: int
    last_step: int | None
    restored_step: int | None
    tier: str
    steps_lost: int | None
    at_least: bool
    lost_s: float | None
    recovery_s: float | None
    away_s: float
    restore_s: float | None
    overlapped_s: float


def recoveries_of(lives: Sequence[JobLife], events: Sequence[RunEvent]) -> tuple[RunRecovery, ...]:
    """Return one recovery for each life but the first that had something to recover from."""
    restores: dict[int, list[RunEvent]] = {}
    for event in events:
        if event.name == "restore.finished":
            restores.setdefault(event.life, []).append(event)
    return tuple(
        _recovery(lives[:index], life, restores.get(life.number, []))
        for index, life in enumerate(lives)
        if index
    )


def _recovery(
    before: Sequence[JobLife], life: JobLife, restores: Sequence[RunEvent]
) -> RunRecovery:
    trained = [each for each in before if each.steps] or [before[-1]]
    last = trained[-1]
    back_to = life.restored_step
    settled = life.trains_from_s is not None
    lost = None
    if settled and last.last_step is not None and (back_to is not None or not restores):
        lost = max(0, last.last_step - (back_to or 0))
    times = [each for each in (number(event, "seconds") for event in restores) if each is not None]
    return RunRecovery(
        life=life.number,
        last_step=last.last_step,
        restored_step=back_to,
        tier=life.tier,
        steps_lost=lost,
        at_least=not last.every_step,
        lost_s=None if lost is None else _lost_s(trained, back_to or 0),
        recovery_s=_recovery_s(last, life),
        away_s=max(0.0, life.begin_s - last.stopped_s),
        restore_s=max(times, default=None),
        overlapped_s=max(
            (number(each, "overlapped_seconds") or 0.0 for each in restores), default=0.0
        ),
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
        if life.restored_step is None or life.restored_step <= back_to:
            break
    return total


def _recovery_s(last: JobLife, life: JobLife) -> float | None:
    if life.trains_from_s is None:
        return None
    until_s = life.steps[0][1] if life.every_step and life.steps else life.trains_from_s
    return max(0.0, until_s - last.stopped_s)
