"""The beats of processes at one piece of work, and who is named when they end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from memory_coordination import MemoryService, everywhere

from emergency_ckpt.cluster.beats import Beats
from emergency_ckpt.cluster.coordination import LocalCoordinator
from emergency_ckpt.cluster.round import Round
from emergency_ckpt.core.stall import TimeLimits
from emergency_ckpt.errors import CoordinationError, DeadlineExceeded
from emergency_ckpt.work_progress import WorkProgress

LIMITS = TimeLimits(1.0, 60.0)
NAME = "restore/0/beats"


class Member:
    """One process at the work, and what it told."""

    def __init__(self, coordinator: Any) -> None:
        self.progress = WorkProgress(LIMITS)
        self.told: list[dict[str, Any]] = []
        self.beats = Beats(
            coordinator,
            NAME,
            self.progress,
            LIMITS,
            self.told.append,
            is_leader=coordinator.process_index == 0,
        )

    def work_for(self, seconds: float) -> None:
        """Move bytes in small parts."""
        self.progress.begin("load", 1000)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.progress.add(10)
            time.sleep(0.05)
        self.progress.begin("")


def meet(service: MemoryService, process: int, work: Any) -> bytes:
    """Do ``work``, and meet the others, which are looked at meanwhile."""
    coordinator = service.member(process)
    member = Member(coordinator)

    def absent(processes: Any) -> Any:
        member.beats.check(processes)
        return {}

    with member.beats:
        held = Round(coordinator, "status", 60.0, absent=absent, prompt=True)
        work(member)
        return held.hold(b"done", held.when_all(lambda _: b"all"))


def test_slow_work_is_waited_for_beyond_the_limit() -> None:
    service = MemoryService(3)
    slow_s = 3 * LIMITS.stall_s

    def one(process: int) -> bytes:
        return meet(service, process, lambda m: m.work_for(slow_s if process == 2 else 0.0))

    assert everywhere(3, one) == [b"all"] * 3


def test_process_that_tells_no_more_is_named_to_all() -> None:
    service = MemoryService(3)

    def stop(member: Member) -> None:
        member.work_for(0.6)
        member.beats.__exit__(None, None, None)  # as if it were frozen
        time.sleep(8 * LIMITS.stall_s)

    def one(process: int) -> bytes:
        return meet(service, process, stop if process == 2 else lambda m: m.work_for(0.0))

    seen = everywhere(3, one)
    for error in seen[:2]:
        assert isinstance(error, DeadlineExceeded), seen
        assert error.missing == ("process 2",)
        assert "process 2 has sent nothing" in str(error)
        assert str(error).count("missing: process 2") == 1


def test_leader_tells_who_is_slowest_and_all_tell_the_end() -> None:
    service = MemoryService(2)
    members = [Member(service.member(process)) for process in range(2)]
    with members[0].beats, members[1].beats:
        members[0].progress.begin("load", 100)
        members[1].progress.begin("load", 4000)
        members[1].progress.add(10)
        time.sleep(1.2 * LIMITS.stall_s)
    told = [each for each in members[0].told if each["doing"] == "load"]
    assert told[-1]["bytes_left"] == 100
    assert (told[-1]["slowest"], told[-1]["slowest_bytes_left"]) == (0, 100) or (
        told[-1]["slowest"],
        told[-1]["slowest_bytes_left"],
    ) == (1, 3990)
    assert all("slowest" not in each for each in members[1].told)
    for member in members:
        assert (member.told[-1]["doing"], member.told[-1]["bytes_left"]) == ("over", 0)


def test_short_work_leaves_no_key_and_tells_nothing() -> None:
    service = MemoryService(2)
    member = Member(service.member(1))
    with member.beats:
        member.work_for(0.1)
    assert service.values == {}
    assert member.told == []


def test_process_alone_needs_no_service() -> None:
    member = Member(LocalCoordinator())
    with member.beats:
        member.work_for(0.6)
    member.beats.check([0])
    assert [each["doing"] for each in member.told][-1:] in ([], ["over"])


@pytest.mark.parametrize("value", [b"", b"[1]", b'[1,[1,"load",2,3,"x"]]', b"[" * 5000])
def test_beat_that_is_none_ends_the_wait(value: bytes) -> None:
    service = MemoryService(2)
    service.member(1).replace(f"{NAME}/1", value)
    with pytest.raises(CoordinationError, match=r"restore/0/beats/1"):
        Member(service.member(0)).beats.check([1])


def test_service_that_does_not_answer_ends_no_work() -> None:
    """The others may name this process then; it goes on, and meets them if the service is back."""
    service = MemoryService(2)
    for _ in range(3):
        service.fail(1, "replace", NAME, CoordinationError("put", NAME, "scripted"))
    member = Member(service.member(1))
    with member.beats:
        member.work_for(1.5 * LIMITS.stall_s)
    assert f"{NAME}/1" in service.values


def test_beats_without_a_thread_leave_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(LocalCoordinator())
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "eckpt-beats":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="new thread"), member.beats:
        pass
    assert not [each.name for each in threading.enumerate() if each.name == "eckpt-clock"]
