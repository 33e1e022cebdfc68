"""What listeners of ``jax.monitoring`` are told."""

from __future__ import annotations

from jax import monitoring

from emergency_ckpt.events import Event, Origin
from emergency_ckpt.extras.metrics import record_for_jax


def test_jax_monitoring_gets_durations_events_and_scalars() -> None:
    seen: list[tuple[object, ...]] = []

    def took(name: str, seconds: float, **labels: object) -> None:
        seen.append((name, seconds, labels))

    def occurred(name: str, **labels: object) -> None:
        seen.append((name, labels))

    def value(name: str, number: float, **labels: object) -> None:
        seen.append((name, number, labels))

    monitoring.register_event_duration_secs_listener(took)
    monitoring.register_event_listener(occurred)
    monitoring.register_scalar_listener(value)
    try:
        origin = Origin(0)
        record_for_jax(Event("save.complete", {"step": 5, "seconds": 0.25}, 1.0, origin))
        record_for_jax(Event("divergence", {}, 1.0, origin))
    finally:
        monitoring.unregister_event_duration_listener(took)
        monitoring.unregister_event_listener(occurred)
        monitoring.unregister_scalar_listener(value)
    assert seen == [
        ("/eckpt/save_seconds", 0.25, {"tier": "local"}),
        ("/eckpt/newest_step", 5, {"tier": "local"}),
        ("/eckpt/divergence_total", {}),
    ]
