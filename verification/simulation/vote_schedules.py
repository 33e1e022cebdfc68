"""Votes under schedules that a seed draws: `vote_schedules.py SEEDS [FIRST]`.

At each call of the leader in turn it pauses, dies, or the call loses its effect or its reply; the
others are slow, leave, refuse or are killed at times. A save has one final outcome, it is complete
only with the ballots of all, every wait ends, and the keys are bounded.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import sim
from scheduler import Process
from schedules import run_seeds
from service import Client, Service

TIMEOUT_S = 10.0
SAVES = 7
FAULTS = ("none", "pause", "die", "leave", "lost", "unheard")
LONGEST_CALLS = 60
"""The leader makes about so many calls in all votes."""


def run(seed: int) -> Counter[str]:
    """Run one schedule and judge it; return how often each outcome was learned."""
    from emergency_ckpt.cluster.coordination import JaxCoordinator  # noqa: PLC0415
    from emergency_ckpt.cluster.left_processes import LeftProcesses  # noqa: PLC0415
    from emergency_ckpt.save.vote import Ballot, Vote  # noqa: PLC0415
    from emergency_ckpt.types import SaveId  # noqa: PLC0415

    draw, scheduler, service = random.Random(seed), sim.begin(seed), Service()
    fault, at_call = FAULTS[seed % len(FAULTS)], seed // len(FAULTS) % LONGEST_CALLS
    count, is_calm = draw.randint(1, 4), draw.random() < 0.5
    slow_s = 0.01 if is_calm else draw.choice((0.05, 3.0))
    service.delay = lambda: slow_s * draw.random() ** 3
    processes = [Process(f"p{index}", index, None) for index in range(count)]
    refusals = {(n, p) for n in range(SAVES) for p in range(count) if draw.random() < 0.1}
    skips = {(n, p) for n in range(SAVES) for p in range(count) if draw.random() < 0.1}
    leaves = {0: draw.randrange(SAVES)} if fault == "leave" else {}
    if not is_calm:
        others = [p for p in range(1, count) if draw.random() < 0.2]
        leaves |= {p: draw.randrange(SAVES) for p in others if draw.random() < 0.5}
        for p in others:
            processes[p].calls_left = draw.randrange(60) if p not in leaves else -1
    calls = 0

    def fault_of(operation: str, key: str) -> str:
        nonlocal calls
        del operation, key
        if sim.scheduler.here().process is not processes[0]:
            return ""
        calls += 1
        if calls - 1 != at_call or fault in ("none", "leave"):
            return ""
        if fault == "pause":
            processes[0].frozen_until_s = scheduler.now_s + draw.choice((0.5, 2.5)) * TIMEOUT_S
        elif fault == "die":
            processes[0].calls_left = 0
        return fault if fault in ("lost", "unheard") else ""

    service.fault = fault_of
    published: dict[int, set[int]] = {number: set() for number in range(SAVES)}
    final: dict[int, set[str]] = {number: set() for number in range(SAVES)}
    told: Counter[str] = Counter()
    ended: set[int] = set()

    def part_of(me: int) -> None:
        coordinator = JaxCoordinator(Client(service), "job", me, count)
        left_processes = LeftProcesses(coordinator)
        vote, in_doubt = Vote(coordinator, TIMEOUT_S, left_processes), set[int]()

        def note(number: int, outcome: Any) -> None:
            told[outcome.kind] += 1
            in_doubt.discard(number)
            if outcome.kind == "in_doubt":
                in_doubt.add(number)
                return
            final[number].add(outcome.kind)
            if outcome.kind == "complete":
                in_doubt.difference_update(range(number))
                assert published[number] == set(range(count)), f"{number}: not all published"

        def save_of(number: int) -> Any:
            # The last ones are forced: parts of the life, which a later step does not follow.
            part = f".{number:06d}" if number >= SAVES - 2 else ""
            return SaveId(10 * min(number, SAVES - 2), f"{7:012d}-{'a' * 16}{part}", "run")

        for number in range(SAVES):
            if leaves.get(me) == number:
                left_processes.leave("it has had enough", {})
                left_processes.gone("it has had enough")
                return
            if (number, me) in skips:
                vote.refuse(save_of(number))
                continue
            for doubtful in sorted(in_doubt):
                note(doubtful, vote.learn(save_of(doubtful)))
            refused = (number, me) in refusals
            if not refused:
                published[number].add(me)
            ballot = (
                Ballot(refused="no room") if refused else Ballot(digest=f"{me} {number}".encode())
            )
            note(number, vote.cast(save_of(number), ballot))
        ended.add(me)

    for index, process in enumerate(processes):
        scheduler.spawn(process, "vote", lambda index=index: part_of(index))
    # Ends when nobody is left that waits; Stuck when one waits longer than its deadlines allow.
    scheduler.run(lambda: False, SAVES * 10 * TIMEOUT_S, 1 << 20)
    assert not scheduler.errors, scheduler.errors
    for number, kinds in final.items():
        assert len(kinds) <= 1, f"save {number} ended as {kinds}"
        is_refused = any((number, p) in refusals | skips for p in range(count))
        if is_calm and fault == "none":
            assert kinds <= {"incomplete" if is_refused else "complete"}, number
            assert not told["in_doubt"]
    for me, process in enumerate(processes):
        assert me in ended or me in leaves or not process.alive, f"process {me} did not end"
    # Four votes and the newest complete one, who came, and who left.
    if fault in ("none", "pause"):
        most = 5 * (count + 1) + count + 2 * len(leaves)
        assert len(service.values) <= most, sorted(service.values)
    return told


if __name__ == "__main__":
    run_seeds(run, first=0)
