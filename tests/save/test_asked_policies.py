"""A user's own policy is asked about every step that comes, and nothing it wants is lost."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from readme_blocks import readme_block
from world import LONG_S, World, finish, save

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.background import Failures
from emergency_ckpt.config.policies import plan_saves
from emergency_ckpt.core.save.announcements import StepClock
from emergency_ckpt.core.save.timing import TierStatus
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.save.schedule import TierSchedule

STEP_S = 0.01
LEAD_S = 0.05
ASKED_WELL = 3
ERRORS = [ZeroDivisionError("of the rule"), SystemExit("of the rule")]


class Wants:
    """Wants some steps, and notes about which it was asked. Fails about one step."""

    def __init__(self, steps: Sequence[int], fails: BaseException | None = None) -> None:
        self.steps = steps
        self.asked: list[int] = []
        self.fails = fails

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        del previous_steps, context
        self.asked.append(step.step)
        if self.fails is not None and len(self.asked) == ASKED_WELL:
            raise self.fails
        return step.step in self.steps


class Rule:
    """A user's rule by the clock, and how often it was asked."""

    words = "as the test wants"

    def __init__(self, answer: bool | BaseException) -> None:
        self.answer = answer
        self.asked = 0

    def due(self, status: TierStatus) -> bool:
        del status
        self.asked += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def schedules() -> Iterator[list[TierSchedule]]:
    made: list[TierSchedule] = []
    yield made
    for schedule in made:
        schedule.worker.stop(10)


def lead(
    made: list[TierSchedule],
    policy: Any,
    steps: Sequence[int],
    late: int = 0,
    failures: Failures | None = None,
) -> list[int]:
    """Train ``steps``; the leader asks between them. Returns the steps that were saved.

    ``late``: for so many announcements another process is late.
    """
    schedule = TierSchedule("local", plan_saves(policy), failures or Failures())
    made.append(schedule)
    clock, ahead, saved = StepClock(), None, list[int]()
    for call, step in enumerate(steps):
        clock.arrive(step, call * STEP_S)
        if ahead is not None and step >= ahead.step:
            if step == ahead.step or not ahead.exact:
                schedule.note_due(step)
                schedule.note_started(step, 0.0)
                if late > 0:
                    late -= 1
                    schedule.announce_again(step)
                else:
                    saved.append(step)
            ahead = None
        progress = clock.progress
        if progress is None or ahead is not None:
            continue
        first = progress.first_step(call * STEP_S, LEAD_S)
        choice = schedule.choose_step(progress, first, LEAD_S, others_save=False)
        if choice is not None:
            ahead = choice
            schedule.announced(choice.step)
    return saved


def test_first_wanted_step_is_saved_at_the_first_that_can_be(schedules: list[TierSchedule]) -> None:
    policy = Wants([1])
    (saved,) = lead(schedules, policy, range(1, 40))
    assert 1 < saved < 15
    assert policy.asked == sorted(set(policy.asked))
    assert policy.asked[:39] == list(range(1, 40)), "each step, once"


def test_wanted_steps_that_come_too_soon_make_one_save(
    schedules: list[TierSchedule],
) -> None:
    (saved,) = lead(schedules, Wants(range(1, 7)), range(1, 40))
    assert 6 <= saved < 15


@pytest.mark.parametrize("stride", [1, 10, 100])
def test_wanted_steps_far_enough_ahead_are_saved_exactly(
    schedules: list[TierSchedule], stride: int
) -> None:
    wanted = [20 * stride, 60 * stride]
    policy = Wants(wanted)
    assert lead(schedules, policy, range(stride, 100 * stride, stride)) == wanted
    assert {step % stride for step in policy.asked} == {0}, "only about steps that come"


def test_wanted_step_is_saved_though_the_stride_changes(schedules: list[TierSchedule]) -> None:
    steps = [*range(10, 200, 10), *range(191, 300)]
    saved = lead(schedules, Wants([193]), steps)
    assert len(saved) == 1
    assert 193 <= saved[0] < 260, "the time per step is an average over the last calls"


def test_wanted_step_for_which_one_was_late_is_announced_again(
    schedules: list[TierSchedule],
) -> None:
    (saved,) = lead(schedules, Wants([20]), range(1, 100), late=2)
    assert 20 < saved < 60


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_rule_that_fails_hides_no_other_rule_of_its_tier(
    schedules: list[TierSchedule], error: BaseException
) -> None:
    fails, failures = Rule(error), Failures()
    assert lead(schedules, [fails, Rule(True)], range(1, 40), failures=failures)
    assert lead(schedules, [fails, Wants([20])], range(1, 40), failures=failures) == [20]
    with pytest.raises(SaveFailed, match="of the rule"):
        failures.raise_pending()
    assert fails.asked == failures.count <= 4, "it rests after a failure"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_policy_that_fails_about_a_step_is_asked_on(
    schedules: list[TierSchedule], error: BaseException
) -> None:
    failures = Failures()
    assert lead(schedules, Wants([20], error), range(1, 40), failures=failures) == [20]
    with pytest.raises(SaveFailed, match="of the rule"):
        failures.raise_pending()
    assert failures.count == 1


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_rule_that_fails_delays_no_save_to_the_other_tier(
    world: World, error: BaseException
) -> None:
    every = datetime.timedelta(milliseconds=10)
    fails = Rule(error)
    with world.open_both(local_save_every=fails, save_every=every) as ckpt:
        _train_until(ckpt, world, "persistent.complete")
        with pytest.raises(SaveFailed, match="of the rule"):
            ckpt.check_for_errors()


def test_rule_that_is_always_due_is_asked_once_a_save(world: World) -> None:
    """A rule that does not ask whether a save is under way wants one at every question."""
    every, always = datetime.timedelta(milliseconds=10), Rule(True)
    with world.open_both(local_save_every=always, save_every=every) as ckpt:
        step = _train_until(ckpt, world, "persistent.complete")
        finish(ckpt)
    assert always.asked <= 3 * step + 10, "not again while an announced step is ahead"


def _train_until(ckpt: EmergencyCheckpointer, world: World, event: str) -> int:
    """Train until there is an event of this name; return the last step."""
    deadline_s, step = time.monotonic() + LONG_S / 4, 0
    while event not in world.names():
        assert time.monotonic() < deadline_s, world.names()
        step += 1
        save(ckpt, world, step)
        time.sleep(STEP_S)
    return step


@pytest.mark.parametrize("restored", [None, 40])
def test_first_wanted_steps_after_a_restore_are_saved(world: World, restored: int | None) -> None:
    if restored is not None:
        with world.open() as checkpointer:
            assert checkpointer.save(step=restored, state=world.state(0))
    before = restored or 0
    policy = Wants([before + 1, before + 2])
    with world.open(local_save_every=policy) as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == restored
        deadline_s = time.monotonic() + LONG_S / 2
        while before + 2 not in policy.asked:  # a first step is compiled for longer
            assert time.monotonic() < deadline_s, policy.asked
            time.sleep(0.01)
        time.sleep(0.2)
        steps = range(before + 1, before + 6)
        saved = [step for step in steps if _saves(checkpointer, world, step)]
    assert saved == policy.steps
    assert policy.asked == sorted(set(policy.asked)), "each step, once"


def _saves(checkpointer: EmergencyCheckpointer, world: World, step: int) -> bool:
    begun = checkpointer.save(step=step, state=world.state(step))
    checkpointer.wait_until_finished()
    return begun


def test_policies_of_the_page_save_to_both_tiers(world: World) -> None:
    names_of_page: dict[str, Any] = {}
    exec(readme_block("policies"), names_of_page)
    config = names_of_page["config"]
    names = ("local_save_every", "save_every", "preservation_policy")
    settings = {name: getattr(config, name) for name in names}
    assert None not in settings.values()
    with world.open_both(**settings) as ckpt:
        ckpt.restore(state=world.state(0))
        deadline_s, step = time.monotonic() + LONG_S, 0
        while not {"save.complete", "persistent.complete"} <= set(world.names()):
            assert time.monotonic() < deadline_s, world.names()
            step += 1
            save(ckpt, world, step)  # the policies want a step; which one is agreed meanwhile
            time.sleep(STEP_S)
        finish(ckpt)
    world.lose_ram()
    world.restores(world.named("persistent.complete")[-1].fields["step"])
