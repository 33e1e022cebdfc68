"""Events and records as a run of the demo leaves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from emergency_ckpt.extras.event_log import LoggedEvent
from examples.demo.demo_report import FinishedRun
from examples.demo.results import JobDigest

DIGEST = JobDigest({"params/w[0:2]": "aa", "params/w[2:4]": "bb"}, {0: "i0", 1: "i1"}, ())


def event(
    time_s: float, name: str, *, life: int = 0, process: int = 0, **fields: Any
) -> LoggedEvent:
    """Something that a process reports."""
    return LoggedEvent(
        time_s=time_s,
        name=name,
        life=life,
        process=process,
        slice=process // 2,
        fields=fields,
    )


def job_event(time_s: float, name: str, *, life: int = 0, **fields: Any) -> LoggedEvent:
    """Something that the launcher reports."""
    return LoggedEvent(time_s=time_s, name=name, life=life, fields=fields)


def steps(life: int, first: int, last: int, *, start_s: float) -> list[LoggedEvent]:
    """Both processes finish each step; the loss is 10 - step / 10."""
    return [
        event(start_s + step, name, life=life, process=process, step=step, loss=10 - step / 10)
        for step in range(first, last + 1)
        for process in (0, 1)
        for name in ("train.step", "train.loss")
    ]


def restored(
    process: int, *, local: int = 0, peer: int = 0, persistent: int = 0, **changes: Any
) -> LoggedEvent:
    fields: dict[str, Any] = {"step": 20, "tier": "local", "seconds": 0.25 + process}
    moved = {"bytes_local": local, "bytes_peer": peer, "bytes_persistent": persistent}
    return event(200, "restore.finished", life=1, process=process, **(fields | moved | changes))


def faulty_events(restores: Sequence[LoggedEvent]) -> list[LoggedEvent]:
    """A job of two processes that is hit at step 23 and goes on from step 20 to 30."""
    return [
        job_event(0, "life.started", host_of_process=[0, 1]),
        *steps(0, 1, 23, start_s=1),
        event(24.5, "save.stage", process=1, stage="published", step=20),
        job_event(25, "fault.fired", step=23, hosts=[1], processes=[1], fault="step=23"),
        job_event(26, "process.exited", process=1, host=1, returncode=-9, step=23),
        job_event(27, "ram.lost", hosts=[1]),
        job_event(28, "job.restarting", reason="process 1 died"),
        job_event(100, "life.started", life=1, host_of_process=[0, 1]),
        event(150, "restore.stage", stage="started", life=1),
        *restores,
        *steps(1, 21, 30, start_s=200),
        job_event(300, "job.finished", life=1, reason="all processes finished"),
    ]


SLICE_LOSS = (restored(0, local=1000), restored(1, peer=900))


def baseline(**changes: Any) -> FinishedRun:
    record = FinishedRun(
        finished=True,
        events=[job_event(0, "life.started", host_of_process=[0, 1]), *steps(0, 1, 30, start_s=1)],
        digest=DIGEST,
        corpus=frozenset({"text"}),
        seconds=30.0,
    )
    return dataclasses.replace(record, **changes)


def faulty(restores: Sequence[LoggedEvent] = SLICE_LOSS, **changes: Any) -> FinishedRun:
    record = FinishedRun(
        finished=True,
        events=faulty_events(restores),
        digest=DIGEST,
        corpus=frozenset({"text"}),
        seconds=45.25,
    )
    return dataclasses.replace(record, **changes)


def digest_with(tensors: Mapping[str, str]) -> JobDigest:
    """``DIGEST`` with other bits in some shards."""
    return JobDigest({**DIGEST.tensors, **tensors}, DIGEST.iterators, DIGEST.disagreements)
