"""``TensorBoard``: the metrics as scalars over the training step."""

from __future__ import annotations

import atexit
import importlib
import queue
import threading
from pathlib import Path
from typing import Any, Final

from absl import logging

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.metrics.table import samples_of

_QUEUE_LIMIT: Final = 4096
_CLOSE_TIMEOUT_S: Final = 5.0


class TensorBoard:
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
        self._has_failed = self._is_off = False
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="eckpt-tensorboard", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        drop_in_child(self, TensorBoard._forget)

    def __call__(self, event: Event) -> None:
        """Take ``event``; never blocks or raises."""
        if not self._is_off and self._waiting.qsize() < _QUEUE_LIMIT:
            self._waiting.put(event)

    def close(self) -> None:
        """Write what waits; blocks for a silent file system, 5 s. Idempotent. Also at exit."""
        if self._is_off:
            return
        self._is_off = True
        atexit.unregister(self.close)
        self._waiting.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _forget(self) -> None:
        """In a forked child, which has no thread."""
        self._is_off = True
        atexit.unregister(self.close)

    def _loop(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._write(event)
            except Exception as error:  # noqa: BLE001 - must not end the thread
                if not self._has_failed:
                    logging.warning(
                        "TensorBoard in %s: %s; samples are dropped", self._logdir, error
                    )
                self._has_failed = True
        if self._writer is not None:
            self._writer.close()

    def _write(self, event: Event) -> None:
        step = event.fields.get("step")
        if isinstance(step, int):
            self._step = max(self._step, step)
        for sample in samples_of(event.name, event.fields, event.time_s):
            metric = sample.metric
            if metric.kind == "age":
                continue
            tag = "/".join(
                filter(None, ("eckpt", metric.name.removeprefix("eckpt_"), sample.label))
            )
            value = sample.value
            if metric.kind == "counter":
                value = self._totals[tag] = self._totals.get(tag, 0) + value
            if self._writer is None:
                directory = self._logdir / f"process_{event.origin.process_index:05d}"
                self._writer = self._package.SummaryWriter(str(directory), flush_secs=5)
            self._writer.add_scalar(tag, value, self._step, walltime=event.time_s)
