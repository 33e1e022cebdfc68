"""A loop whose steps lie behind the restored one: nothing of it is saved, and it is told so."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest
from every_face import opener
from persistent_steps import complete_steps
from world import World, save, save_all

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import InvalidState

NEWEST = 10


@pytest.fixture
def resumed(world: World) -> Iterator[EmergencyCheckpointer]:
    """A life that has restored step 10, from both tiers of the one before."""
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, NEWEST)
    with world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == NEWEST
        yield checkpointer


def test_save_behind_the_restored_step_warns_with_both(
    world: World, resumed: EmergencyCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not any(save(resumed, world, step) for step in range(1, NEWEST))
    told = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(told) == 1
    assert "step 1 ignored: step 10" in told[0]


def test_loop_that_asks_first_is_warned_as_well(
    world: World, resumed: EmergencyCheckpointer
) -> None:
    assert not any(resumed.should_save(step) for step in range(1, NEWEST + 1))
    assert len(world.named("save.skipped")) == 1
    assert len(world.named("save.skipped", step=1, cause="older", newest=NEWEST)) == 1


def test_emergency_manager_warns_of_steps_behind_those_found(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    face = opener("emergency", world)
    for is_first in (True, False):
        manager = face()
        with caplog.at_level(logging.WARNING):
            saved = [manager.save(step, world.state(step)) for step in range(9)]
        assert saved == [is_first] * 9
        told = [text.partition(",")[0] for text in caplog.messages if "ignored" in text]
        assert told == ([] if is_first else ["save of step 0 ignored: step 8"])
        manager.close()


def test_saves_behind_the_restored_step_are_told_again_later(
    world: World,
    resumed: EmergencyCheckpointer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most once a minute, each time with both steps."""
    began_s = time.monotonic()
    for step, after_s in enumerate((0.0, 30.0, 59.0, 61.0, 62.0, 122.0), start=1):
        with monkeypatch.context() as clock, caplog.at_level(logging.WARNING):
            clock.setattr(time, "monotonic", lambda now_s=began_s + after_s: now_s)
            assert not save(resumed, world, step)
    told = [text.partition(",")[0] for text in caplog.messages if "ignored" in text]
    assert told == [f"save of step {step} ignored: step {NEWEST}" for step in (1, 4, 6)]


def test_forced_save_behind_the_restored_step_is_refused(
    world: World, resumed: EmergencyCheckpointer
) -> None:
    with pytest.raises(InvalidState, match=r"save step 3: step 10, .* is newer"):
        save(resumed, world, 3, force=True)
    assert not save(resumed, world, NEWEST)  # the restored step itself is no mistake
    assert save(resumed, world, NEWEST + 2, force=True)


def test_notice_behind_the_restored_step_claims_no_save(
    world: World, resumed: EmergencyCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert not save(resumed, world, 4)
    assert resumed.reached_preemption(4)
    resumed.wait_until_finished()
    lost = [e.fields for e in world.named("preemption.missed", cause="not_written")]
    assert [(each["step"], each["tier"]) for each in lost] == [(4, "local"), (4, "persistent")]
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert sum("step 4 is not in the" in text and "step 10" in text for text in errors) == 2
    assert resumed.all_steps() == [NEWEST]


def test_notice_behind_a_requested_step_changes_nothing(world: World) -> None:
    settings = {"save_every": 1, "local_save_every": 1, "local_keep_last_n": 2}
    with world.open_both(**settings) as checkpointer:
        save_all(checkpointer, world, 5, NEWEST)
    with world.open_both(**settings) as checkpointer:
        assert checkpointer.restore(5, state=world.state(0))[0] == 5
        os.kill(os.getpid(), signal.SIGTERM)
        assert not save(checkpointer, world, 3)
    assert complete_steps(str(world.persistent)) == [5, NEWEST]
    world.restores(NEWEST, **settings)
    world.lose_ram()
    world.restores(NEWEST, **settings)
