"""A report of a job that `eckpt launch` did not start: its checkpointer has put all on record."""

from __future__ import annotations

from pathlib import Path

import pytest
from every_face import KINDS, opener
from orbax_faces import state, target
from run_log_support import logged, read_log
from world import World

from emergency_ckpt.extras.event_log import EventLogObserver
from emergency_ckpt.tools.report.figures import goodput_of, recoveries_of
from emergency_ckpt.tools.report.lives import lives_of
from emergency_ckpt.tools.report.spans import Mark, marks_of


class LostBatch(Exception):
    """The end of a life in these tests."""


def train(world: World, log: Path, last: int, error: Exception | None = None) -> None:
    """Train one life to the step ``last``, with a save at each third step."""
    settings = {"local_save_every": 3, "on_event": EventLogObserver(log)}
    with world.open(**settings) as ckpt:
        restored, _ = ckpt.restore(state=world.state(0))
        for step in range((restored or 0) + 1, last + 1):
            ckpt.save(step=step, state=world.state(step))
        ckpt.wait_until_finished()
        if error is not None:
            raise error


def go_on(kind: str, world: World, log: Path, last: int) -> None:
    """Train one life of a face to ``last``, by the loop of Orbax's pages."""
    face, first = opener(kind, world, on_event=EventLogObserver(log))(), 0
    newest = face.latest()
    if newest is not None:
        face.load(newest, target(world))
        first = newest + 1
    for step in range(first, last + 1):
        face.save(step, state(world, step))
        face.wait()
    face.close()


def marks(log: Path) -> list[Mark]:
    return marks_of(read_log(log).events)


def test_life_that_an_exception_ends_has_its_figures(world: World, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(LostBatch):
        train(world, log, 5, LostBatch("batch 6"))
    train(world, log, 6)
    events = read_log(log).events
    (recovery,) = recoveries_of(lives_of(events), events)
    assert (recovery.last_step, recovery.restored_step) == (5, 3)
    assert (recovery.steps_lost, recovery.at_least) == (2, False)
    (end,) = [mark for mark in marks(log) if mark.name == "stop.error"]
    assert (end.process, end.step, end.is_failure) == (0, 5, True)
    assert end.label == "reason LostBatch: batch 6"


@pytest.mark.parametrize("kind", KINDS)
def test_lives_of_each_loop_have_their_figures(kind: str, world: World, tmp_path: Path) -> None:
    """The first life restores nothing; the second one restores the step of storage, without RAM."""
    log = tmp_path / "log"
    go_on(kind, world, log, 3)
    world.lose_ram()
    go_on(kind, world, log, 5)
    events = read_log(log).events
    first, second = lives_of(events)
    assert [step for step, _ in first.steps] == [0, 1, 2, 3]
    assert first.trains_from_s == first.steps[0][1]
    stored = 3 if kind == "emergency" else 0  # its RAM has each step, of which the last is stored
    assert [step for step, _ in second.steps] == list(range(stored + 1, 6))
    (recovery,) = recoveries_of((first, second), events)
    assert (recovery.last_step, recovery.restored_step) == (3, stored)
    assert (recovery.tier, recovery.steps_lost) == ("persistent", 3 - stored)
    assert recovery.restore_s is not None
    use = goodput_of((first, second), events)
    assert use.training_s + use.stalled_s > 0
    reached_s = dict(first.steps)
    assert use.redone_s == pytest.approx(reached_s[3] - reached_s[stored])


def test_advice_about_a_setting_is_no_failure() -> None:
    advice = logged(5, "warning", cause="setting", text="no secret is given")
    (mark,) = marks_of([advice])
    assert (mark.name, mark.is_failure) == ("warning.setting", False)


def test_life_that_ends_without_a_word_is_a_failure(world: World, tmp_path: Path) -> None:
    log = tmp_path / "log"
    train(world, log, 5)
    (path,) = log.iterdir()
    killed = [line for line in path.read_text().splitlines() if '"name":"stop"' not in line]
    path.write_text("\n".join(killed) + "\n")
    assert [mark.name for mark in marks(log) if mark.is_failure] == []  # it may still run
    train(world, log, 7)
    (end,) = [mark for mark in marks(log) if mark.is_failure]
    assert (end.name, end.process, end.step) == ("process.lost", 0, 5)
    assert end.label == "its log has no end: it was killed, or its host was lost"


def test_lives_that_end_well_have_no_failure(world: World, tmp_path: Path) -> None:
    for last in (3, 6):
        train(world, tmp_path / "log", last)
    assert [mark for mark in marks(tmp_path / "log") if mark.is_failure] == []
