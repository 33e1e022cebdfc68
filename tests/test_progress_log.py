"""The lines for people: what each says, and how often."""

from __future__ import annotations

import re

import pytest
from absl import logging
from world import World, logged, save_all

from emergency_ckpt.core.wording import seconds_text, size_text
from emergency_ckpt.errors import StepNotFound
from emergency_ckpt.events import line_of


def test_log_has_one_line_for_start_restore_and_each_save(world: World) -> None:
    with logged() as lines, world.open_both() as checkpointer:
        checkpointer.restore(state=world.state(0))
        save_all(checkpointer, world, 1, 2, 3)
    *first, save_1, save_2, save_3, save_4, end = [
        re.sub(r" in [0-9.]+ m?s$", "", line) for line in lines
    ]
    start, nothing = sorted(line for line in first if line.startswith(("1 process", "nothing")))
    saves = [save_1, save_2, save_3, save_4]
    assert start.startswith("1 process in 1 slice; RAM: saved every step, 1 copy, ")
    assert start.endswith(f"; storage: saved every 2 steps in {world.persistent}")
    assert nothing.startswith("nothing to restore")
    assert end.startswith("stop.not_saved: the newest step in storage is 2, in RAM 3, ")
    assert sorted(saves) == [
        "saved step 1 to RAM",
        "saved step 2 to RAM",
        "saved step 2 to storage",
        "saved step 3 to RAM",
    ]


def test_restore_line_names_bytes_and_what_was_passed_over(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4)
    world.lose_ram()
    (world.persistent / "host_state" / "4" / "marker.json").write_text("{}")
    with logged() as lines, world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 2
    (line,) = [line for line in lines if line.startswith("restored step 2 from storage in ")]
    assert ": 0 B from own RAM, 0 B from peers, 1" in line
    assert "; passed over step 4 in storage (" in line
    text = "step 2 is restored, and newer steps are passed over: step 4 in storage ("
    assert sum(line.startswith(text) for line in lines) == 1


def test_save_below_the_newest_is_named_once(world: World) -> None:
    with logged() as lines, world.open() as checkpointer:
        save_all(checkpointer, world, 5)
        for step in (4, 5, 5):
            assert not checkpointer.save(step=step, state=world.state(step))
        save_all(checkpointer, world, 6)
        assert not checkpointer.save(step=6, state=world.state(6))
    assert [line for line in lines if "ignored" in line] == [
        "save of step 4 ignored: step 5, which was saved or restored, is newer;"
        " nothing is saved until the loop has passed it"
    ]


def test_save_not_due_is_not_named_as_ignored(world: World) -> None:
    with logged() as lines, world.open(local_save_every=3) as checkpointer:
        for step in range(1, 9):
            checkpointer.save(step=step, state=world.state(step))
    assert not [line for line in lines if "ignored" in line]


def test_step_not_found_lists_what_there_is(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4, 5)
    found = r"RAM has steps 2, 4, 5 and storage has steps 2, 4$"
    with world.open_both() as checkpointer, pytest.raises(StepNotFound, match=found):
        checkpointer.restore(3, state=world.state(0))


def test_line_of_a_save_is_the_leaders_alone() -> None:
    fields = {"step": 3, "seconds": 0.25}
    assert line_of("save.complete", {"process": 1, **fields}) is None
    line = line_of("save.complete", {"process": 0, **fields})
    assert line is not None
    assert line[1] == "saved step 3 to RAM in 0.25 s"
    assert line_of("save.stage", {"process": 0, "stage": "copied", **fields}) is None


@pytest.mark.parametrize(
    "cause", ["in_use", "unreachable", "log_damaged", "log_lost", "log_missing"]
)
def test_trouble_in_storage_is_a_warning_of_any_process(cause: str) -> None:
    line = line_of("persistent.problem", {"process": 3, "cause": cause, "reason": "it refuses"})
    assert line == (logging.WARNING, f"persistent.problem.{cause}: it refuses")


def test_wait_for_storage_is_a_plain_line_of_any_process() -> None:
    fields = {"process": 3, "cause": "waiting", "text": "no answer yet", "seconds_left": 7.5}
    assert line_of("persistent.problem", fields) == (logging.INFO, "no answer yet")


@pytest.mark.parametrize(
    ("stage", "is_told"),
    [("begun", False), ("removed", False), ("hidden", False), ("missing", True), ("failed", True)],
)
def test_removal_is_a_warning_where_it_is_not_as_asked(stage: str, is_told: bool) -> None:
    fields = {"process": 3, "step": 7, "stage": stage, "reason": "the bucket refuses"}
    warning = f"persistent.removal.{stage}: the bucket refuses step=7"
    expected = (logging.WARNING, warning) if is_told else None
    assert line_of("persistent.removal", fields) == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0345850, "0.0346 s"), (12.345, "12.3 s"), (1234.5, "1234 s")]
)
def test_seconds_text_has_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
    assert size_text(3 << 30) == "3.0 GiB"
