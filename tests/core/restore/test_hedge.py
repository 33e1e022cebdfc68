"""Which reads are asked for once more: those far behind the others, within a bound."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.limits import MAX_HEDGED_SHARE, MAX_HEDGED_SHARE_WHEN_IDLE
from emergency_ckpt.core.restore.hedge import PATIENCE_S, ReadsInFlight

MIB = 1 << 20


def behind_at(reads: ReadsInFlight[str], now_s: float) -> list[str]:
    """Return those that are asked for once more now."""
    return [name for name in reads.names() if reads.behind(name, now_s) is not None]


def four_peers(rates: dict[str, float], until_s: float) -> tuple[float, list[str]] | None:
    """Let peers send 400 MB each, in pieces of 4 MiB; return when some are behind, and which."""
    reads = ReadsInFlight[str]()
    for name in rates:
        reads.begin(name, 400_000_000, 0.0, piece_bytes=4 * MIB)
    for tick in range(1, int(until_s * 10)):
        now_s = tick / 10
        for name, rate in rates.items():
            came = min(400_000_000, int(rate * now_s) // (4 * MIB) * 4 * MIB)
            reads.saw(name, came, came, now_s)
        if found := behind_at(reads, now_s):
            return now_s, found
    return None


def test_peer_at_a_tenth_of_the_rate_is_behind_soon() -> None:
    found = four_peers({"a": 100e6, "b": 90e6, "c": 110e6, "slow": 10e6}, 4.0)
    assert found is not None
    assert found[1] == ["slow"]
    assert PATIENCE_S < found[0] < 2.0


def test_peer_that_never_answers_is_behind() -> None:
    found = four_peers({"a": 100e6, "b": 100e6, "mute": 0}, 4.0)
    assert found is not None
    assert found[1] == ["mute"]


@pytest.mark.parametrize("rate", [1e6, 10e6, 100e6])
def test_peers_that_are_slow_alike_are_not_behind(rate: float) -> None:
    rates = {str(number): rate * (1 + number / 10) for number in range(5)}
    assert four_peers(rates, 4.0 if rate > 1e7 else 30.0) is None


def test_half_the_rate_is_not_behind() -> None:
    assert four_peers({"a": 100e6, "b": 100e6, "half": 50e6}, 4.0) is None


def test_read_that_stops_half_way_is_behind() -> None:
    reads = ReadsInFlight[str]()
    reads.begin("stops", 400 * MIB, 0.0, piece_bytes=4 * MIB)
    reads.begin("other", 400 * MIB, 0.0, piece_bytes=4 * MIB)
    for now_s in range(1, 11):
        reads.saw("other", now_s * 40 * MIB, 0, now_s)
        reads.saw("stops", min(now_s, 5) * 40 * MIB, 160 * MIB, now_s)
        found = reads.behind("stops", now_s)
        if now_s < 7:
            assert found is None
        else:
            break
    assert found is not None
    assert found.again_bytes == 44 * MIB, "what came, but for what is kept, and a piece"
    assert "209715200 of 419430400 bytes in 7.0 s, none for 2.0 s" in found.reason


def test_stalled_object_is_behind_once_by_what_others_took() -> None:
    reads = ReadsInFlight[int]()
    for number in range(24):
        reads.begin(number, 64 * MIB, 0.0)
    for number in range(23):
        reads.end(number, 0.5)
    assert reads.behind(23, 1.5) is None
    assert reads.behind(23, 1.7) is not None
    assert reads.behind(23, 100.0) is None, "it was asked for twice already"
    assert reads.hedged_bytes == 64 * MIB


def test_last_read_is_not_measured_by_the_wait_of_others() -> None:
    """All were asked for at once, and ended one by one: the last would have by now."""
    reads = ReadsInFlight[int]()
    for number in range(32):
        reads.begin(number, 16 * MIB, 0.0)
    for number in range(31):
        assert behind_at(reads, number * 0.28) == []
        reads.end(number, number * 0.28 + 0.28)
    assert reads.behind(31, 8.68 + 1.5) is None
    assert reads.behind(31, 8.68 + 2.0) is not None


def test_small_reads_are_no_measure_that_a_large_one_is_late() -> None:
    reads = ReadsInFlight[str]()
    for number in range(100):
        reads.begin(f"small{number}", 1000, 0.0)
        reads.end(f"small{number}", 0.05)
    reads.begin("large", 64 * MIB, 0.05)
    assert reads.behind("large", 2.0) is None
    assert reads.behind("large", 15.0) is not None


def test_read_without_another_is_compared_with_a_low_rate() -> None:
    reads = ReadsInFlight[str]()
    reads.begin("only", 0, 0.0)
    assert reads.behind("only", 1.7) is None
    found = reads.behind("only", 1.9)
    assert found is not None
    assert found.reason.endswith("no other to compare with")


def test_reads_of_which_none_has_ended_share_a_low_rate() -> None:
    """Storage that gives all of them 8 MB/s lets the first of 24 wait for seconds."""
    reads = ReadsInFlight[int]()
    for number in range(24):
        reads.begin(number, 2 * MIB, 0.0)
    assert behind_at(reads, 8.0) == []


def test_bytes_that_come_twice_are_bounded() -> None:
    """Half of the reads are late; as many as the bound allows are asked for, and one."""
    reads = ReadsInFlight[int]()
    for number in range(1000):
        reads.begin(number, MIB, 0.0)
    for number in range(500):
        reads.end(number, 0.1)
    reads.begin(1000, MIB, 4.9)
    assert behind_at(reads, 5.0)
    bound = MAX_HEDGED_SHARE * 1001 * MIB
    assert bound <= reads.hedged_bytes <= bound + MIB
    assert not behind_at(reads, 5.1)


def test_bound_is_wider_when_all_else_has_ended() -> None:
    reads = ReadsInFlight[int]()
    for number in range(100):
        reads.begin(number, MIB, 0.0)
    for number in range(94):
        reads.end(number, 0.1)
    reads.begin(100, MIB, 1.9)
    assert len(behind_at(reads, 2.0)) == 4
    reads.end(100, 2.1)
    assert behind_at(reads, 3.0) == []
    assert len(behind_at(reads, 3.7)) == 2
    assert reads.hedged_bytes <= MAX_HEDGED_SHARE_WHEN_IDLE * 100 * MIB


def test_small_reads_that_are_asked_again_are_bounded() -> None:
    reads = ReadsInFlight[int]()
    for number in range(1000):
        reads.begin(number, 0, 0.0)
    reads.end(0, 0.1)
    assert len(behind_at(reads, 5.0)) == 100
    assert reads.hedged_bytes == 0


def test_stalled_reads_are_asked_for_beyond_the_bound() -> None:
    """A read that never ends must not decide when the whole does."""
    reads = ReadsInFlight[int]()
    for number in range(4):
        reads.begin(number, 64 * MIB, 0.0)
    reads.end(0, 0.5)
    assert behind_at(reads, 5.0) == [1]
    assert behind_at(reads, 9.9) == []
    assert behind_at(reads, 10.1) == [2, 3]


def test_read_that_was_given_up_is_no_measure() -> None:
    reads = ReadsInFlight[str]()
    reads.begin("cut", 64 * MIB, 0.0)
    reads.end("cut", 60.0, is_complete=False)
    reads.begin("next", 0, 60.0)
    assert reads.behind("next", 62.0) is not None
