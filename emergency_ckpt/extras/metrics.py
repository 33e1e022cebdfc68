"""Metrics: numbers derived from the events, for Prometheus, TensorBoard and ``jax.monitoring``.

One table (``METRICS``) says which field of which event is a sample of which metric;
the three ways out read the table, and never block or raise into a save.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import queue
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from absl import logging
from jax import monitoring

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event, point_of
from emergency_ckpt.forked import drop_in_child

__all__ = ["METRICS", "CheckpointLog", "TensorBoard", "samples_of"]


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


_QUEUE_LIMIT: Final = 4096
_CLOSE_TIMEOUT_S: Final = 5.0


class BackgroundListener:
    """A listener whose ``take`` may block or fail; its first failure is logged.

    Events beyond 4096 that wait are dropped, so that a silent file system or service costs no more.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_failed = self._is_off = False
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"eckpt-{name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        drop_in_child(self, BackgroundListener._forget)

    def __call__(self, event: Event) -> None:
        """Take ``event``; never blocks or raises."""
        if not self._is_off and self._waiting.qsize() < _QUEUE_LIMIT:
            self._waiting.put(event)

    def close(self) -> None:
        """Work off what waits, for 5 s at most. Idempotent. Also called at the program's end."""
        if self._is_off:
            return
        self._is_off = True
        atexit.unregister(self.close)
        self._waiting.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def take(self, event: Event) -> None:
        """Work on one event, in the thread."""
        raise NotImplementedError

    def end(self) -> None:
        """Release what ``take`` has opened, in the thread, after the last event."""

    def _forget(self) -> None:
        """In a forked child, which has no thread."""
        self._is_off = True
        atexit.unregister(self.close)

    def _loop(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self.take(event)
            except Exception as error:  # noqa: BLE001 - must not end the thread
                if not self._has_failed:
                    logging.warning("%s: %s; events are dropped", self._name, error)
                self._has_failed = True
        self.end()


class CheckpointLog(BackgroundListener):
    """A listener (``on_event``) that passes each save and restore of this process to a logger.

    A save is an entry when training goes on after it, a restore when it has finished. One from RAM
    is an ``emergency_restore``. The logger is called in a thread of this object.
    ml-goodput-measurement reads these entries and counts the time that checkpoints cost training.

    Args:
      logger: one of Orbax's loggers, such as its ``CloudLogger``, with ``log_entry(entry)``.
      dir, local_dir: as of the config: the calculator tells the tiers apart by ``gs://``.
    """

    def __init__(self, logger: Any, *, dir: str | None, local_dir: str) -> None:
        self._logger = logger
        self._directories = {"persistent": dir or "", "local": local_dir}
        super().__init__("checkpoint log")

    def take(self, event: Event) -> None:
        """Write the entry of one event, if it has one."""
        makers = {"save.captured": _save_entry, "restore.finished": _restore_entry}
        make_entry = makers.get(event.name)
        if make_entry is not None:
            directory = self._directories[str(event.fields["tier"])]
            self._logger.log_entry(make_entry(event.fields, event.time_s, directory))


def _save_entry(fields: Mapping[str, Any], time_s: float, directory: str) -> dict[str, Any]:
    seconds, waited = fields["seconds"], fields["waited_seconds"]
    start_s = time_s - seconds
    return {
        "step": fields["step"],
        "event_type": "save",
        "directory": directory,
        "reached_preemption": False,
        "synchronous": False,
        "wait_for_prev_start_time": start_s,
        "wait_for_prev_duration_secs": waited,
        "checkpointer_blocking_start_time": start_s + waited,
        "checkpointer_blocking_duration_secs": seconds - waited,
        "get_old_steps_start_time": time_s,
        "get_old_steps_duration_secs": 0.0,
        "checkpoint_manager_blocking_start_time": start_s,
        "checkpoint_manager_blocking_duration_secs": seconds,
    }


def _restore_entry(fields: Mapping[str, Any], time_s: float, directory: str) -> dict[str, Any]:
    seconds = fields["seconds"]
    entry: dict[str, Any] = {
        "step": fields["step"],
        "event_type": "restore" if fields["tier"] == "persistent" else "emergency_restore",
        "directory": directory,
        "checkpointer_start_time": time_s - seconds,
        "checkpointer_duration_secs": seconds,
        "checkpoint_manager_start_time": time_s - seconds,
        "checkpoint_manager_duration_secs": seconds,
    }
    if fields["tier"] != "persistent":
        entry |= {"broadcast_start_time": time_s, "broadcast_duration_secs": 0.0}
    return entry


class TensorBoard(BackgroundListener):
    """A listener that writes each sample to ``<logdir>/process_<index>``. Needs ``tensorboard``.

    Pass it as ``on_event``. The tag is ``eckpt/<metric>`` or ``eckpt/<metric>/<label>``, counters
    are running totals, and ages are left out; the step is that of the newest event with one. A
    thread of its own writes: a directory that fails is logged once, and samples are dropped.

    Raises:
      ConfigError: the extra ``tensorboard`` (tensorboardX) is not installed.
    """

    def __init__(self, logdir: str | Path) -> None:
        try:
            self._package: Any = importlib.import_module("tensorboardX")
        except ImportError as error:
            raise ConfigError(
                ["tensorboardX is missing: pip install 'emergency-ckpt[tensorboard]'"],
                target="TensorBoard",
            ) from error
        self._logdir = Path(logdir)
        self._writer: Any = None
        self._step = 0
        self._totals: dict[str, float] = {}
        super().__init__(f"tensorboard {logdir}")

    def end(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def take(self, event: Event) -> None:
        """Write the samples of one event."""
        step = event.fields.get("step")
        if isinstance(step, int):
            self._step = max(self._step, step)
        for sample in samples_of(event.name, event.fields, event.time_s):
            metric = sample.metric
            if metric.kind == "age":
                continue
            tag = f"eckpt/{metric.name.removeprefix('eckpt_')}"
            if sample.label:
                tag += f"/{sample.label}"
            value = sample.value
            if metric.kind == "counter":
                value = self._totals[tag] = self._totals.get(tag, 0) + value
            if self._writer is None:
                directory = self._logdir / f"process_{event.origin.process_index:05d}"
                self._writer = self._package.SummaryWriter(str(directory), flush_secs=5)
            self._writer.add_scalar(tag, value, self._step, walltime=event.time_s)


def record_for_jax(event: Event) -> None:
    """Report the samples of ``event``, as ``/eckpt/<metric>`` with the metric's label.

    Seconds are durations, counts are events (each 1), all else are scalars; ages have no event.
    Runs JAX's listeners in this thread.
    """
    for sample in samples_of(event.name, event.fields, event.time_s):
        metric = sample.metric
        name = f"/eckpt/{metric.name.removeprefix('eckpt_')}"
        labels = {metric.label: sample.label} if metric.label else {}
        if metric.kind == "histogram":
            monitoring.record_event_duration_secs(name, sample.value, **labels)
        elif metric.kind == "counter" and sample.value == 1:
            monitoring.record_event(name, **labels)
        elif metric.kind != "age":
            monitoring.record_scalar(name, sample.value, **labels)
