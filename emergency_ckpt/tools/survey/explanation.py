"""The explanation of a job's last restore, from the events of its processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from emergency_ckpt.extras.event_log.records import LoggedEvent
from emergency_ckpt.tools.event_fields import whole
from emergency_ckpt.types import PERSISTENT

FORMAT = 2
PHASES: tuple[str, ...] = ("plan", "load", "fetch", "settle")
"""``plan``: until the leader's answer. ``load``: storage into RAM. ``fetch``: the check of a
process's own shards and the transfer of others, onto the devices. ``settle``: host states, the
decision of all, and what RAM keeps."""

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

_OUTCOMES = {
    "restore.finished": "finished",
    "restore.nothing": "nothing",
    "restore.failed": "failed",
}
_WORST_FIRST = ("failed", "unfinished", "finished", "nothing")
_ENDS_OF_PHASES: Mapping[str, str] = {
    "restore.stage.planned": "plan",
    "restore.stage.loaded": "load",
    "restore.stage.fetched": "fetch",
    **dict.fromkeys(_OUTCOMES, "settle"),
}


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


class RestoredProcess(msgspec.Struct, frozen=True):
    """One process's part.

    Attributes:
      outcome: "finished", "nothing", "failed" or "unfinished".
      after_s: start of its part, in seconds since the first process began.
      phases: seconds of each of ``PHASES``; 0 for a phase that it did not reach or need.
      received: bytes by the peer that sent them.
      reason: the error of a failed restore.
      last_event: its last event of the restore.
    """

    process: int
    slice: int | None
    outcome: str
    after_s: float
    seconds: float
    phases: dict[str, float]
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
      outcome: the worst of all processes.
      step, tier: of the restored save; null without one. The tier is storage when any process read
        the save there.
      requested_step: the step that was asked for; null for the newest.
    """

    format: int
    run_id: str
    incarnation: str
    life: int
    started_s: float
    seconds: float
    outcome: str
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
    by_process: dict[int, list[LoggedEvent]] = {}
    for event in events:
        if event.process is not None and _life(event) == _life(newest):
            by_process.setdefault(event.process, []).append(event)
    parts = [part for process in sorted(by_process) if (part := _last_part(by_process[process]))]
    started_s = min(part[0].time_s for part in parts)
    processes = tuple(_process(part, started_s) for part in parts)
    outcomes = {process.outcome for process in processes}
    of_all = [event for part in parts for event in part]
    finished = [event for event in of_all if event.point == "restore.finished"]
    started = [event for event in of_all if event.point == "restore.stage.started"]
    tiers = {_text(event, "tier") for event in finished}
    rejected = {
        PassedOver(whole(event, "step") or 0, _text(event, "tier"), _text(event, "reason"))
        for event in of_all
        if event.name == "restore.rejected"
    }
    return RestoreExplanation(
        format=FORMAT,
        run_id=newest.run_id,
        incarnation=newest.incarnation,
        life=newest.life,
        started_s=started_s,
        seconds=max(part[-1].time_s for part in parts) - started_s,
        outcome=next(outcome for outcome in _WORST_FIRST if outcome in outcomes),
        step=_first(finished, "step"),
        tier=PERSISTENT if PERSISTENT in tiers else max(tiers, default=""),
        requested_step=_first(started, "requested_step"),
        passed_over=tuple(sorted(rejected, reverse=True)),
        remarks=_remarks(of_all, started_s),
        processes=processes,
    )


def _life(event: LoggedEvent) -> tuple[str, int, str]:
    return event.run_id, event.life, event.incarnation


def _last_part(events: Sequence[LoggedEvent]) -> list[LoggedEvent]:
    """Return a process's events of its last restore; none when it began none."""
    part: list[LoggedEvent] = []
    has_begun = is_over = False
    for event in events:
        if event.point == "restore.stage.started":
            part, has_begun, is_over = [], True, False
        if not has_begun or is_over:
            continue
        part.append(event)
        is_over = event.name in _OUTCOMES
    if not is_over:  # what a process did after it had left a restore without a word
        count = next((n for n, event in enumerate(part) if not _belongs(event)), len(part))
        part = part[:count]
    return part


def _belongs(event: LoggedEvent) -> bool:
    return event.name.startswith("restore.") or event.point in _REMARKS or event.point == _WARNING


def _process(part: Sequence[LoggedEvent], started_s: float) -> RestoredProcess:
    phases = dict.fromkeys(PHASES, 0.0)
    before_s = part[0].time_s
    received: dict[str, int] = {}
    for event in part:
        if (phase := _ENDS_OF_PHASES.get(event.point)) is not None:
            phases[phase] += event.time_s - before_s
            before_s = event.time_s
        if event.point == "restore.stage.received":
            # A later attempt counts anew: its bytes replace those of the attempt that failed.
            received[_text(event, "holder")] = whole(event, "size_bytes") or 0
    last, newest = part[-1], {event.point: event for event in part}
    end = newest.get("restore.finished")
    fetched, loaded = (
        end or newest.get(f"restore.stage.{stage}") or part[0] for stage in ("fetched", "loaded")
    )
    return RestoredProcess(
        process=last.process or 0,
        slice=last.slice,
        outcome=_OUTCOMES.get(last.name, "unfinished"),
        after_s=part[0].time_s - started_s,
        seconds=last.time_s - part[0].time_s,
        phases=phases,
        bytes_local=whole(fetched, "bytes_local") or 0,
        bytes_peer=whole(fetched, "bytes_peer") or 0,
        bytes_persistent=whole(loaded, "bytes_persistent") or 0,
        received=received,
        reason=_text(last, "reason") if last.name == "restore.failed" else "",
        last_event=last.point[:_TEXT_CHARS],
    )


def _remarks(events: Sequence[LoggedEvent], started_s: float) -> tuple[RestoreRemark, ...]:
    remarks: list[RestoreRemark] = []
    for event in events:
        fields = [name for name in _REMARKS.get(event.point, ()) if name in event.fields]
        if event.point in _REMARKS:
            text = ", ".join(f"{name} {_text(event, name)}" for name in fields)
            after_s = event.time_s - started_s
            remarks.append(RestoreRemark(after_s, event.process or 0, event.point, text))
    return tuple(sorted(remarks, key=lambda remark: remark.after_s)[:_MAX_REMARKS])


def _first(events: Sequence[LoggedEvent], field: str) -> int | None:
    values = (whole(event, field) for event in events)
    return next((value for value in values if value is not None), None)


def _text(event: LoggedEvent, field: str) -> str:
    return str(event.fields.get(field, ""))[:_TEXT_CHARS]
