"""Listeners of events: for TensorBoard, for Orbax's checkpoint logger, for ``jax.monitoring``.

The first two take an event at once, and work on it in a thread of their own.
"""

from __future__ import annotations

import atexit
import importlib
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from absl import logging
from jax import monitoring

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.extras.metrics.metric_table import samples_of
from emergency_ckpt.forked import drop_in_child

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
