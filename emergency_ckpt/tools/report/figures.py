"""The figures of a run: the use of its time, its recoveries, its restored bytes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from emergency_ckpt.extras.event_log.records import LoggedEvent
from emergency_ckpt.tools.event_fields import number, text, whole
from emergency_ckpt.tools.report.lives import JobLife

OWN_RAM = "own RAM"
STORAGE = "storage"
UNNAMED_PEERS = "peers"


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
            back_to = life.restored_step or 0
            lowest = back_to if lowest is None else min(lowest, back_to)
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
      away_s: seconds of those until the first event of the new life.
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
    away_s: float
    restore_s: float | None


def recoveries_of(
    lives: Sequence[JobLife], events: Sequence[LoggedEvent]
) -> tuple[RunRecovery, ...]:
    """Return one recovery for each life but the first that had something to recover from."""
    restores: dict[int, list[LoggedEvent]] = {}
    for event in events:
        if event.name == "restore.finished":
            restores.setdefault(event.life, []).append(event)
    return tuple(
        _recovery(lives[:index], life, restores.get(life.number, []))
        for index, life in enumerate(lives)
        if index
    )


def _recovery(
    before: Sequence[JobLife], life: JobLife, restores: Sequence[LoggedEvent]
) -> RunRecovery:
    trained = [earlier for earlier in before if earlier.steps] or [before[-1]]
    last = trained[-1]
    back_to = life.restored_step
    settled = life.trains_from_s is not None
    lost = None
    if settled and last.last_step is not None and (back_to is not None or not restores):
        lost = max(0, last.last_step - (back_to or 0))
    times = [
        seconds
        for seconds in (number(event, "seconds") for event in restores)
        if seconds is not None
    ]
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreBytes:
    """Bytes of one restore of the job: ``bytes_of[process][source]``.

    Attributes:
      life: number of the life that began with this restore.
      sources: own RAM, the peers by name, storage; without those that gave nothing.
    """

    life: int
    sources: tuple[str, ...]
    bytes_of: Mapping[int, Mapping[str, int]]

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by source, over all processes."""
        return {
            source: sum(row.get(source, 0) for row in self.bytes_of.values())
            for source in self.sources
        }


def byte_sources_of(events: Iterable[LoggedEvent]) -> tuple[RestoreBytes, ...]:
    """Return the restores in order of their lives, from the newest that each process finished.

    Peers are named where the log has an event for each (``restore.stage.received``); what such
    events do not account for is under ``UNNAMED_PEERS``.
    """
    finished: dict[tuple[int, int], LoggedEvent] = {}
    received: dict[tuple[int, int, int | None], dict[str, int]] = defaultdict(dict)
    for event in sorted(events, key=lambda event: event.time_s):
        if event.process is None:
            continue
        key = (event.life, event.process)
        if event.name == "restore.finished":
            finished[key] = event
        elif event.point == "restore.stage.received":
            holder, size_bytes = text(event, "holder"), whole(event, "size_bytes")
            if holder and size_bytes:
                received[*key, whole(event, "step")][holder] = size_bytes  # of the last attempt
    rows: dict[int, dict[int, dict[str, int]]] = defaultdict(dict)
    for (life, process), event in finished.items():
        peers = received.get((life, process, whole(event, "step")), {})
        rows[life][process] = _row(event, peers)
    return tuple(_restore(life, rows[life]) for life in sorted(rows))


def _row(event: LoggedEvent, peers: Mapping[str, int]) -> dict[str, int]:
    from_peers = whole(event, "bytes_peer") or 0
    named = peers if sum(peers.values()) <= from_peers else {}
    row = {
        OWN_RAM: whole(event, "bytes_local") or 0,
        **named,
        UNNAMED_PEERS: from_peers - sum(named.values()),
        STORAGE: whole(event, "bytes_persistent") or 0,
    }
    return {source: size for source, size in row.items() if size}


def _restore(life: int, rows: Mapping[int, Mapping[str, int]]) -> RestoreBytes:
    used = {source for row in rows.values() for source in row}
    peers = sorted(used - {OWN_RAM, STORAGE, UNNAMED_PEERS})
    ordered = [OWN_RAM, *peers, UNNAMED_PEERS, STORAGE]
    return RestoreBytes(
        life=life,
        sources=tuple(source for source in ordered if source in used),
        bytes_of={process: rows[process] for process in sorted(rows)},
    )
