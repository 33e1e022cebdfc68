"""Metrics: numbers derived from the events, for Prometheus, TensorBoard and ``jax.monitoring``.

One table (``metric_table.METRICS``) says which field of which event is a sample of which metric;
the three ways out read it and know no event. All of them are listeners of events: they never block
or raise into a save. ``TensorBoard(logdir)`` is passed as ``on_event``, as is
``CheckpointLog(logger, ...)`` for one of Orbax's loggers; the setting ``metrics_port`` starts the
server for Prometheus.
"""

from emergency_ckpt.extras.metrics.listeners import CheckpointLog, TensorBoard
from emergency_ckpt.extras.metrics.metric_table import METRICS, samples_of

__all__ = ["METRICS", "CheckpointLog", "TensorBoard", "samples_of"]
