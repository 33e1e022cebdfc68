"""Samples as events of ``jax.monitoring``, for whoever has registered a listener there."""

from __future__ import annotations

from jax import monitoring

from emergency_ckpt.events import Event
from emergency_ckpt.metrics.metric_table import samples_of


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
