"""Notices at any process: one call for all; every checkpointer of a process hears."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from launch_support import wait_until
from memory_coordination import MemoryService
from world import logged

from emergency_ckpt.cluster.preemption import AgreedNotices, OwnNotices, PreemptionWatch

COUNT = 3
MOST_CALLS = 100_000


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AgreedNotices]]:
    monkeypatch.setattr("emergency_ckpt.cluster.preemption._INSPECTION_S", 0.02)
    service = MemoryService(COUNT)
    found = [AgreedNotices(service.member(p), 60.0) for p in range(COUNT)]
    yield found
    for each in found:
        each.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("ahead", [0, 3])
def test_agreed_notice_is_acted_on_at_one_call_of_all(
    notices: list[AgreedNotices], ahead: int
) -> None:
    """One process is some calls ahead when the notice comes to another one alone."""
    for number in range(1, 1 + ahead):
        assert not notices[2].reached(number)
    notices[1].notice()

    with ThreadPoolExecutor(COUNT) as pool:
        numbers = list(pool.map(call_until_it_is_reached, notices))
    assert len(set(numbers)) == 1
    assert numbers[0] > ahead


def call_until_it_is_reached(each: AgreedNotices) -> int:
    number = each.last_number + 1
    while not each.reached(number):
        number += 1
        assert number < MOST_CALLS
        threading.Event().wait(0.001)
    return number


def agree(found: list[AgreedNotices]) -> set[int]:
    """The numbers at which they act on a notice of the last one."""
    found[-1].notice()
    with ThreadPoolExecutor(len(found)) as pool:
        numbers = set(pool.map(call_until_it_is_reached, found))
    for each in found:
        each.close()
    return numbers


@pytest.mark.parametrize("told", [b"", b"\xff", b"-1", b"1e3", b"9" * 5000, None])
def test_process_without_an_answer_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch, told: bytes | None
) -> None:
    """It is gone (None), or a stranger has damaged its number."""
    monkeypatch.setattr("emergency_ckpt.cluster.preemption._INSPECTION_S", 0.02)
    service = MemoryService(COUNT)
    if told is not None:
        service.member(2).replace("preempt/at/2", told)
    with logged() as lines:
        assert len(agree([AgreedNotices(service.member(process), 0.3) for process in (0, 1)])) == 1
    assert [line for line in lines if "no answer from processes [2]" in line]
    assert bool([line for line in lines if "'preempt/at/2'" in line]) == (told is not None)


@pytest.mark.parametrize("ended", range(COUNT))
@pytest.mark.parametrize("is_told", [False, True])
def test_notice_after_an_ended_loop_is_acted_on_by_nobody(
    notices: list[AgreedNotices], ended: int, is_told: bool
) -> None:
    """Nobody waits for it either: the leader's patience is a minute here."""
    others = [each for process, each in enumerate(notices) if process != ended]
    assert not notices[ended].reached(1)
    if not is_told:
        notices[ended].end()
        notices[ended].close()
    others[0].notice()
    if is_told:
        wait_until(lambda: others[0].noticed_s > 0, "the notice is known")
        notices[ended].end()
    with ThreadPoolExecutor(COUNT) as pool:
        assert not any(pool.map(lambda each: each.reached(2), others))
        wait_until(lambda: all(each.noticed_s for each in others), "the notice is known to all")
        assert not any(pool.map(lambda each: each.reached(3), others))


def test_late_leader_acts_where_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emergency_ckpt.cluster.preemption._INSPECTION_S", 0.02)
    service = MemoryService(COUNT)
    numbers = agree([AgreedNotices(service.member(process), 0.2) for process in (1, 2)])
    late = AgreedNotices(service.member(0), 0.2)  # its thread looks for the first time
    assert agree([late]) == numbers


def test_notice_that_jax_has_taken_is_one_for_all(
    notices: list[AgreedNotices], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emergency_ckpt.cluster.preemption.jax_has_notice", lambda: True)
    with ThreadPoolExecutor(COUNT) as pool:
        assert len(set(pool.map(call_until_it_is_reached, notices))) == 1


def test_sigterm_is_heard_by_every_checkpointer_of_a_process() -> None:
    first, second = OwnNotices(), OwnNotices()
    os.kill(os.getpid(), signal.SIGTERM)
    first_heard = first.reached(1)
    first.close()
    assert first_heard
    assert second.reached(1)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "one listens still"
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_notice_after_the_last_step_is_seen_at_the_end() -> None:
    watch = PreemptionWatch(OwnNotices(), grace_s=60.0)
    try:
        assert not watch.reached(7)
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.reached_at_end()
        assert watch.sync_step == 7
    finally:
        watch.close()
