"""Orbax's own policy objects, used as they are."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import checkpoint_managers as ocm

from emergency_ckpt.config.policies import (
    PerProcessPolicy,
    plan_saves,
    policy_identity,
    wanted_steps,
)
from emergency_ckpt.config.validation import (
    preservation_policy_problems,
    save_problems,
)
from emergency_ckpt.core.save.save_rules import StepRecord, StepRules, is_due
from emergency_ckpt.core.save.timing import Continuous, EverySeconds, TierStatus
from emergency_ckpt.extras.pace import AdaptiveInterval

IDLE = TierStatus(False, True, 1.0, 0.0, 0.0, 1.0)


class Own:
    """A user's policy: remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int], bool]] = []

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        self.asked.append(
            (step.step, [p.step for p in previous_steps], context.is_saving_in_progress)
        )
        return step.step % 2 == 0


class OwnInterval(ocm.FixedIntervalPolicy):
    """A subclass may decide otherwise, so it is asked."""


def due(policy: object, steps: range, last: int | None = 0) -> list[int]:
    return [step for step in steps if is_due(plan_saves(policy).rules, step, last)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (ocm.FixedIntervalPolicy(4), [4, 8]),
        (ocm.SpecificStepsPolicy([3, 9, 30]), [3, 9]),
        (ocm.SpecificStepsPolicy(range(5, 7)), [5, 6]),
        (
            ocm.AnySavePolicy(
                [
                    ocm.FixedIntervalPolicy(6),
                    ocm.AnySavePolicy([ocm.SpecificStepsPolicy({1}), ocm.InitialSavePolicy()]),
                ]
            ),
            [1, 6],
        ),
        (ocm.PreemptionCheckpointingPolicy(), []),
        (ocm.ContinuousCheckpointingPolicy(), []),
    ],
)
def test_what_follows_from_the_step_alone(policy: object, expected: list[int]) -> None:
    assert due(policy, range(1, 10)) == expected


def test_initial_save_is_the_first_unless_something_was_restored() -> None:
    assert due(ocm.InitialSavePolicy(), range(3), last=None) == [0, 1, 2]
    assert due(ocm.InitialSavePolicy(), range(3), last=0) == []


def test_what_depends_on_the_clock_is_announced() -> None:
    adaptive = AdaptiveInterval(mean_time_between_failures_s=3600)
    plan = plan_saves(
        ocm.AnySavePolicy(
            [ocm.ContinuousCheckpointingPolicy(minimum_interval_secs=30), adaptive]  # type: ignore[list-item]
        )
    )
    assert plan.timing == (Continuous(minimum_interval_s=30.0), adaptive)
    assert plan.is_announced
    assert plan_saves(datetime.timedelta(seconds=9)).timing == (EverySeconds(interval_s=9),)


@pytest.mark.parametrize("policy", [Own(), OwnInterval(2)])
def test_what_is_unknown_is_asked(policy: object) -> None:
    plan = plan_saves(ocm.AnySavePolicy([policy]))  # type: ignore[list-item]
    assert plan.rules == StepRules()
    (asked,) = plan.asked
    asked.saved(4, 1000.0)
    assert [asked.wants(step, 2000.0) for step in (5, 6)] == [False, True]
    if isinstance(policy, Own):
        assert policy.asked == [(5, [4], False), (6, [4], False)]


def test_policy_for_preemption_is_known() -> None:
    policy = ocm.AnySavePolicy([ocm.PreemptionCheckpointingPolicy(), ocm.FixedIntervalPolicy(2)])
    assert plan_saves(policy).on_preemption
    assert not plan_saves(ocm.FixedIntervalPolicy(2)).on_preemption


@pytest.mark.parametrize("off", [0, [], (0, 0)], ids=repr)
def test_tier_without_a_rule_is_off(off: object) -> None:
    assert not plan_saves(off).is_on


def test_each_rule_of_a_list_counts() -> None:
    minute = datetime.timedelta(minutes=1)
    policies = ocm.AnySavePolicy([ocm.FixedIntervalPolicy(6)]), Own()
    plan = plan_saves([4, minute, *policies])
    assert plan.rules.intervals == (4, 6)
    assert plan.timing == (EverySeconds(interval_s=60.0),)
    assert len(plan.asked) == 1
    assert plan_saves(minute).is_on


def test_users_policy_in_a_list_is_asked_where_it_says() -> None:
    plan = plan_saves([Own(), PerProcessPolicy(Own()), 3])
    assert (len(plan.asked), len(plan.everywhere)) == (1, 1)


RECORDS = [StepRecord(step, 60.0 * step, {"loss": abs(step - 3)}) for step in range(1, 7)]


class KeepsOdd:
    """A user's own."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        return [info.step % 2 == 1 for info in checkpoints]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (ocm.LatestN(2), [5, 6]),
        (ocm.EveryNSeconds(180), [1, 4]),
        (ocm.EveryNSteps(3), [3, 6]),
        (ocm.AnyPreservationPolicy([ocm.LatestN(1), ocm.EveryNSteps(4)]), [4, 6]),
        (
            ocm.BestN(
                get_metric_fn=lambda m: -m["loss"], n=2, keep_checkpoints_without_metrics=False
            ),
            [3, 4],
        ),
        (KeepsOdd(), [1, 3, 5]),
    ],
)
def test_preservation(policy: Any, kept: list[int]) -> None:
    wanted = wanted_steps(RECORDS, policy)
    assert [r.step for r, want in zip(RECORDS, wanted, strict=True) if want] == kept


@dataclasses.dataclass
class HasFunction:
    metric: Any
    policies: list[Any]


def test_identities_have_no_addresses_and_tell_settings_apart() -> None:
    assert policy_identity(Own()) == policy_identity(Own())
    assert policy_identity(ocm.LatestN(2)) != policy_identity(ocm.LatestN(3))
    pairs = [HasFunction(len, [Own(), ocm.FixedIntervalPolicy(n)]) for n in (1, 1, 2)]
    first, same, other = map(policy_identity, pairs)
    assert first == same != other
    assert "0x" not in repr(first)


def test_what_is_no_policy_is_named() -> None:
    policy = ocm.AnySavePolicy([object(), ocm.FixedIntervalPolicy(0)])  # type: ignore[list-item]
    problems = list(save_problems("save_every", policy))
    assert problems[0].startswith("save_every: <object")
    assert "interval of FixedIntervalPolicy must be a whole number" in problems[1]
    assert list(preservation_policy_problems(Own())) != []
    assert list(preservation_policy_problems(ocm.LatestN(1))) == []


def test_policy_class_in_place_of_a_policy_is_named() -> None:
    policy = ocm.AnySavePolicy([ocm.InitialSavePolicy])  # type: ignore[list-item]
    assert list(save_problems("p", policy)) == ["p: InitialSavePolicy is a class: give one of it"]
    (problem,) = preservation_policy_problems(ocm.LatestN)
    assert "LatestN is a class" in problem


NO_SAVES: list[Any] = [
    ocm.AnySavePolicy(3),  # type: ignore[arg-type]
    *[ocm.FixedIntervalPolicy(value) for value in (0, -1, 1.5, True, "x", None)],  # type: ignore[arg-type]
    *[ocm.SpecificStepsPolicy(value) for value in ("12", 12, None, b"x")],  # type: ignore[arg-type]
    *[
        ocm.ContinuousCheckpointingPolicy(minimum_interval_secs=value)
        for value in (-1, float("nan"), "1", True)
    ],  # type: ignore[arg-type]
]
NOTHING_KEPT: list[Any] = [
    *[ocm.LatestN(value) for value in (-1, 1.5, "x", True)],  # type: ignore[arg-type]
    *[ocm.BestN(get_metric_fn=len, n=value) for value in (-1, "x")],  # type: ignore[arg-type]
    ocm.BestN(get_metric_fn="loss", n=1),  # type: ignore[arg-type]
    *[ocm.EveryNSeconds(value) for value in (-1, float("nan"), float("inf"), "x")],  # type: ignore[arg-type]
    *[ocm.EveryNSteps(value) for value in (0, -1, 2.5)],  # type: ignore[arg-type]
    ocm.EveryNSteps(2, max_to_keep=-1),
    *[ocm.EveryNStepsClosest(value) for value in (0, "x")],  # type: ignore[arg-type]
    ocm.LatestDuration(60),  # type: ignore[arg-type]
    ocm.AnyPreservationPolicy(3),  # type: ignore[arg-type]
    ocm.AnyPreservationPolicy([ocm.LatestN(1), ocm.LatestN(-1)]),
]


@pytest.mark.parametrize("policy", NO_SAVES, ids=repr)
def test_save_policy_with_a_value_that_it_cannot_have(policy: Any) -> None:
    (problem,) = save_problems("save_every", ocm.AnySavePolicy([policy]))
    assert problem.startswith("save_every: ")
    assert " must be " in problem


@pytest.mark.parametrize("policy", NOTHING_KEPT, ids=repr)
def test_preservation_policy_with_a_value_that_it_cannot_have(policy: Any) -> None:
    (problem,) = preservation_policy_problems(policy)
    assert problem.startswith("preservation_policy: ")
    assert " must be " in problem


@pytest.mark.parametrize(
    "policy",
    [
        ocm.SpecificStepsPolicy([]),
        ocm.SpecificStepsPolicy(range(0, 100, 7)),
        ocm.SpecificStepsPolicy(np.arange(5)),  # type: ignore[arg-type]
        ocm.ContinuousCheckpointingPolicy(),
        ocm.ContinuousCheckpointingPolicy(minimum_interval_secs=2),
        AdaptiveInterval(mean_time_between_failures_s=5.0, max_overhead=0.2),
    ],
    ids=repr,
)
def test_save_policies_that_will_do(policy: Any) -> None:
    assert list(save_problems("save_every", policy)) == []


@pytest.mark.parametrize(
    "policy",
    [
        ocm.LatestN(),
        ocm.LatestN(0),
        ocm.BestN(get_metric_fn=len),
        ocm.CustomSteps([3, 4]),
        ocm.EveryNSeconds(60),
        ocm.LatestDuration(datetime.timedelta(hours=1)),
        ocm.AnyPreservationPolicy([ocm.LatestN(2), ocm.EveryNSteps(100, max_to_keep=3)]),
    ],
    ids=repr,
)
def test_preservation_policies_that_will_do(policy: Any) -> None:
    assert list(preservation_policy_problems(policy)) == []
