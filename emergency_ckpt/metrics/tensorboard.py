"""``TensorBoard``: the metrics as scalars over the training step."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.metrics.background_listener import BackgroundListener
from emergency_ckpt.metrics.metric_table import samples_of


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
