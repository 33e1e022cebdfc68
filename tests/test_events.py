"""Events reach the listener; a listener that fails disturbs nobody."""

from __future__ import annotations

import time

from emergency_ckpt.events import Event, EventSink


def test_listener_gets_each_event_in_order() -> None:
    seen: list[Event] = []
    sink = EventSink(seen.append, process_index=3)
    before_s = time.time()
    sink.emit("save.started", step=5, tier="local")
    sink.emit("save.failed")
    assert [event.name for event in seen] == ["save.started", "save.failed"]
    assert seen[0].fields == {"process": 3, "step": 5, "tier": "local"}
    assert before_s <= seen[0].time_s <= time.time()


def test_listener_that_raises_does_not_disturb() -> None:
    calls: list[str] = []

    def broken(event: Event) -> None:
        calls.append(event.name)
        raise RuntimeError("observer's fault")

    sink = EventSink(broken, process_index=0)
    sink.emit("one")
    sink.emit("two")
    assert calls == ["one", "two"]
