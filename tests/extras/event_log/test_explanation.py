"""The events from which a restore can be told: phases, bytes, and what was passed over."""

from __future__ import annotations

from pathlib import Path

from world import World, save_all

from emergency_ckpt.extras.event_log import LoggedEvent, read_events


def test_log_tells_the_story_of_a_restore(world: World, tmp_path: Path) -> None:
    directory = tmp_path / "log"
    with world.open_both(on_event=f"event_log({directory})") as checkpointer:
        save_all(checkpointer, world, 2, 4)
    with world.open_both(on_event=f"event_log({directory})") as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 4
    world.lose_ram()
    (world.persistent / "host_state" / "4" / "marker.json").write_text("{}")
    with world.open_both(on_event=f"event_log({directory})") as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 2
    found = read_events(directory)
    assert found.bad_lines == 0

    def named(name: str) -> list[LoggedEvent]:
        return [each for each in found.events if each.name == name]

    assert [each.fields["tier"] for each in named("restore.finished")] == ["local", "persistent"]
    for phases in named("restore.phases"):
        assert sum(phases.fields.values()) > 0
    (over,) = {(e.fields["step"], e.fields["tier"]) for e in named("restore.rejected")}
    assert over == (4, "persistent")
    assert len({each.incarnation for each in named("save.complete")}) == 1
    assert {each.run_id for each in found.events} == {"run"}
    assert named("restore.finished")[1].fields["bytes_persistent"] > 0
