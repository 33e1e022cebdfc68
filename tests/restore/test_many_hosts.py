"""A cold restore of many hosts, with a simulated clock and no bytes: 5 TB over 176 hosts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from emergency_ckpt import work_progress as module
from emergency_ckpt.config import Config
from emergency_ckpt.core.stall import BeatLog, slowest
from emergency_ckpt.work_progress import WorkProgress

HOSTS = 176
SHARE_BYTES = 5 * 10**12 // HOSTS
RATE = 22 * 10**6
TICK_S = 5.0
LIMITS = Config(run_id="run").time_limits


class Hosts:
    """The progress of each host, and what the first of them hears of the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1e6
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(module, "time", clock)
        self.begun_s = self.now_s
        self.works = [WorkProgress(LIMITS) for _ in range(HOSTS)]
        self.left = [SHARE_BYTES] * HOSTS
        self.heard = BeatLog(LIMITS, self.now_s)
        self.ended: dict[int, tuple[float, str]] = {}
        self.beat_s = self.now_s
        for each in self.works:
            each.begin("load", SHARE_BYTES)

    @property
    def spent_s(self) -> float:
        return self.now_s - self.begun_s

    def tick(self, rates: dict[int, float], mute: int | None = None) -> None:
        """Let bytes come for a while, at the usual rate where ``rates`` has no other one."""
        self.now_s += TICK_S
        for host, each in enumerate(self.works):
            nbytes = min(self.left[host], round(rates.get(host, RATE) * TICK_S))
            if nbytes:
                self.left[host] -= nbytes
                each.add(nbytes)
                if not self.left[host]:
                    each.begin("")  # it waits for the others
            if self.left[host] and host not in self.ended and self.now_s >= each.deadline_s:
                text = str(each.error("read", "step 7", "storage did not deliver in time"))
                self.ended[host] = (self.spent_s, text)
        if self.now_s - self.beat_s >= LIMITS.beat_s:
            self.beat_s = self.now_s
            for host in range(1, HOSTS):
                if host != mute:
                    number = round(self.spent_s)
                    self.heard.note(host, number, self.works[host].work, self.now_s)

    def stuck(self) -> dict[int, str]:
        return self.heard.stuck(range(1, HOSTS), self.now_s)


def test_steady_reading_of_all_hosts_is_never_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    while any(hosts.left):
        hosts.tick({17: RATE / 3})
        assert hosts.ended == {}
        if hosts.spent_s % 4 == 0:
            assert hosts.stuck() == {}
        if hosts.spent_s == 900.0:
            assert slowest(hosts.heard.works) == 17
            assert hosts.heard.works[3].rate == pytest.approx(RATE, rel=0.05)
            assert hosts.heard.works[17].left_s == pytest.approx(2973, rel=0.05)
    assert 3600 < hosts.spent_s < 4000


def test_stuck_read_of_one_host_ends_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    while hosts.spent_s < 400.0:
        hosts.tick({})
    while not hosts.ended:
        hosts.tick({17: 0.0})
    ((host, (spent_s, text)),) = hosts.ended.items()
    assert host == 17
    assert 455.0 <= spent_s <= 465.0
    assert "nothing has moved for 60 s: 8.2 GiB of 26.5 GiB done" in text
    assert hosts.stuck() == {}, "it has said so itself"


def test_host_that_freezes_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    while hosts.spent_s < 400.0:
        hosts.tick({})
    while not hosts.stuck():
        hosts.tick({17: 0.0}, mute=17)
    assert hosts.spent_s <= 400.0 + LIMITS.stall_s + LIMITS.beat_s
    assert list(hosts.stuck()) == [17]
    assert "process 17 has sent nothing" in hosts.stuck()[17]
