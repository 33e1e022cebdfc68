"""One case: an operation that is stopped at its k-th change while a second actor acts, judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from operations import (
    ACTORS,
    HASTY_S,
    LONG_S,
    OPERATIONS,
    Here,
    State,
    error_of,
    in_another_process,
    late_calls,
)
from oracle import Seen, by_number, files_of, look
from seams import OldListings, Place, Point

from emergency_ckpt.errors import CheckpointError, DirectoryInUse

NEXT = 30
"""The number of the life that comes after all."""


@dataclass
class Outcome:
    """What came of one case; ``stages``: those of the operation to which it may have come."""

    operation: str
    actor: str
    place: str
    k: int
    is_reached: bool = False
    told: str = ""
    stages: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        words = f"--operation {self.operation} --actor {self.actor} --place {self.place}"
        return f"python verification/explorer/run.py {words} --k {self.k}"


def cases(place: Place, operation: str, actor: str, every: int, k: int | None) -> Iterator[Outcome]:
    """Explore each ``every``-th k until the operation is through; or one ``k`` alone.

    The first is another one for each pair, so that the pairs together have all.
    """
    first = (list(OPERATIONS).index(operation) + 3 * list(ACTORS).index(actor)) % every
    before = prepared(place, operation)
    at, newest = first if k is None else k, -1
    while True:
        outcome = _Case(place, operation, actor, at, before).explore()
        if ACTORS[actor].mode == "end" and outcome.stages and not outcome.problems:
            if max(outcome.stages) < newest:
                outcome.problems.append("what was done after fewer changes is not done now")
            newest = min(outcome.stages)
        yield outcome
        if not outcome.is_reached or k is not None:
            return
        at += every


_BEFORE: dict[tuple[str, str], State] = {}


def prepared(place: Place, operation: str) -> State:
    """Make the directory that cases of an operation begin with; return what is there."""
    key = place.name, operation
    if key not in _BEFORE:
        _BEFORE[key] = OPERATIONS[operation].before(place.url(f"before-{operation}"))
    return _BEFORE[key]


class _Case:
    def __init__(self, place: Place, operation: str, actor: str, k: int, before: State) -> None:
        self._place = place
        self._operation, self._actor = OPERATIONS[operation], ACTORS[actor]
        self._outcome = Outcome(operation, actor, place.name, k)
        self._run = f"{operation}-{actor}-{k}"
        self._url = place.url(self._run)
        self._before = before
        self._tried = [0]  # what each try of the first life adds to its values
        self._is_kept = False
        self._theirs: dict[str, bytes] = {}
        self._is_told = ""

    def explore(self) -> Outcome:
        operation, outcome, mode = self._operation, self._outcome, self._actor.mode
        self._place.copy(f"before-{outcome.operation}", self._run)
        is_late = mode == "late"
        here = Here(
            self._url,
            operation.number,
            timeout_s=HASTY_S if is_late else LONG_S,
            **operation.settings,
        )
        stop = mode if mode in ("end", "lose") else "hold"
        point = self._place.stop(stop, self._run, outcome.k)
        with ThreadPoolExecutor(1) as pool:
            try:
                first = pool.submit(error_of, lambda: operation.work(here, 0))
                # A late one goes on to be told that storage gave no answer; else it waits.
                self._wait(first, point, until_told=mode in ("end", "lose", "late"))
                outcome.is_reached = point.is_reached()
                if not outcome.is_reached:
                    point.go_on()  # it is not for the second actor
                problem = self._meanwhile(here, first, point)
            finally:
                point.go_on()
            error = first.result()
        outcome.told = "" if error is None else f"{type(error).__name__}: {error}"[:300]
        seen = look(self._place, self._run)
        seen.problems += problem
        self._judge(seen, here, error)
        outcome.problems = seen.problems
        if not outcome.problems:
            self._place.remove(self._run)
        return outcome

    def _wait(self, first: Future[Any], point: Point, *, until_told: bool) -> None:
        while not first.done() and (until_told or not point.is_reached()):
            time.sleep(0.002)

    def _meanwhile(self, here: Here, first: Future[Any], point: Point) -> list[str]:
        """Let the second actor act; return what it was told that it should not be."""
        mode = self._actor.mode
        if mode in ("end", "lose"):
            return []
        if mode == "old_listings":
            listings = OldListings(self._url)
            point.go_on()
            self._wait(first, point, until_told=True)
            with listings.shown():
                return self._second()
        if mode == "late":
            late = set(late_calls())
            tried = first.result()
            if tried is not None and not self._actor.fences:
                self._tried.append(50)  # the life goes on, and tries again while that may come
                tried = error_of(lambda: self._operation.work(here, 50))
            problem = self._second()
            point.go_on()
            for call in late:
                call.join()
            if tried is not None and not self._actor.fences:
                self._tried.append(100)
                again = Here(self._url, self._operation.number, **self._operation.settings)
                tried = error_of(lambda: self._operation.work(again, 100))
                # What an earlier try has saved counts, whatever that try was told, and is kept.
                self._is_kept = tried is not None and "the same number, and counts" in str(tried)
                if tried is not None and not self._is_kept:
                    problem.append(f"once storage answers again: {tried}")
            return problem
        problem = self._second()
        if not self._is_told:
            self._theirs = files_of(self._actor.saves, self._place.files(self._run))
        return problem

    def _second(self) -> list[str]:
        with in_another_process():
            act = self._actor.act
            error = error_of(lambda: act(self._url, self._operation.number))
        if error is None:
            return []
        self._is_told = str(error)
        if self._actor.may_fail and isinstance(error, DirectoryInUse):
            return []
        return [f"the second actor: {type(error).__name__}: {error}"[:400]]

    def _judge(self, seen: Seen, here: Here, error: Exception | None) -> None:
        actor, outcome = self._actor, self._outcome
        tries = [self._operation.stages(self._before, more) for more in self._tried]
        stages = [self._before, *(stage for stages in tries for stage in stages)]
        effect: Callable[[State], State] = actor.effect
        if self._is_told:
            effect = dict
        states = [effect(stage) for stage in stages]
        done = states[1:] if self._is_kept else [effect(stages[-1]) for stages in tries]
        if self._operation.looks:
            states += (late := self._operation.stages(effect(self._before), 0))
            done.append(late[-1])
        if actor.foreign and (self._operation.looks or not self._before):
            states += [{**state, 40: 48} for state in states]
            done += [{**state, 40: 48} for state in done]
        outcome.stages = [i for i, state in enumerate(states) if state == seen.state]
        seen.must(outcome.stages, f"steps are {seen.state}; they may be {states}")
        is_done = error is None or actor.mode == "lose" or actor is ACTORS["late_answer"]
        if is_done:
            seen.must(seen.state in done, f"it is done, and steps are {seen.state}")
        if not isinstance(error, CheckpointError | None):
            seen.problems.append(f"an error that is not named: {error!r}"[:400])
        if actor.mode == "lose":
            seen.must(error is None, f"a lost reply: {error}")
        if actor.mode == "end" and not outcome.is_reached:
            seen.must(error is None, f"nothing was refused: {error}")
        gone = [name for name, data in self._theirs.items() if seen.files.get(name) != data]
        seen.must(not gone, f"files of the second actor are gone or changed: {gone}")
        if actor.fences and actor.mode == "hold":
            told = error_of(lambda: here.save(50, 50))
            seen.must(isinstance(told, DirectoryInUse), f"its next save was told: {told!r}")
        self._judge_next_life(seen)

    def _judge_next_life(self, seen: Seen) -> None:
        """Nothing comes or goes by itself, nothing is left over, and saves go on."""
        takers = ACTORS["other_run"], ACTORS["stranger"]  # where nobody had a claim yet
        is_others = self._actor in takers and not self._is_told
        nxt = Here(self._url, NEXT, run_id="other" if is_others else "run")
        error = error_of(nxt.begin)
        seen.must(error is None, f"the next life's start: {error}")
        then = look(self._place, self._run)
        seen.problems += [f"then {problem}" for problem in then.problems]
        seen.must(then.state == seen.state, f"steps were {seen.state}, then {then.state}")
        seen.must(then.plain == then.state, f"{then.state} count, plain Orbax has {then.plain}")
        seen.must(not then.leftovers, f"left over: {then.leftovers}")
        for step in self._operation.hidden:
            if step not in then.state and not self._actor.fences:
                value = seen.read(
                    f"step {step} by its number",
                    lambda: by_number(self._place, self._run, step),  # noqa: B023
                )
                seen.must(value == step, f"step {step} by its number is {value}")
        step = 60 if 20 in then.state else 20  # what counts is kept
        error = error_of(lambda: nxt.save(step, 81))
        seen.must(error is None, f"the next life's save: {error}")
        again = look(self._place, self._run)
        seen.must(not again.leftovers, f"left over after its save: {again.leftovers}")
        want = {**then.state, step: 81}
        seen.problems += [f"after its save {problem}" for problem in again.problems]
        seen.must(
            again.state == again.plain == want, f"after its save {again.state}, {again.plain}"
        )
