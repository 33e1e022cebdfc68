"""Rounds and cells under schedules that a seed draws: `round_schedules.py SEEDS [FIRST]`.

Calls are slow, lose their effect or their reply; a process pauses, leaves, or is killed at any
call; rules raise. Every wait must end, and no two processes may end with different values.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import sim
from scheduler import Process
from schedules import run_seeds
from service import Client, Service

TIMEOUT_S = 20.0
ROUNDS = 4


class Broken(Exception):
    """What a rule raises; no error of the product."""


def run(seed: int) -> Counter[str]:
    """Run one schedule and judge it; return how often each end was seen."""
    from emergency_ckpt.cluster.coordination import JaxCoordinator  # noqa: PLC0415
    from emergency_ckpt.cluster.left_processes import LeftProcesses  # noqa: PLC0415
    from emergency_ckpt.cluster.round import Cell, Round  # noqa: PLC0415
    from emergency_ckpt.errors import CheckpointError  # noqa: PLC0415

    draw, scheduler, service = random.Random(seed), sim.begin(seed), Service()
    count = draw.randint(1, 5)
    leader = draw.randrange(count)
    slow_s = draw.choice((0.001, 0.05, 3.0))
    lost, unheard = draw.choice(((0.0, 0.0), (0.0, 0.03), (0.03, 0.03)))
    service.delay = lambda: slow_s * draw.random() ** 3
    service.fault = lambda operation, key: _fault(draw.random(), lost, unheard)
    broken = {number for number in range(ROUNDS) if draw.random() < 0.15}
    leaves = {p: draw.randrange(ROUNDS) for p in range(count) if draw.random() < 0.15}
    is_each = [draw.random() < 0.3 for _ in range(ROUNDS)]
    processes = [Process(f"p{index}", index, None) for index in range(count)]
    for process in processes:
        if draw.random() < 0.15:
            process.calls_left = draw.randrange(40)
        if draw.random() < 0.15:
            process.frozen_until_s = scheduler.now_s + draw.random() * 2 * TIMEOUT_S
    was_frozen = any(process.frozen_until_s for process in processes)
    ends: dict[tuple[int, int], Any] = {}
    cells: dict[tuple[int, int], bytes] = {}

    def part_of(me: int) -> None:
        coordinator = JaxCoordinator(Client(service), "job", me, count)
        for number in range(ROUNDS):
            if leaves.get(me) == number:
                LeftProcesses(coordinator).gone("it has had enough")
                return
            name, each = f"round/{number}", is_each[number]
            held = Round(coordinator, name, TIMEOUT_S, leader=leader, grouped=each)

            def decide(said: Any, number: int = number, each: bool = each) -> Any:
                assert said == {p: f"{p} of {number}".encode() for p in range(count)}
                if number in broken:
                    raise Broken(f"the rule of {number}")
                together = b"+".join(said.values())
                return (lambda _: together) if each else together

            try:
                ends[number, me] = held.hold(f"{me} of {number}".encode(), held.when_all(decide))
            except (CheckpointError, Broken) as error:
                ends[number, me] = error
            try:
                own = f"of {me}".encode()
                cells[number, me] = Cell(coordinator, f"cell/{number}").settle(own)
            except CheckpointError:
                pass

    for index, process in enumerate(processes):
        scheduler.spawn(process, "round", lambda index=index: part_of(index))
    # Ends when nobody is left that waits; Stuck when one waits longer than its deadlines allow.
    scheduler.run(lambda: False, ROUNDS * 10 * TIMEOUT_S, 1 << 20)
    assert not scheduler.errors, scheduler.errors
    is_calm = lost == unheard == scheduler.deaths == 0 and slow_s < 1 and not was_frozen
    left_from = min(leaves.values(), default=ROUNDS)
    for number in range(ROUNDS):
        assert len({value for (at, _), value in cells.items() if at == number}) <= 1
        of_round = {me: end for (at, me), end in ends.items() if at == number}
        values = {end for end in of_round.values() if isinstance(end, bytes)}
        assert len(values) <= 1, f"round {number} ended with {values}"
        assert not (values and number in broken), "a value of a rule that raised"
        kind = "value" if number not in broken else "broken"
        if is_calm:
            _judge(of_round, "left" if number >= left_from else kind, leader)
    for me in range(count):
        if processes[me].alive and leaves.get(me) is None:
            assert {(n, me) for n in range(ROUNDS)} <= ends.keys(), f"process {me} did not end"
    told = [key for key in service.values if ".told" in key]
    assert len(service.values) <= ROUNDS * (2 * count + 1) + count
    assert len(told) <= sum(count if each else 1 for each in is_each)
    return Counter(
        "value" if isinstance(end, bytes) else type(end).__name__ for end in ends.values()
    )


def _judge(ends: dict[int, Any], kind: str, leader: int) -> None:
    """Judge a round in which nobody was slow, paused or killed, and no call was lost."""
    for me, end in ends.items():
        if kind == "left":
            assert type(end).__name__ == "PeerLeft", end
        elif kind == "value":
            assert isinstance(end, bytes), end
        elif me == leader:
            assert isinstance(end, Broken), end
        else:
            assert f"process {leader} failed: unexpected Broken: the rule" in str(end), end


def _fault(number: float, lost: float, unheard: float) -> str:
    if number < lost:
        return "lost"
    return "unheard" if number < lost + unheard else ""


if __name__ == "__main__":
    run_seeds(run, first=1)
