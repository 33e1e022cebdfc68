"""``eckpt ls --explain``: the explanation of the last restore, from a job's event log."""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
from collections.abc import Mapping, Sequence

import msgspec

from emergency_ckpt.core.wording import TIER_WORDS, seconds_text, size_text
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.cli.arguments import BAD, GOOD, print_json
from emergency_ckpt.tools.cli.output import print_line, print_table
from emergency_ckpt.tools.report.lives import read_history, whole
from emergency_ckpt.types import PERSISTENT

FORMAT = 2
PHASES: tuple[str, ...] = ("plan", "load", "fetch", "settle")
"""``plan``: until the leader's answer. ``load``: storage into RAM. ``fetch``: the check of a
process's own shards and the transfer of others, onto the devices. ``settle``: host states, the
decision of all, and what RAM keeps."""

_MOST_SENDERS = 4
_SPENT = (*map(str.upper, PHASES), "TOTAL")
_COLUMNS = ("PROCESS", "SLICE", *_SPENT, "OWN RAM", "PEERS", "STORAGE", "RECEIVED FROM")

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
    life = newest.run_id, newest.life, newest.incarnation
    by_process: dict[int, list[LoggedEvent]] = {}
    for event in events:
        event_life = event.run_id, event.life, event.incarnation
        if event.process is not None and event_life == life:
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
        part = list(itertools.takewhile(_belongs, part))
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


def run(args: argparse.Namespace) -> int:
    """Tell the explanation; return 1 when the restore failed or did not end, or there is none."""
    history, warnings = read_history(args.explain)
    for warning in warnings:
        print_line(f"{args.explain}: {warning}", sys.stderr)
    explanation = last_restore(history.events)
    if explanation is None:
        hint = "set event_log, or use the log of a job that has restored"
        problem = f"no restore is in its {len(history.events)} events"
        raise CheckpointError("read", str(args.explain), problem, hint=hint)
    if args.json:
        print_json(explanation)
    else:
        _print(explanation)
    is_good = explanation.outcome in ("finished", "nothing") and not history.unreadable
    return GOOD if is_good else BAD


def _print(explanation: RestoreExplanation) -> None:
    when = datetime.datetime.fromtimestamp(explanation.started_s).astimezone()
    print_line(f"run {explanation.run_id or '-'}, {when:%Y-%m-%d %H:%M:%S %z}")
    print_line(f"{_headline(explanation)}, in {seconds_text(explanation.seconds)}")
    if explanation.passed_over:
        print("\nnewer steps that were passed over:")
        for rejected in explanation.passed_over:
            tier = TIER_WORDS.get(rejected.tier, rejected.tier)
            print_line(f"  step {rejected.step} in {tier}: {rejected.reason}")
    if explanation.remarks:
        print("\nmeanwhile:")
        for remark in explanation.remarks:
            text = f"{remark.name}: {remark.text}"
            line = f"  +{remark.after_s:.3f} s  process {remark.process}  {text}"
            print_line(line)
    print()
    print_table(_COLUMNS, [_row(process) for process in explanation.processes])
    for process in explanation.processes:
        if process.outcome in ("failed", "unfinished"):
            reason = process.reason or f"it did not end; its last event is {process.last_event}"
            print_line(f"process {process.process}: {reason}")


def _headline(explanation: RestoreExplanation) -> str:
    asked = explanation.requested_step
    tier = TIER_WORDS.get(explanation.tier, explanation.tier)
    words = {
        "finished": f"step {explanation.step} was restored from {tier}",
        "nothing": "there was nothing to restore: a fresh start",
        "failed": "the restore failed",
        "unfinished": "the restore did not end on all processes",
    }
    return words[explanation.outcome] + ("" if asked is None else f" (step {asked} was requested)")


def _row(process: RestoredProcess) -> list[str]:
    spent = (*(process.phases[phase] for phase in PHASES), process.seconds)
    senders = sorted(process.received.items(), key=lambda item: -item[1])
    named = [f"{holder} {size_text(nbytes)}" for holder, nbytes in senders[:_MOST_SENDERS]]
    more = [f"{len(senders) - _MOST_SENDERS} more"] if len(senders) > _MOST_SENDERS else []
    return [
        str(process.process),
        "-" if process.slice is None else str(process.slice),
        *(seconds_text(value) if value else "-" for value in spent),
        size_text(process.bytes_local),
        size_text(process.bytes_peer),
        size_text(process.bytes_persistent),
        ", ".join([*named, *more]) or "-",
    ]
