"""Whether to save at a step, and whether a save counts for the whole job."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Literal, NamedTuple


class SaveDecision(NamedTuple):
    """``save`` says whether a save is due; ``reason`` says why, in words."""

    save: bool
    reason: str


class VoteResult(NamedTuple):
    """Outcome of the vote on one save, and why."""

    outcome: Literal["complete", "incomplete"]
    reason: str


class StepRules(NamedTuple):
    """What decides from the step alone, alike on all processes: any one of these.

    Attributes:
      intervals: due at multiples of each; 0 or less never.
      steps: due at what is in one of these.
      initial: due when nothing was saved or restored yet.
    """

    intervals: tuple[int, ...] = ()
    steps: tuple[Container[Any], ...] = ()
    initial: bool = False


_NAMED_AT_MOST = 8


def decide_save(step: int, every_n_steps: int, last_saved: int | None) -> SaveDecision:
    """Fixed interval: due at multiples of ``every_n_steps``, once each.

    Args:
      every_n_steps: 0 or less turns saving off.
      last_saved: the last step saved or restored in this life of the job; None before the first.
    """
    if every_n_steps <= 0:
        return SaveDecision(False, "saving is off")
    if step % every_n_steps:
        return SaveDecision(False, f"step {step} is no multiple of {every_n_steps}")
    if last_saved is not None and step <= last_saved:
        return SaveDecision(False, f"step {last_saved} is saved already")
    return SaveDecision(True, f"step {step} is a multiple of {every_n_steps}")


def decide_by_step(rules: StepRules, step: int, last_saved: int | None) -> SaveDecision:
    """Whether any of ``rules`` wants ``step``; ``last_saved`` as in ``decide_save``."""
    if last_saved is not None and step <= last_saved:
        return SaveDecision(False, f"step {last_saved} is saved already")
    if rules.initial and last_saved is None:
        return SaveDecision(True, "nothing is saved yet")
    for interval in rules.intervals:
        decision = decide_save(step, interval, last_saved)
        if decision.save:
            return decision
    if any(step in steps for steps in rules.steps):
        return SaveDecision(True, f"step {step} was asked for")
    return SaveDecision(False, f"no rule asks for step {step}")


def decide_vote(
    expected: Iterable[int], published: Iterable[int], refused: Iterable[int]
) -> VoteResult:
    """A save is complete when every expected process published it and none refused.

    Args:
      expected, published, refused: process indices. Votes of processes that are not expected do
        not count. One that did both has refused: the doubt goes against the save.
    """
    wanted = frozenset(expected)
    against = wanted & frozenset(refused)
    absent = wanted - frozenset(published) - against
    if not wanted:
        return VoteResult("incomplete", "no process was expected to publish")
    if not against and not absent:
        return VoteResult("complete", all_published(len(wanted)))
    parts: list[str] = []
    if against:
        parts.append(f"{_named(against)} refused")
    if absent:
        parts.append(f"{_named(absent)} did not publish")
    return VoteResult("incomplete", "; ".join(parts))


def all_published(count: int) -> str:
    """Why a save of ``count`` processes is complete."""
    return f"all {count} processes published"


def _named(processes: frozenset[int]) -> str:
    order = sorted(processes)
    names = ", ".join(map(str, order[:_NAMED_AT_MOST]))
    more = f" and {len(order) - _NAMED_AT_MOST} more" if len(order) > _NAMED_AT_MOST else ""
    return f"process{'es' if len(order) > 1 else ''} {names}{more}"
