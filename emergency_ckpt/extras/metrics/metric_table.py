"""The table from events to metrics. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from emergency_ckpt.events import point_of

Kind = Literal["histogram", "counter", "gauge", "age"]
"""``age``: seconds since the training state was what the event tells of; given as a Unix time."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Samples of one event.

    Attributes:
      event: its point.
      field: the field with the value; empty: each event counts 1.
      label: the value of the metric's label, or the field with it as ``"{field}"``.
    """

    event: str
    field: str = ""
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric; ``label``: the name of its label, empty without one."""

    name: str
    kind: Kind
    meaning: str
    sources: tuple[Source, ...]
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One value of a metric."""

    metric: Metric
    value: float
    label: str = ""


METRICS = (
    Metric(
        "eckpt_save_stall_seconds",
        "histogram",
        "time for which a save held up the training thread",
        (Source("save.captured", "seconds", "{tier}"),),
        "tier",
    ),
    Metric(
        "eckpt_save_ready_wait_seconds",
        "histogram",
        "time for which `save` waited for arrays still being computed, which is no stall",
        (Source("save.captured", "ready_seconds", "{tier}"),),
        "tier",
    ),
    Metric(
        "eckpt_save_seconds",
        "histogram",
        "time of a save from its start in the background until the step is known to be whole",
        (
            Source("save.complete", "seconds", "local"),
            Source("persistent.complete", "seconds", "persistent"),
        ),
        "tier",
    ),
    Metric(
        "eckpt_save_phase_seconds",
        "histogram",
        "parts of a save: copy, publish, push, vote (RAM), host_states, tensors (storage)",
        (
            Source("save.stage.copied", "seconds", "copy"),
            Source("save.stage.published", "seconds", "publish"),
            Source("save.stage.pushed", "seconds", "push"),
            Source("save.stage.voted", "seconds", "vote"),
            Source("persistent.stage.host_states_written", "seconds", "host_states"),
            Source("persistent.stage.tensors_written", "seconds", "tensors"),
        ),
        "phase",
    ),
    Metric(
        "eckpt_saved_bytes_total",
        "counter",
        "bytes of the state that this process has saved",
        (
            Source("save.stage.published", "size_bytes", "local"),
            Source("persistent.stage.tensors_written", "size_bytes", "persistent"),
        ),
        "tier",
    ),
    Metric(
        "eckpt_failed_saves_total",
        "counter",
        "failed saves: incomplete (RAM), storage, preempted (not written in time), stop",
        (
            Source("save.incomplete", label="incomplete"),
            Source("persistent.failed", label="storage"),
            Source("preemption.missed.not_written", label="preempted"),
            Source("stop.not_saved", label="stop"),
        ),
        "reason",
    ),
    Metric(
        "eckpt_skipped_saves_total",
        "counter",
        "saves left out: busy (the previous save was under way), late (a process received the"
        " announcement of the step too late), ignored (not newer), storage (busy or paused there)",
        (
            Source("save.skipped.busy", label="busy"),
            Source("save.skipped.late", label="late"),
            Source("save.skipped.older", label="ignored"),
            Source("save.skipped.paused", label="storage"),
        ),
        "reason",
    ),
    Metric(
        "eckpt_newest_step",
        "gauge",
        "newest step known to be whole in a tier, of this process's life",
        (
            Source("save.complete", "step", "local"),
            Source("persistent.complete", "step", "persistent"),
            Source("save.skipped.kept", "step", "{tier}"),
            Source("restore.finished", "step", "{tier}"),
        ),
        "tier",
    ),
    Metric(
        "eckpt_newest_step_age_seconds",
        "age",
        "time since training had the state of that step: the work that a loss would cost (RPO)",
        (
            Source("save.complete", "seconds", "local"),
            Source("persistent.complete", "seconds", "persistent"),
            Source("save.skipped.kept", label="{tier}"),
            Source("restore.finished", label="{tier}"),
        ),
        "tier",
    ),
    Metric(
        "eckpt_copies",
        "gauge",
        "copies of each shard in RAM once a step is whole; all but one of them may be lost",
        (Source("start.ready", "copies"),),
    ),
    Metric(
        "eckpt_ram_slots",
        "gauge",
        "slots that this process reserves in RAM",
        (Source("start.ready", "slots"),),
    ),
    Metric(
        "eckpt_ram_reserved_bytes",
        "gauge",
        "size of these slots",
        (Source("start.ready", "ram_bytes"),),
    ),
    Metric(
        "eckpt_restore_seconds",
        "histogram",
        "time of each restore of this process, by the tier that the step came from",
        (Source("restore.finished", "seconds", "{tier}"),),
        "tier",
    ),
    Metric(
        "eckpt_restore_phase_seconds",
        "histogram",
        "parts of a restore, as in the event restore.phases",
        tuple(
            Source("restore.phases", f"{phase}_seconds", phase)
            for phase in ("plan", "load", "shards", "host_state", "agree")
        ),
        "phase",
    ),
    Metric(
        "eckpt_restored_bytes_total",
        "counter",
        "bytes of restored state by source: own_ram, peers, storage",
        (
            Source("restore.finished", "bytes_local", "own_ram"),
            Source("restore.finished", "bytes_peer", "peers"),
            Source("restore.finished", "bytes_persistent", "storage"),
        ),
        "source",
    ),
    Metric(
        "eckpt_last_restore_seconds",
        "gauge",
        "time of the last recovery's restore (RTO without the restart of the processes)",
        (Source("restore.finished", "seconds"),),
    ),
    Metric(
        "eckpt_restored_step",
        "gauge",
        "step of the last restore",
        (Source("restore.finished", "step"),),
    ),
    *(
        Metric(
            f"eckpt_progress_{name}",
            "gauge",
            meaning,
            (
                Source("restore.progress", field, "restore"),
                Source("persistent.progress", field, "save"),
            ),
            "work",
        )
        for name, field, meaning in (
            ("bytes_left", "bytes_left", "bytes that a long restore or save still has to move"),
            ("bytes_per_second", "bytes_per_second", "rate at which the bytes move"),
            ("slowest_process", "slowest", "process that will take longest (leader)"),
        )
    ),
    Metric(
        "eckpt_ramdisk_full_total",
        "counter",
        "restores after which this process's ramdisk had no room, for the step or for the saves to"
        " come",
        (Source("ram.off.full"),),
    ),
    Metric(
        "eckpt_passed_over_steps_total",
        "counter",
        "newer steps that a restore passed over; the event restore.rejected has the reasons",
        (Source("restore.rejected", label="{tier}"),),
        "tier",
    ),
    Metric(
        "eckpt_replanned_restores_total",
        "counter",
        "further plans of restores, after a copy failed (leader)",
        (Source("restore.stage.replanned"),),
    ),
    Metric(
        "eckpt_quarantined_copies_total",
        "counter",
        "copies of shards that failed their check",
        (Source("restore.quarantined"),),
    ),
    Metric(
        "eckpt_divergence_total",
        "counter",
        "shards whose replicas differ",
        (Source("divergence"),),
    ),
    Metric(
        "eckpt_non_finite_leaves_total",
        "counter",
        "leaves whose values were finite before, and are NaN or infinite at a save",
        (Source("save.non_finite", "leaves"),),
    ),
    Metric(
        "eckpt_save_unchanged_total",
        "counter",
        "series of saves that each have the same bytes as the save before",
        (Source("save.unchanged"),),
    ),
    Metric(
        "eckpt_unreachable_total",
        "counter",
        "failed calls: storage, holder (a peer of a restore), buddy (a copy of the host state)",
        (
            Source("persistent.problem.unreachable", label="storage"),
            Source("restore.peer_unreachable", label="{role}"),
        ),
        "target",
    ),
    Metric(
        "eckpt_preemptions_total",
        "counter",
        "preemption notices that were acted on",
        (Source("preemption.reached"),),
    ),
)


def samples_of(name: str, fields: Mapping[str, Any], time_s: float) -> Iterator[Sample]:
    """Yield the samples in the event ``name``; a field that is absent or no number gives none.

    ``time_s``: of the event. Samples of an ``age`` are the Unix time from which it counts.
    """
    for metric, source in _BY_EVENT.get(point_of(name, fields), ()):
        value = fields.get(source.field) if source.field else 1
        if metric.kind == "age":
            value = time_s - (value if source.field and isinstance(value, int | float) else 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        label = source.label
        if label.startswith("{"):
            label = str(fields.get(label[1:-1], ""))
        yield Sample(metric, value, label)


_BY_EVENT: dict[str, list[tuple[Metric, Source]]] = {}
for _metric in METRICS:
    for _source in _metric.sources:
        _BY_EVENT.setdefault(_source.event, []).append((_metric, _source))
