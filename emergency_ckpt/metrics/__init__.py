"""Metrics: numbers derived from the events, for Prometheus, TensorBoard and ``jax.monitoring``.

One table (``table.METRICS``) says which field of which event is a sample of which metric; the three
ways out read it and know no event. All of them are listeners of events: they never block or raise
into a save. ``TensorBoard(logdir)`` is passed as ``on_event``; the setting ``metrics_port`` starts
the others' server.
"""

from emergency_ckpt.metrics.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
