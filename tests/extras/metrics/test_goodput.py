"""ml-goodput-measurement's own calculator counts our saves and restores."""

from __future__ import annotations

import dataclasses
from typing import Any

import orbax.checkpoint as ocp
import pytest
from ml_goodput_measurement.src.checkpoint_badput_calculator import (
    CheckpointBadputCalculator,
    CheckpointLoggerOptions,
)
from orbax.checkpoint.logging import step_statistics
from world import World, save_all

import emergency_ckpt.orbax.checkpoint as plain
from emergency_ckpt import orbax as emergency
from emergency_ckpt.events import Event, Origin
from emergency_ckpt.extras.metrics import CheckpointLog

SCHEMAS = {
    "save": step_statistics.SaveStepStatistics,
    "restore": step_statistics.RestoreStepStatistics,
    "emergency_restore": step_statistics.EmergencyRestoreStepStatistics,
}


class Entries:
    """A logger that keeps its entries, as Orbax's loggers take them."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def log_entry(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)


def calculator(entries: list[dict[str, Any]]) -> CheckpointBadputCalculator:
    found = CheckpointBadputCalculator(CheckpointLoggerOptions(use_goodput_logger=True))
    found.entries = entries
    return found


def test_calculator_counts_what_our_events_say(world: World) -> None:
    logger, seen = Entries(), list[Event]()
    log = CheckpointLog(logger, dir="gs://bucket/run", local_dir=str(world.ramdisk))

    def on_event(event: Event) -> None:
        seen.append(event)
        log(event)

    with world.open_both(on_event=on_event) as checkpointer:
        save_all(checkpointer, world, 1, 2, 3)
    with world.open_both(on_event=on_event) as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 3
    world.lose_ram()
    with world.open_both(on_event=on_event) as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 2
    log.close()

    for entry in logger.entries:
        schema = SCHEMAS[entry["event_type"]]
        assert set(entry) <= {field.name for field in dataclasses.fields(schema)}
    badput = calculator(logger.entries)
    saves = badput.calculate_save_operation_checkpoint_manager_blocking_time
    for tier in ("local", "persistent"):
        ours = [
            event.fields["seconds"]
            for event in seen
            if event.name == "save.captured" and event.fields["tier"] == tier
        ]
        theirs = saves(tier)
        assert len(ours) == {"local": 3, "persistent": 1}[tier]
        assert theirs.total_checkpoint_manager_blocking_time == pytest.approx(sum(ours))
        assert theirs.maximum_checkpoint_manager_blocking_time == pytest.approx(max(ours))
        assert theirs.total_checkpoint_manager_blocking_time == pytest.approx(
            theirs.total_checkpointer_blocking_time + theirs.total_wait_for_prev_time
        )
    for tier in ("local", "persistent"):
        (ours,) = [
            event.fields["seconds"]
            for event in seen
            if event.name == "restore.finished" and event.fields["tier"] == tier
        ]
        restores = badput.calculate_restore_operation_checkpoint_manager_blocking_time(tier)
        assert restores.total_checkpoint_manager_time == pytest.approx(ours)


def test_logger_of_a_manager_hears_beside_on_event(world: World) -> None:
    logger = Entries()
    world.ramdisk.mkdir()
    options = emergency.CheckpointManagerOptions(settings={"on_event": world.events.append})
    places = world.ramdisk, world.persistent, world.mesh, world.state(0)
    with emergency.CheckpointManager(*places, options=options, logger=logger) as manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(world.state(0)))
        assert manager.save(0, args)
    assert len(world.named("save.captured")) == 2
    assert [entry["event_type"] for entry in logger.entries] == ["save", "save"]


def test_logger_of_plain_orbaxs_manager_hears_of_ram(world: World) -> None:
    logger = Entries()
    tier: Any = {"local_directory": world.ramdisk, "settings": {"on_event": world.events.append}}
    options = plain.CheckpointManagerOptions(save_interval_steps=100, **tier)
    state = {"w": world.state(0)["w"]}
    for step in (10, None):
        with plain.CheckpointManager(world.persistent, options=options, logger=logger) as manager:
            if step is None:
                manager.restore(args=plain.args.StandardRestore(state))
            else:
                manager.save(step, args=plain.args.StandardSave(state))
    assert world.named("restore.finished", tier="local")
    ours = [entry for entry in logger.entries if entry["directory"] == str(world.ramdisk)]
    assert [entry["event_type"] for entry in ours] == ["save", "emergency_restore"]


def test_logger_that_fails_disturbs_nobody() -> None:
    class Broken:
        def log_entry(self, entry: object) -> None:
            raise RuntimeError(f"no room for {entry}")

    log = CheckpointLog(Broken(), dir=None, local_dir="/ram")
    fields = {"step": 1, "tier": "local", "seconds": 0.5, "waited_seconds": 0.0}
    for _ in range(3):
        log(Event("save.captured", fields, 1.0, Origin(0)))
    log.close()
    log.close()
