"""The decision on work that moves bytes: it goes on, has stalled, or cannot end in time."""

from __future__ import annotations

import math

import pytest

from emergency_ckpt.core.stall import (
    FIRST_WINDOW_BYTES,
    BeatLog,
    Move,
    ProcessWork,
    decide_progress,
    slowest,
    time_limits,
    window_bytes,
)

USUAL = time_limits(None, 14400.0)
MB = 10**6


def steady(rate: float, until_s: int) -> list[Move]:
    """Bytes that come at ``rate`` every five seconds."""
    return [Move(float(at), round(rate * at)) for at in range(0, until_s + 1, 5)]


@pytest.mark.parametrize(
    ("now_s", "samples", "total", "kind", "words"),
    [
        (5.0, [Move(0, 0)], 100 * MB, "go_on", ""),
        (59.0, [Move(0, 0)], 100 * MB, "go_on", ""),
        (60.0, [Move(0, 0)], 100 * MB, "stalled", "nothing has moved for 60 s: 0 B of 95.4 MiB"),
        (1000.0, steady(22 * MB, 1000), 28400 * MB, "go_on", ""),
        (1065.0, steady(22 * MB, 1000), 28400 * MB, "stalled", "for 65 s: 20.5 GiB of 26.4 GiB"),
        # A second's worth every 50 s is slow, and no stall; it takes five limits to tell the rate.
        (250.0, steady(MB, 250), 28400 * MB, "go_on", ""),
        (
            300.0,
            steady(MB, 300),
            28400 * MB,
            "too_slow",
            "976.6 KiB/s it cannot end in the 14100 s",
        ),
        (300.0, steady(2 * MB, 300), 28400 * MB, "go_on", ""),
        # A slow while after a fast one is no reason: the better of both counts.
        (1500.0, [*steady(22 * MB, 1195), Move(1499, 26400 * MB)], 28400 * MB, "go_on", ""),
        (14400.0, steady(22 * MB, 14400), 10**12, "too_slow", "it was not done in 14400 s"),
        (300.0, [Move(0, 0), Move(299, 100)], 100, "go_on", ""),
    ],
)
def test_progress_is_judged_by_moves_and_by_rate(
    now_s: float, samples: list[Move], total: int, kind: str, words: str
) -> None:
    decision = decide_progress(now_s, samples, total, USUAL, 14400.0)
    assert decision.kind == kind
    assert words in decision.reason
    assert bool(decision.reason) == (kind != "go_on")


def test_chunk_that_comes_in_one_answer_has_time_for_it() -> None:
    begun, total = [Move(0, 0)], 4 << 30
    for now_s, kind in ((1900.0, "go_on"), (2200.0, "stalled")):
        assert decide_progress(now_s, begun, 0, USUAL, 14400.0, total).kind == kind
    assert decide_progress(61.0, begun, 0, USUAL, 14400.0, FIRST_WINDOW_BYTES).kind == "stalled"


def test_rate_is_that_of_the_last_stall_limits() -> None:
    samples = [*steady(22 * MB, 1000), Move(1299.0, 22000 * MB)]
    assert decide_progress(1300.0, samples, 0, USUAL, 14400.0).rate == pytest.approx(0.0, abs=1)
    assert decide_progress(1000.0, samples[:-1], 0, USUAL, 14400.0).rate == pytest.approx(22 * MB)


@pytest.mark.parametrize(
    ("stall_s", "total_s", "expected"),
    [(None, 14400.0, 60.0), (None, 4.0, 4.0), (3.0, 600.0, 3.0), (600.0, 600.0, 600.0)],
)
def test_stall_limit_is_never_above_the_total(
    stall_s: float | None, total_s: float, expected: float
) -> None:
    limits = time_limits(stall_s, total_s)
    assert limits.stall_s == expected
    assert expected <= limits.patience_s <= total_s


def test_as_much_is_asked_for_as_comes_well_within_the_limit() -> None:
    assert window_bytes(0.0, USUAL, 2 << 30) == FIRST_WINDOW_BYTES
    assert window_bytes(22e6, USUAL, 2 << 30) == 330 * MB
    assert window_bytes(1e9, USUAL, 2 << 30) == 2 << 30
    assert window_bytes(22e6, USUAL, 100) == 100
    assert window_bytes(0.0, time_limits(math.inf, math.inf), 2 << 30) == 2 << 30


def work(moves: int, doing: str = "load", left: int = 10, rate: float = 1.0) -> ProcessWork:
    return ProcessWork(moves, doing, 5, left, rate)


def test_slowest_is_who_will_take_longest() -> None:
    assert slowest({}) is None
    assert slowest({0: work(1, left=0), 1: work(1, left=0)}) is None
    assert slowest({0: work(1, left=90), 1: work(1, left=80, rate=0.5), 2: work(1)}) == 1
    assert slowest({0: work(1, left=90), 1: work(1, rate=0.0)}) == 1
    assert slowest({3: work(1), 1: work(1)}) == 1


def test_process_that_tells_nothing_any_more_is_named() -> None:
    log = BeatLog(USUAL, 0.0)
    for beat in range(4):
        log.note(1, beat, work(beat), 15.0 * beat)
        log.note(2, 0, work(beat), 15.0 * beat)
        assert log.stuck([1, 2], 15.0 * beat) == {}
    log.note(1, 4, work(4), 60.0)
    assert list(log.stuck([1, 2], 60.0)) == [2]
    text = log.stuck([1, 2], 60.0)[2]
    assert text == "process 2 gives no sign of life since 60 s; last: load, 5 B of 15 B done"
    assert log.stuck([1], 60.0) == {}


@pytest.mark.parametrize("doing", ["load", ""])
def test_process_whose_work_stands_still_is_named(doing: str) -> None:
    """What ends it is its own watch, so it has time; who waits for others stands still."""
    log = BeatLog(USUAL, 0.0)
    for beat in range(100):
        log.note(1, beat, work(7, doing), 15.0 * beat)
        found = log.stuck([1], 15.0 * beat)
        assert bool(found) == (bool(doing) and 15.0 * beat >= 600), beat
    assert ("is stuck since" in str(found)) == bool(doing)


def test_process_that_has_come_has_one_limit_for_its_first_beat() -> None:
    log = BeatLog(USUAL, 0.0)
    log.note(1, 3, work(1), 290.0)
    log.came([1, 2], 300.0)
    assert log.stuck([1, 2], 349.0) == {}
    assert list(log.stuck([1, 2], 355.0)) == [1]
    assert "process 2 gives no sign of life since 60 s" in log.stuck([2], 360.0)[2]


def test_process_that_has_not_come_has_ten_limits() -> None:
    log = BeatLog(USUAL, 100.0)
    assert log.stuck([1], 699.0) == {}
    assert log.stuck([1], 700.0) == {1: "process 1 has not come in 600 s"}
