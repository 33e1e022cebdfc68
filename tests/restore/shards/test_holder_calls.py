"""Only an answer says something about a copy; all else is asked again, elsewhere first."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from emergency_ckpt import work_progress as progress_module
from emergency_ckpt.core.stall import TimeLimits
from emergency_ckpt.errors import (
    AuthenticationFailed,
    CheckpointError,
    CorruptData,
    HolderUnreachable,
    NotHeld,
    RamdiskFull,
    TransferError,
)
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.restore import holders as holders_module
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.work_progress import WorkProgress

RESET = TransferError("fetch", "10.0.0.1:7000", "the connection failed")
ALTERED = AuthenticationFailed("fetch", "10.0.0.2:7000", "not sealed by the peer")
ABSENT = NotHeld("fetch", "10.0.0.3:7000", "not held here")
DAMAGED = CorruptData("fetch", "10.0.0.4:7000", "digest differs")


class Holders:
    """Each answers with its next scripted outcome; the last one again and again."""

    def __init__(self, **outcomes: list[CheckpointError | int | None]) -> None:
        self.left = outcomes
        self.asked: list[str] = []
        self.failed: list[str] = []
        self.events: list[Event] = []

    def ask(self, holder: str) -> int | None:
        self.asked.append(holder)
        outcomes = self.left[holder]
        outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome

    def first(self, *, deadline_s: float = math.inf, attempts: int | None = None) -> int | None:
        client: Any = None
        sink = EventSink(self.events.append, process_index=0)
        calls = HolderCalls(client, sink, WorkProgress.until(deadline_s))
        return calls.first("step 10", list(self.left), self.ask, self.fail, attempts=attempts)

    def fail(self, holder: str, _: CheckpointError) -> None:
        self.failed.append(holder)


def test_another_holder_is_asked_before_the_same_again() -> None:
    holders = Holders(a=[RESET], b=[7])
    assert holders.first() == 7
    assert (holders.asked, holders.failed) == (["a", "b"], [])
    assert [event.fields["peer"] for event in holders.events] == ["a"]


@pytest.mark.parametrize("fault", [RESET, ALTERED])
def test_holder_is_asked_again_after_faults_of_the_way(fault: CheckpointError) -> None:
    holders = Holders(a=[fault, fault, 7])
    assert holders.first() == 7
    assert (holders.asked, holders.failed) == (["a"] * 3, [])
    assert len(holders.events) == 1, "told once, not at each attempt"


@pytest.mark.parametrize("answer", [ABSENT, DAMAGED])
def test_answer_about_the_copy_is_final(answer: CheckpointError) -> None:
    holders = Holders(a=[answer, 7])
    assert holders.first() is None
    assert (holders.asked, holders.failed) == (["a"], ["a"])


def test_answer_after_a_reset_is_final() -> None:
    holders = Holders(a=[RESET, ABSENT])
    assert holders.first() is None
    assert holders.failed == ["a"]


def test_holder_that_has_no_more_is_not_asked_again() -> None:
    holders = Holders(a=[None], b=[RESET, None])
    assert holders.first() is None
    assert holders.asked == ["a", "b", "b"]


def test_silent_holder_is_named_at_the_deadline() -> None:
    holders = Holders(a=[DAMAGED], b=[RESET])
    with pytest.raises(HolderUnreachable, match=r"b: fetch 10.0.0.1:7000.*failed") as failed:
        holders.first(deadline_s=time.monotonic() + 0.5)
    assert failed.value.retryable
    assert holders.failed == ["a"]
    assert holders.asked.count("b") > 1


def test_fault_of_this_host_is_raised_as_it_is() -> None:
    holders = Holders(a=[RamdiskFull("fetch", "step 10", "no room")], b=[7])
    with pytest.raises(RamdiskFull):
        holders.first()


def test_one_attempt_asks_each_holder_once() -> None:
    holders = Holders(a=[RESET, 7], b=[RESET, 7])
    with pytest.raises(HolderUnreachable):
        holders.first(attempts=1)
    assert holders.asked == ["a", "b"]


class Clock:
    """A simulated clock: to sleep is all that takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1e6
        for module in (holders_module, progress_module):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(("gets", "longest_s"), [(False, 610.0), (True, 3700.0)])
def test_holder_that_breaks_off_is_asked_while_some_of_it_comes(
    monkeypatch: pytest.MonkeyPatch, *, gets: bool, longest_s: float
) -> None:
    """Bytes move each time, so nothing stalls; without any of what is asked for it ends."""
    clock = Clock(monkeypatch)
    progress = WorkProgress(TimeLimits(60.0, 14400.0))
    client: Any = None
    calls = HolderCalls(client, EventSink(None, process_index=0), progress)
    began_s = clock.now_s

    def ask(_: str) -> int:
        progress.add(1000)
        if gets and clock.now_s - began_s < 3000:
            calls.got_one()
        raise RESET

    with pytest.raises(HolderUnreachable, match="a: "):
        calls.first("step 10", ["a"], ask, lambda *_: None)
    assert longest_s - 120 < clock.now_s - began_s < longest_s
