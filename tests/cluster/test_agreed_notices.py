"""Notices where JAX's preemption service is off: one call for all; every listener hears."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from memory_coordination import MemoryService
from world import logged

from emergency_ckpt.cluster.preemption import (
    AgreedNotices,
    PreemptionWatch,
    SignalNotices,
    find_notices,
)

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

    def call_until_it_is_reached(each: AgreedNotices) -> int:
        number = each.last_number + 1
        while not each.reached(number):
            number += 1
            assert number < MOST_CALLS
            threading.Event().wait(0.001)
        return number

    with ThreadPoolExecutor(COUNT) as pool:
        numbers = list(pool.map(call_until_it_is_reached, notices))
    assert len(set(numbers)) == 1
    assert numbers[0] > ahead


@pytest.mark.parametrize("told", [b"", b"\xff", b"-1", b"1e3", b"9" * 5000])
def test_number_that_is_none_is_acted_on_by_nobody(
    monkeypatch: pytest.MonkeyPatch, told: bytes
) -> None:
    monkeypatch.setattr("emergency_ckpt.cluster.preemption._INSPECTION_S", 0.02)
    service = MemoryService(2)
    service.member(1).replace("preempt/at/1", told)
    service.member(1).replace("preempt/notice", b"")
    with logged() as lines:
        found = AgreedNotices(service.member(0), 60.0)
        found._thread.join()  # pyright: ignore[reportPrivateUsage]
        assert [found.reached(number) for number in range(1, 4)] == [False] * 3
        found.close()
    assert [line for line in lines if "'preempt/at/1'" in line]


def test_sigterm_is_heard_by_every_checkpointer_of_a_process() -> None:
    first, second = SignalNotices(), SignalNotices()
    os.kill(os.getpid(), signal.SIGTERM)
    first_heard = first.reached(1)
    first.close()
    assert first_heard
    assert second.reached(1)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "one listens still"
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_notice_after_the_last_step_is_seen_at_the_end() -> None:
    watch = PreemptionWatch(SignalNotices(), grace_s=60.0)
    try:
        assert not watch.reached(7)
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.reached_at_end()
        assert watch.sync_step == 7
    finally:
        watch.close()


def test_without_jax_service_a_source_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``jax_enable_preemption_service=False``: JAX's own call would raise."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    service = MemoryService(2)
    found = find_notices(service.member(0), 1.0)
    try:
        assert found.source == "signals, agreed"
        assert not found.reached(1)
    finally:
        found.close()
