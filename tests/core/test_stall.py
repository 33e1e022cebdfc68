"""Work that moves bytes goes on while they move, and has stalled when none do."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.stall import (
    USUAL_PIECE_BYTES,
    BeatLog,
    ProcessWork,
    TimeLimits,
    give_up_at_s,
    slowest,
    stall_reason,
)

USUAL = TimeLimits(60.0, 14400.0)
MB = 10**6


@pytest.mark.parametrize(
    ("now_s", "moved_s", "words"),
    [
        (60.0, 0.0, "nothing has moved for 60 s: 9.5 MiB of 95.4 MiB done"),
        (1065.0, 1000.0, "nothing has moved for 65 s"),
        (14400.0, 14399.0, "it was not done in 14400 s"),
    ],
)
def test_work_that_does_not_move_is_given_up(now_s: float, moved_s: float, words: str) -> None:
    assert give_up_at_s(moved_s, USUAL, 14400.0) <= now_s
    reason = stall_reason(now_s, moved_s, USUAL, 14400.0, done_bytes=10 * MB, total_bytes=100 * MB)
    assert words in reason


def test_work_that_moves_goes_on_until_the_total() -> None:
    """However slow it is: nobody predicts that it cannot end."""
    assert give_up_at_s(1000.0, USUAL, 14400.0) == 1060.0
    assert give_up_at_s(14399.0, USUAL, 14400.0) == 14400.0


def test_chunk_that_comes_in_one_answer_has_time_for_it() -> None:
    assert give_up_at_s(0.0, USUAL, 14400.0, USUAL_PIECE_BYTES) == 60.0
    assert 1900.0 < give_up_at_s(0.0, USUAL, 14400.0, 4 << 30) < 2200.0


@pytest.mark.parametrize(
    ("stall_s", "total_s", "patience_s"),
    [(60.0, 14400.0, 600.0), (4.0, 4.0, 4.0), (3.0, 600.0, 30.0), (600.0, 600.0, 600.0)],
)
def test_what_moves_without_bytes_has_ten_times_as_long(
    stall_s: float, total_s: float, patience_s: float
) -> None:
    assert TimeLimits(stall_s, total_s).patience_s == patience_s


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
    assert text == "process 2 has sent nothing for 60 s; last: load, 5 B of 15 B done"
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
    assert "process 2 has sent nothing for 60 s" in log.stuck([2], 360.0)[2]


def test_process_that_has_not_come_has_ten_limits() -> None:
    log = BeatLog(USUAL, 100.0)
    assert log.stuck([1], 699.0) == {}
    assert log.stuck([1], 700.0) == {1: "process 1 has not come in 600 s"}
