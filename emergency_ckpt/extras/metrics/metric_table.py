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


def _metric(kind: Kind, name: str, meaning: str, *sources: Source, label: str = "") -> Metric:
    return Metric(name, kind, meaning, sources, label)


METRICS = (
    _metric(
        "histogram",
        "eckpt_save_stall_seconds",
        "time for which a save held up the training thread",
        Source("save.captured", "seconds", "{tier}"),
        label="tier",
    ),
    _metric(
        "histogram",
        "eckpt_save_ready_wait_seconds",
        "time for which `save` waited for arrays still being computed, which is no stall",
        Source("save.captured", "ready_seconds", "{tier}"),
        label="tier",
    ),
    _metric(
        "histogram",
        "eckpt_save_seconds",
        "time of a save from its start in the background until the step is known to be whole",
        Source("save.complete", "seconds", "local"),
        Source("persistent.complete", "seconds", "persistent"),
        label="tier",
    ),
    _metric(
        "histogram",
        "eckpt_save_phase_seconds",
        "parts of a save: copy, publish, push, vote (RAM), host_states, tensors (storage)",
        Source("save.stage.copied", "seconds", "copy"),
        Source("save.stage.published", "seconds", "publish"),
        Source("save.stage.pushed", "seconds", "push"),
        Source("save.stage.voted", "seconds", "vote"),
        Source("persistent.stage.host_states_written", "seconds", "host_states"),
        Source("persistent.stage.tensors_written", "seconds", "tensors"),
        label="phase",
    ),
    _metric(
        "counter",
        "eckpt_saved_bytes_total",
        "bytes of the state that this process has saved",
        Source("save.stage.published", "size_bytes", "local"),
        Source("persistent.stage.tensors_written", "size_bytes", "persistent"),
        label="tier",
    ),
    _metric(
        "counter",
        "eckpt_failed_saves_total",
        "failed saves: incomplete (RAM), storage, preempted (not written in time), stop",
        Source("save.incomplete", label="incomplete"),
        Source("persistent.failed", label="storage"),
        Source("preemption.missed.not_written", label="preempted"),
        Source("stop.not_saved", label="stop"),
        label="reason",
    ),
    _metric(
        "counter",
        "eckpt_skipped_saves_total",
        "saves left out: busy (the previous save was under way), late (a process received the"
        " announcement of the step too late), ignored (not newer), storage (busy or paused there)",
        Source("save.skipped.busy", label="busy"),
        Source("save.skipped.late", label="late"),
        Source("save.skipped.older", label="ignored"),
        Source("save.skipped.paused", label="storage"),
        label="reason",
    ),
    _metric(
        "gauge",
        "eckpt_newest_step",
        "newest step known to be whole in a tier, of this process's life",
        Source("save.complete", "step", "local"),
        Source("persistent.complete", "step", "persistent"),
        Source("save.skipped.kept", "step", "{tier}"),
        Source("restore.finished", "step", "{tier}"),
        label="tier",
    ),
    _metric(
        "age",
        "eckpt_newest_step_age_seconds",
        "time since training had the state of that step: the work that a loss would cost (RPO)",
        Source("save.complete", "seconds", "local"),
        Source("persistent.complete", "seconds", "persistent"),
        Source("save.skipped.kept", label="{tier}"),
        Source("restore.finished", label="{tier}"),
        label="tier",
    ),
    _metric(
        "gauge",
        "eckpt_copies",
        "copies of each shard in RAM once a step is whole; all but one of them may be lost",
        Source("start.ready", "copies"),
    ),
    _metric(
        "gauge",
        "eckpt_ram_slots",
        "slots that this process reserves in RAM",
        Source("start.ready", "slots"),
    ),
    _metric(
        "gauge",
        "eckpt_ram_reserved_bytes",
        "size of these slots",
        Source("start.ready", "ram_bytes"),
    ),
    _metric(
        "histogram",
        "eckpt_restore_seconds",
        "time of each restore of this process, by the tier that the step came from",
        Source("restore.finished", "seconds", "{tier}"),
        label="tier",
    ),
    _metric(
        "histogram",
        "eckpt_restore_phase_seconds",
        "parts of a restore, as in the event restore.phases",
        *(
            Source("restore.phases", f"{phase}_seconds", phase)
            for phase in ("plan", "load", "shards", "host_state", "agree")
        ),
        label="phase",
    ),
    _metric(
        "counter",
        "eckpt_restored_bytes_total",
        "bytes of restored state by source: own_ram, peers, storage",
        Source("restore.finished", "bytes_local", "own_ram"),
        Source("restore.finished", "bytes_peer", "peers"),
        Source("restore.finished", "bytes_persistent", "storage"),
        label="source",
    ),
    _metric(
        "gauge",
        "eckpt_last_restore_seconds",
        "time of the last recovery's restore (RTO without the restart of the processes)",
        Source("restore.finished", "seconds"),
    ),
    _metric(
        "gauge",
        "eckpt_restored_step",
        "step of the last restore",
        Source("restore.finished", "step"),
    ),
    *(
        _metric(
            "gauge",
            f"eckpt_progress_{name}",
            meaning,
            Source("restore.progress", field, "restore"),
            Source("persistent.progress", field, "save"),
            label="work",
        )
        for name, field, meaning in (
            ("bytes_left", "bytes_left", "bytes that a long restore or save still has to move"),
            ("bytes_per_second", "bytes_per_second", "rate at which the bytes move"),
            ("slowest_process", "slowest", "process that will take longest (leader)"),
        )
    ),
    _metric(
        "counter",
        "eckpt_ramdisk_full_total",
        "restores after which this process's ramdisk had no room, for the step or for the saves to"
        " come",
        Source("ram.off.full"),
    ),
    _metric(
        "counter",
        "eckpt_passed_over_steps_total",
        "newer steps that a restore passed over; the event restore.rejected has the reasons",
        Source("restore.rejected", label="{tier}"),
        label="tier",
    ),
    _metric(
        "counter",
        "eckpt_replanned_restores_total",
        "further plans of restores, after a copy failed (leader)",
        Source("restore.stage.replanned"),
    ),
    _metric(
        "counter",
        "eckpt_quarantined_copies_total",
        "copies of shards that failed their check",
        Source("restore.quarantined"),
    ),
    _metric(
        "counter", "eckpt_divergence_total", "shards whose replicas differ", Source("divergence")
    ),
    _metric(
        "counter",
        "eckpt_non_finite_leaves_total",
        "leaves whose values were finite before, and are NaN or infinite at a save",
        Source("save.non_finite", "leaves"),
    ),
    _metric(
        "counter",
        "eckpt_save_unchanged_total",
        "series of saves that each have the same bytes as the save before",
        Source("save.unchanged"),
    ),
    _metric(
        "counter",
        "eckpt_unreachable_total",
        "failed calls: storage, holder (a peer of a restore), buddy (a copy of the host state)",
        Source("persistent.problem.unreachable", label="storage"),
        Source("restore.peer_unreachable", label="{role}"),
        label="target",
    ),
    _metric(
        "counter",
        "eckpt_preemptions_total",
        "preemption notices that were acted on",
        Source("preemption.reached"),
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
for _row in METRICS:
    for _source in _row.sources:
        _BY_EVENT.setdefault(_source.event, []).append((_row, _source))
