"""Orbax's policy objects, taken as they are, and what this package makes of them.

What follows from the step alone (fixed interval, specific steps, initial save) is decided in the
training thread, alike everywhere. What looks at a clock or at whether a save is under way is asked
of the leader, in the background, and announced: Orbax's continuous policy would wait for the leader
in the training thread at every step.

Orbax is imported where a policy is looked at, and not by every start: it takes as long as JAX.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from emergency_ckpt.core.save.save_rules import (
    StepRecord,
    StepRules,
    metric_number,
    wanted_by_fields,
)
from emergency_ckpt.core.save.timing import (
    Continuous,
    EverySeconds,
    TimingRule,
)

_REMEMBERED_STEPS = 1000


class SavePolicy(Protocol):
    """Orbax's ``SaveDecisionPolicy``: what a user's own policy must have."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool: ...


SaveRule = int | datetime.timedelta | SavePolicy | TimingRule
SaveEvery = SaveRule | Sequence[SaveRule]
"""When a tier saves: a number of steps, a time, a policy, or several, of which one is enough."""


class PreservationPolicy(Protocol):
    """Orbax's ``PreservationPolicy``: what a user's own policy must have."""

    def should_preserve(self, checkpoints: Any, *, context: Any) -> Sequence[bool]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A step as policies see it: Orbax's ``PolicyCheckpointInfo``."""

    step: int
    time: datetime.datetime
    metrics: Mapping[str, Any] | None = None


class UserPolicy:
    """A policy of unknown kind: asked once for each step, in rising order.

    Either by the leader, off the training thread, for a step that is still ahead, at the time when
    it is asked; or (``PerProcessPolicy``) by every process when it gets there. It may look at all
    that Orbax gives it.
    """

    def __init__(self, policy: SavePolicy) -> None:
        self._policy = policy
        self._previous: list[CheckpointInfo] = []

    def saved(self, step: int, time_s: float) -> None:
        """A save of ``step`` was due, or the step was restored."""
        self._previous.append(CheckpointInfo(step, _moment(time_s)))
        del self._previous[:-_REMEMBERED_STEPS]

    def wants(
        self, step: int, time_s: float, *, busy: bool = False, preempted: bool = False
    ) -> bool:
        """Return the policy's answer for ``step``; raise what it raises."""
        from orbax.checkpoint import checkpoint_managers as ocm  # noqa: PLC0415
        from orbax.checkpoint.options import MultiprocessingOptions  # noqa: PLC0415

        context = ocm.DecisionContext(
            is_saving_in_progress=busy,
            reached_preemption=preempted,
            multiprocessing_options=MultiprocessingOptions(primary_host=0),
        )
        info = CheckpointInfo(step, _moment(time_s))
        return bool(self._policy.should_save(info, list(self._previous), context=context))


@dataclasses.dataclass(frozen=True)
class PerProcessPolicy:
    """``policy``, of whose parts those of unknown kind are asked on every process, at each step.

    As Orbax asks them: in the training thread. They must answer alike on all processes; a save
    that only some begin never becomes whole. Parts of known kinds are treated as ever.
    """

    policy: SavePolicy


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """The schedule of one tier.

    Attributes:
      rules: decided from the step alone.
      timing, asked: decided by the leader, which announces the steps.
      everywhere: asked on every process.
      on_preemption: a policy asks for a save at the sync point.
    """

    rules: StepRules = dataclasses.field(default_factory=StepRules)
    timing: tuple[TimingRule, ...] = ()
    asked: tuple[UserPolicy, ...] = ()
    everywhere: tuple[UserPolicy, ...] = ()
    on_preemption: bool = False

    @property
    def is_announced(self) -> bool:
        """True when the leader announces steps of the tier in the background."""
        return bool(self.timing or self.asked)

    @property
    def is_paced(self) -> bool:
        """True when saves come at intervals, of steps or of time, and not by policies alone."""
        return bool(self.timing) or any(n > 0 for n in self.rules.intervals)

    @property
    def is_on(self) -> bool:
        """True when the tier saves at all."""
        rules = self.rules
        by_step = any(n > 0 for n in rules.intervals) or rules.steps or rules.initial
        return bool(by_step or self.is_announced or self.everywhere or self.on_preemption)


def plan_saves(every: object) -> SavePlan:
    """Return the plan of one tier: that of each part of ``every``, a ``SaveEvery``."""
    rules, timing = StepRules(), list[TimingRule]()
    asked, everywhere = list[UserPolicy](), list[UserPolicy]()
    on_preemption = False
    for part, is_asked_everywhere in _parts(every):
        if isinstance(part, datetime.timedelta):
            timing.append(EverySeconds(interval_s=part.total_seconds()))
            continue
        if isinstance(part, int):
            rules = rules._replace(intervals=(*rules.intervals, part))
            continue
        from orbax.checkpoint import checkpoint_managers as ocm  # noqa: PLC0415

        # By exact type: a subclass may decide otherwise.
        kind = type(part)
        if kind is ocm.FixedIntervalPolicy:
            interval = cast("ocm.FixedIntervalPolicy", part).interval
            rules = rules._replace(intervals=(*rules.intervals, interval))
        elif kind is ocm.SpecificStepsPolicy:
            steps = cast("ocm.SpecificStepsPolicy", part).steps
            rules = rules._replace(steps=(*rules.steps, steps))
        elif kind is ocm.InitialSavePolicy:
            rules = rules._replace(initial=True)
        elif kind is ocm.PreemptionCheckpointingPolicy:
            on_preemption = True
        elif kind is ocm.ContinuousCheckpointingPolicy:
            minimum = cast("ocm.ContinuousCheckpointingPolicy", part).minimum_interval_secs
            timing.append(Continuous(minimum_interval_s=float(minimum or 0.0)))
        elif isinstance(part, TimingRule):
            timing.append(part)
        else:
            unknown = everywhere if is_asked_everywhere else asked
            unknown.append(UserPolicy(cast("SavePolicy", part)))
    return SavePlan(rules, tuple(timing), tuple(asked), tuple(everywhere), on_preemption)


def plan_text(plan: SavePlan | None) -> str:
    """Return the schedule of a tier in words; ``plan`` None: the tier is off."""
    if plan is None:
        return "off"
    texts = ["every step" if n == 1 else f"every {n} steps" for n in plan.rules.intervals if n > 0]
    texts += [rule.words for rule in plan.timing]
    if plan.asked or plan.everywhere or plan.rules.steps or plan.rules.initial:
        texts.append("as its policy asks")
    return "saved " + (" and ".join(texts) or "at a preemption")


def wanted_steps(
    records: Sequence[StepRecord],
    policy: PreservationPolicy | None,
    *,
    keep_last_n: int | None = None,
    keep_every_n_steps: int | None = None,
) -> list[bool]:
    """Return the steps that the policy, or else the simple fields, keep, oldest first."""
    if policy is None:
        return wanted_by_fields([r.step for r in records], keep_last_n, keep_every_n_steps)
    from orbax.checkpoint import checkpoint_managers as ocm  # noqa: PLC0415

    infos = [CheckpointInfo(r.step, _moment(r.time_s), r.metrics) for r in records]
    context = ocm.PreservationContext()
    ranking = _ranking_numbers(policy)
    return [bool(keep) for keep in ranking.should_preserve(infos, context=context)]


def _ranking_numbers(policy: Any) -> Any:
    """Return ``policy``, in which every ``BestN`` ranks NaN and infinity behind all numbers.

    Orbax sorts by the metric, and a NaN, which is neither less nor greater than a number, leaves
    the steps in no order: the best of them could go. A user's subclass may take arguments of its
    own, so no policy is constructed here.
    """
    from orbax.checkpoint import checkpoint_managers as ocm  # noqa: PLC0415

    if isinstance(policy, ocm.BestN):
        worst = math.inf if policy.reverse else -math.inf

        def ranked(metrics: Any) -> float:
            number = metric_number(policy.get_metric_fn, metrics)
            return worst if number is None else number

        return _changed(policy, "get_metric_fn", ranked)
    if isinstance(policy, ocm.AnyPreservationPolicy):
        return _changed(policy, "policies", [*map(_ranking_numbers, policy.policies)])
    return policy


def _changed(policy: Any, name: str, value: object) -> Any:
    """Return a copy of ``policy`` that has ``value`` as its attribute ``name``."""
    changed = copy.copy(policy)
    setattr(changed, name, value)
    return changed


def policy_identity(policy: object) -> object:
    """Return the part of a policy that must be equal on all processes, without addresses."""
    if isinstance(policy, list | tuple):
        return [policy_identity(part) for part in cast("Sequence[object]", policy)]
    kind = f"{type(policy).__module__}.{type(policy).__qualname__}"
    if callable(policy):
        return getattr(policy, "__qualname__", kind)
    if dataclasses.is_dataclass(policy):
        names = [field.name for field in dataclasses.fields(policy)]
        return kind, [(name, policy_identity(getattr(policy, name, None))) for name in names]
    return kind if type(policy).__repr__ is object.__repr__ else (kind, repr(policy))


def is_interval(part: object) -> bool:
    """Return whether a part of a ``SaveEvery`` is a number of steps or a time."""
    return isinstance(part, int | datetime.timedelta)


def parts_of(every: object) -> list[object]:
    """Return the rules of which ``every`` is made: any of them may ask for a save."""
    return [part for part, _ in _parts(every)]


def _parts(every: object, *, everywhere: bool = False) -> Iterator[tuple[object, bool]]:
    """Yield each rule in ``every``, and whether every process is asked where it is unknown."""
    if isinstance(every, PerProcessPolicy):
        yield from _parts(every.policy, everywhere=True)
        return
    children: object = every
    if not (is_interval(every) or isinstance(every, list | tuple)):
        from orbax.checkpoint import checkpoint_managers as ocm  # noqa: PLC0415

        children = every.policies if type(every) is ocm.AnySavePolicy else every
    if not isinstance(children, list | tuple):
        yield every, everywhere
        return
    for child in cast("Sequence[object]", children):
        yield from _parts(child, everywhere=everywhere)


def _moment(time_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC)
