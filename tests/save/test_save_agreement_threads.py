"""The agreement's threads, over a coordination service that fails now and then."""

from __future__ import annotations

import threading
import time

import pytest
from memory_coordination import MemoryService

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster import LeftProcesses
from emergency_ckpt.core.save import step_agreement as save_agreement
from emergency_ckpt.core.save.step_agreement import Due, Progress
from emergency_ckpt.errors import CoordinationError, SaveFailed
from emergency_ckpt.save import SaveAgreement
from emergency_ckpt.save.step_agreement import Choice

COUNT = 3
LONG_S = 30.0
WAIT_S = 0.6
"""For an answer or a decision; a fault makes one of them never come."""


@pytest.fixture(autouse=True)
def a_long_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that a busy machine forgets for a tenth of a second is not too late yet."""
    monkeypatch.setattr(save_agreement, "FIRST_LEAD_S", 0.2)


class Tier:
    """Wants a save whenever none is ahead; always ready."""

    stall_s = 0.0

    def __init__(self) -> None:
        self.ahead = -1
        self.wanted = True

    def is_ready(self, timeout_s: float) -> bool:
        del timeout_s
        return True

    def choose_step(self, progress: Progress, first_step: int, lead_s: float) -> Choice | None:
        del lead_s
        if progress.step <= self.ahead or not self.wanted:
            return None
        return Choice(first_step, waits=False)

    choose_first = choose_step

    def agreed(self, step: int, stall_s: float) -> None:
        del stall_s
        self.ahead = step


def train(service: MemoryService, saves: int) -> tuple[list[dict[int, bool | None]], list[int]]:
    """Step until the leader has begun ``saves``; each process's saves by step, and failures."""
    tiers = [Tier() for _ in range(COUNT)]
    failures = [Failures() for _ in range(COUNT)]
    agreements = [
        SaveAgreement(
            service.member(p), "agree/0", {"local": tiers[p]}, failures[p], timeout_s=WAIT_S
        )
        for p in range(COUNT)
    ]
    begun: list[dict[int, Due]] = [{} for _ in range(COUNT)]
    deadline_s = time.monotonic() + LONG_S
    step = 0
    while len(begun[0]) < saves:
        assert time.monotonic() < deadline_s, begun
        step += 1
        for process, agreement in enumerate(agreements):
            for due in agreement.arrive(step):
                begun[process][step] = due
        time.sleep(0.004)
    tiers[0].wanted = False
    words = [
        {
            step: True if due.confirmed else agreement.decision_on(due.number, 2 * WAIT_S)
            for step, due in mine.items()
        }
        for mine, agreement in zip(begun, agreements, strict=True)
    ]
    for agreement in agreements:
        agreement.stop()
    deadline_s = time.monotonic() + LONG_S  # `stop` itself waits for two seconds at most
    while [t for t in threading.enumerate() if t.name == "eckpt-save-agreement"]:
        assert time.monotonic() < deadline_s, "a thread goes on after `stop`"
        time.sleep(0.01)
    return words, [each.count for each in failures]


def test_all_save_the_same_steps() -> None:
    words, failures = train(MemoryService(COUNT), 12)
    assert failures == [0] * COUNT
    saved = [{step for step, decision in mine.items() if decision} for mine in words]
    assert len(saved[0]) >= 6  # an answer that comes too late costs a save, and doubles the lead
    assert saved == [saved[0]] * COUNT


@pytest.mark.parametrize(
    ("process", "operation", "part", "saves"),
    [
        (0, "put", "/proposal/2", 8),
        (0, "list", "/answer/2", 8),
        (1, "put", "/answer/2", 8),
        (1, "get", "/proposal/2", 8),
        (2, "get", "/decision/2", 8),
        (0, "delete", "/proposal", 20),  # the first is kept until there are sixteen after it
    ],
)
def test_fault_of_the_service_costs_one_save_at_most(
    process: int, operation: str, part: str, saves: int
) -> None:
    service = MemoryService(COUNT)
    service.fail(process, operation, part, CoordinationError(operation, part, "unreachable"))
    words, failures = train(service, saves)
    service.check(process, operation, part)  # raises the fault when it never came
    assert sum(failures) == (0 if operation == "delete" else 1)
    saved = [{step for step, decision in mine.items() if decision is not False} for mine in words]
    differing = set.union(*saved) - set.intersection(*saved)
    assert len(differing) <= 1
    assert len(set.intersection(*saved)) >= saves - 2


def test_leader_without_a_process_that_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emergency_ckpt.save.step_agreement._LEFT_PAUSE_S", 0.01)
    service = MemoryService(2)
    LeftProcesses(service.member(1)).leave("KeyError: bug", {})
    failures = Failures()
    agreement = SaveAgreement(
        service.member(0), "agree/0", {"local": Tier()}, failures, timeout_s=10_000.0
    )
    step, deadline_s = 0, time.monotonic() + LONG_S
    while not failures.count:
        assert time.monotonic() < deadline_s, "it waits for an answer that never comes"
        step += 1
        agreement.arrive(step)
        time.sleep(0.004)
    agreement.stop()
    with pytest.raises(SaveFailed, match="process 1 has left: KeyError: bug"):
        failures.raise_pending()
