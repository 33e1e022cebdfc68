"""Metrics: numbers derived from the events, for Prometheus, TensorBoard and ``jax.monitoring``.

One table (``metric_table.METRICS``) says which field of which event is a sample of which metric;
the three ways out read the table, and never block or raise into a save.
"""

from emergency_ckpt.extras.metrics.listeners import CheckpointLog, TensorBoard
from emergency_ckpt.extras.metrics.metric_table import METRICS, samples_of

__all__ = ["METRICS", "CheckpointLog", "TensorBoard", "samples_of"]
