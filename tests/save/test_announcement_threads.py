"""The threads of the announcements, over a coordination service that fails now and then."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
from announcing import LONG_S, Member, stop, train, train_alone, wait_until
from memory_coordination import MemoryCoordinator, MemoryService
from places import VERIFICATION
from programs import printed

from emergency_ckpt.background import Failures
from emergency_ckpt.config.policies import plan_saves
from emergency_ckpt.core.save import announcements as rules
from emergency_ckpt.errors import CoordinationError
from emergency_ckpt.save.announcements import DueSaves
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.types import LOCAL, TierName

COUNT = 3
SCHEDULES = VERIFICATION / "simulation" / "announcement_schedules.py"


@pytest.fixture(autouse=True)
def a_long_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that a busy machine forgets for a tenth of a second is not too late yet."""
    monkeypatch.setattr(rules, "_FIRST_LEAD_S", 0.2)
    monkeypatch.setattr("emergency_ckpt.save.announcements._KEPT_KEYS", 32)


def members_of(service: MemoryService) -> list[Member]:
    return [Member(service.member(process)) for process in range(service.process_count)]


class Held(MemoryCoordinator):
    """A coordinator whose answers about announcements come once ``reads`` is set."""

    def __init__(self, service: MemoryService, process: int) -> None:
        super().__init__(service, process)
        self.reads = threading.Event()

    def get(self, key: str, timeout_s: float) -> bytes:
        assert self.reads.wait(LONG_S)
        return super().get(key, timeout_s)

    def find(self, key: str) -> bytes | None:
        assert self.reads.wait(LONG_S)
        return super().find(key)


def member_that_reads_late() -> tuple[Member, Member, threading.Event]:
    """Return the leader, another process, and what lets that one read announcements."""
    service = MemoryService(2)
    held = Held(service, 1)
    return Member(service.member(0), LONG_S), Member(held), held.reads


def test_all_save_what_is_announced() -> None:
    members = members_of(MemoryService(COUNT))
    train(members, 12)
    assert [member.failures.count for member in members] == [0] * COUNT
    for member in members:
        assert sorted(member.saved + member.missed) == members[0].saved
        assert len(member.missed) <= 1
    assert members[0].missed == []


@pytest.mark.parametrize(
    ("process", "operation", "part"),
    [
        (0, "put", "/step/2"),
        (0, "list", "/report"),
        (0, "delete", "/step"),
        (1, "replace", "/report/1"),
        (1, "get", "/step/2"),
        (2, "find", "/step"),
    ],
)
def test_fault_of_the_service_costs_one_save_at_most(
    process: int, operation: str, part: str
) -> None:
    service = MemoryService(COUNT)
    service.fail(process, operation, part, CoordinationError(operation, part, "unreachable"))
    members = members_of(service)
    train(members, 40 if operation in ("delete", "find") else 8)
    for member in members:
        assert sorted(member.saved + member.missed) == members[0].saved
        assert len(member.missed) <= 2
    told = sum(member.failures.count for member in members)
    assert told <= 1


def test_turn_that_exits_ends_no_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    members = members_of(MemoryService(COUNT))
    works, calls = members[0].tier.choose_step, iter([True])

    def exits_once(*args: Any, **kwargs: Any) -> Any:
        if next(calls, False):
            raise SystemExit("once")
        return works(*args, **kwargs)

    monkeypatch.setattr(members[0].tier, "choose_step", exits_once)
    train(members, 3)
    assert [member.failures.count for member in members] == [1, 0, 0]


def test_call_that_a_process_missed_is_announced_again() -> None:
    leader, other, reads = member_that_reads_late()
    for step in range(1, train_alone(leader) + 40):
        other.arrive(step)
    reads.set()
    wait_until(lambda: bool(other.missed) and bool(leader.tier.again))
    stop([leader, other])
    assert other.missed == leader.tier.again == leader.saved
    assert other.saved == []


def test_process_that_stops_reads_what_was_announced() -> None:
    """The others wait for its part of the save."""
    leader, other, reads = member_that_reads_late()
    for step in range(1, train_alone(leader) + 1):
        other.arrive(step)
    leader.announcements.stop()
    threading.Timer(0.1, reads.set).start()
    stop([other])
    assert other.missed == leader.saved


def test_process_that_ends_first_waits_for_the_last_announcement() -> None:
    """The leader announces steps that this process has passed, until the leader ends too."""
    service = MemoryService(2)
    leader, other = Member(service.member(0)), Member(service.member(1))
    for step in range(1, 1000):
        other.arrive(step)
    ends = threading.Thread(target=other.announcements.stop, args=(LONG_S,))
    ends.start()
    train_alone(leader)
    assert ends.is_alive()
    leader.announcements.stop()
    ends.join(LONG_S)
    assert not ends.is_alive()
    assert other.missed == leader.saved


def due_of(coordinator: MemoryCoordinator) -> DueSaves:
    failures, plan = Failures(), plan_saves(datetime.timedelta(seconds=0.01))
    schedules: dict[TierName, TierSchedule] = {LOCAL: TierSchedule(LOCAL, plan, failures)}
    return DueSaves(schedules, coordinator, failures, lambda *_: None, timeout_s=LONG_S)


def test_start_again_ends_a_list_that_was_not_stopped() -> None:
    """As of a leader whose restore was refused: the others read the list to its end."""
    service = MemoryService(2)
    leader, other = due_of(service.member(0)), due_of(service.member(1))
    for due in (leader, other):
        due.inspect(1, preempted=False)
    leader.start_again(3)
    ends = threading.Thread(target=other.stop, args=(LONG_S,))
    ends.start()
    ends.join(LONG_S / 2)
    assert not ends.is_alive()
    other.start_again(3)
    assert leader.name == other.name == "announced/3"
    for due in (leader, other):
        due.stop()


def test_each_process_saves_or_is_late_under_any_schedule() -> None:
    told = printed(SCHEDULES, 25, env={"PYTHONHASHSEED": "0"})
    assert "again" in told
    assert "missed" in told


def test_keys_are_bounded() -> None:
    service = MemoryService(2)
    members = members_of(service)
    train(members, 60)
    assert len(service.values) <= 40
