"""The explanation of a job's last restore, from the events of its processes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from emergency_ckpt.extras.event_log.records import LoggedEvent
from emergency_ckpt.tools.event_fields import whole
from emergency_ckpt.types import PERSISTENT

FORMAT = 1
_MAX_REMARKS = 200
_TEXT_CHARS = 1000
_REMARKS: Mapping[str, tuple[str, ...]] = {
    "restore.stage.replanned": ("reason",),
    "restore.quarantined": ("step", "holder", "shard", "detail"),
    "restore.suspect": ("text",),
    "restore.peer_unreachable": ("role", "peer", "address", "reason"),
    "persistent.problem.unreachable": ("reason",),
    "restore.note": ("text",),
    "divergence": ("step", "leaf", "holders", "text"),
}
"""Events that a person should know of, and the fields that say why."""
_WARNING = "warning.restore_without_host_state"
"""The event of a restore whose name does not begin with "restore."."""

_ENDS = {
    "restore.finished": "finished",
    "restore.nothing": "nothing",
    "restore.failed": "failed",
}
Outcome = Literal["finished", "nothing", "failed", "unfinished"]


class PassedOver(msgspec.Struct, frozen=True, order=True):
    """A step that was newer than the restored one, and why it was not taken."""

    step: int
    tier: str
    reason: str


class RestoreRemark(msgspec.Struct, frozen=True):
    """Something that happened meanwhile. ``after_s``: seconds since the restore began."""

    after_s: float
    process: int
    name: str
    text: str


class RestorePhases(msgspec.Struct, frozen=True):
    """Seconds that a process spent; 0 for a phase that it did not reach or need.

    Attributes:
      plan: until the leader's plan: every process reports what its RAM has.
      load: storage into RAM.
      fetch: the check of its own shards and the transfer of others, onto the devices.
      settle: host state, the decision of all, and what RAM keeps.
    """

    plan: float = 0.0
    load: float = 0.0
    fetch: float = 0.0
    settle: float = 0.0


class RestoredProcess(msgspec.Struct, frozen=True):
    """One process's part.

    Attributes:
      after_s: start of its part, in seconds since the first process began.
      received: bytes by the peer that sent them.
      reason: the error of a failed restore.
      last_event: its last event of the restore.
    """

    process: int
    slice: int | None
    outcome: Outcome
    after_s: float
    seconds: float
    phases: RestorePhases
    bytes_local: int
    bytes_peer: int
    bytes_persistent: int
    received: dict[str, int]
    reason: str
    last_event: str


class RestoreExplanation(msgspec.Struct, frozen=True):
    """The last restore of a job.

    Attributes:
      incarnation: before the restore.
      life: restarts by ``eckpt launch`` before it.
      started_s: Unix time at which the first process began.
      seconds: until the last process ended, or was last heard of.
      step, tier: of the restored save; null without one.
      requested_step: the step that was asked for; null for the newest.
    """

    format: int
    run_id: str
    incarnation: str
    life: int
    started_s: float
    seconds: float
    outcome: Outcome
    step: int | None
    tier: str
    requested_step: int | None
    passed_over: tuple[PassedOver, ...]
    remarks: tuple[RestoreRemark, ...]
    processes: tuple[RestoredProcess, ...]


def last_restore(events: Sequence[LoggedEvent]) -> RestoreExplanation | None:
    """Return the explanation of the newest restore in ``events``, in order of time; or None."""
    starts = [event for event in events if event.point == "restore.stage.started"]
    if not starts:
        return None
    newest = starts[-1]
    key = _life(newest)
    by_process: dict[int, list[LoggedEvent]] = {}
    for event in events:
        if event.process is not None and _life(event) == key:
            by_process.setdefault(event.process, []).append(event)
    parts = {
        process: part for process, all_ in sorted(by_process.items()) if (part := _restore_of(all_))
    }
    started_s = min(part[0].time_s for part in parts.values())
    processes = tuple(_process(part, started_s) for part in parts.values())
    return RestoreExplanation(
        format=FORMAT,
        run_id=newest.run_id,
        incarnation=newest.incarnation,
        life=newest.life,
        started_s=started_s,
        seconds=max(part[-1].time_s for part in parts.values()) - started_s,
        outcome=_outcome(process.outcome for process in processes),
        step=_first(parts.values(), "restore.finished", "step"),
        tier=_tier(parts.values()),
        requested_step=_first(parts.values(), "restore.stage.started", "requested_step"),
        passed_over=_passed_over(parts.values()),
        remarks=_remarks(parts.values(), started_s),
        processes=processes,
    )


def _life(event: LoggedEvent) -> tuple[str, int, str]:
    return event.run_id, event.life, event.incarnation


def _restore_of(events: Sequence[LoggedEvent]) -> list[LoggedEvent]:
    """Return a process's events of its last restore; none when it began none."""
    starts = [n for n, event in enumerate(events) if event.point == "restore.stage.started"]
    if not starts:
        return []
    begin = starts[-1]
    end = next((n for n in range(begin, len(events)) if events[n].name in _ENDS), None)
    if end is None:
        end = begin
        while end + 1 < len(events) and _belongs(events[end + 1]):
            end += 1
    return list(events[begin : end + 1])


def _belongs(event: LoggedEvent) -> bool:
    return event.name.startswith("restore.") or event.point in _REMARKS or event.point == _WARNING


def _process(part: Sequence[LoggedEvent], started_s: float) -> RestoredProcess:
    ends = {event.point: event for event in part}
    last = part[-1]
    fetched = ends.get("restore.stage.fetched")
    finished = ends.get("restore.finished")
    received: dict[str, int] = {}
    for event in part:
        if event.point == "restore.stage.received":
            # A later attempt counts anew: its bytes replace those of the attempt that failed.
            received[_text(event, "holder")] = whole(event, "size_bytes") or 0
    return RestoredProcess(
        process=last.process or 0,
        slice=last.slice,
        outcome=_ENDS.get(last.name, "unfinished"),  # pyright: ignore[reportArgumentType]
        after_s=part[0].time_s - started_s,
        seconds=last.time_s - part[0].time_s,
        phases=_phases(part),
        bytes_local=_bytes(finished or fetched, "bytes_local"),
        bytes_peer=_bytes(finished or fetched, "bytes_peer"),
        bytes_persistent=_bytes(finished or ends.get("restore.stage.loaded"), "bytes_persistent"),
        received=received,
        reason=_text(last, "reason") if last.name == "restore.failed" else "",
        last_event=last.point[:_TEXT_CHARS],
    )


def _bytes(event: LoggedEvent | None, field: str) -> int:
    return 0 if event is None else whole(event, field) or 0


def _phases(part: Sequence[LoggedEvent]) -> RestorePhases:
    """Return the phases: each lasts until the event that ends it, over all attempts together."""
    ends = {
        "restore.stage.planned": "plan",
        "restore.stage.loaded": "load",
        "restore.stage.fetched": "fetch",
    }
    ends |= dict.fromkeys(_ENDS, "settle")
    spent: dict[str, float] = dict.fromkeys(["plan", "load", "fetch", "settle"], 0.0)
    before_s = part[0].time_s
    for event in part:
        if (phase := ends.get(event.point)) is not None:
            spent[phase] += event.time_s - before_s
            before_s = event.time_s
    return RestorePhases(**spent)


def _outcome(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome: a restore is that of all processes."""
    present = set(outcomes)
    order: tuple[Outcome, ...] = ("failed", "unfinished", "finished", "nothing")
    return next(outcome for outcome in order if outcome in present)


def _first(parts: Iterable[Sequence[LoggedEvent]], point: str, field: str) -> int | None:
    for part in parts:
        for event in part:
            if event.point == point and (value := whole(event, field)) is not None:
                return value
    return None


def _tier(parts: Iterable[Sequence[LoggedEvent]]) -> str:
    """Return the tier of the restored save: storage when any process read it there."""
    ended = [event for part in parts for event in part if event.name == "restore.finished"]
    tiers = {_text(event, "tier") for event in ended}
    return PERSISTENT if PERSISTENT in tiers else max(tiers, default="")


def _passed_over(parts: Iterable[Sequence[LoggedEvent]]) -> tuple[PassedOver, ...]:
    rejected = {
        PassedOver(whole(event, "step") or 0, _text(event, "tier"), _text(event, "reason"))
        for part in parts
        for event in part
        if event.name == "restore.rejected"
    }
    return tuple(sorted(rejected, reverse=True))


def _remarks(parts: Iterable[Sequence[LoggedEvent]], started_s: float) -> tuple[RestoreRemark, ...]:
    remarks: list[RestoreRemark] = []
    for part in parts:
        for event in part:
            fields = _REMARKS.get(event.point)
            if fields is not None:
                texts = [f"{name} {_text(event, name)}" for name in fields if name in event.fields]
                process = event.process or 0
                after_s = event.time_s - started_s
                remarks.append(RestoreRemark(after_s, process, event.point, ", ".join(texts)))
    return tuple(sorted(remarks, key=lambda remark: remark.after_s)[:_MAX_REMARKS])


def _text(event: LoggedEvent, field: str) -> str:
    return str(event.fields.get(field, ""))[:_TEXT_CHARS]
