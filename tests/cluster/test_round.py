"""Rounds and cells: one answer for all, errors of the leader told, waits that end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from memory_coordination import MemoryCoordinator, MemoryService, everywhere
from places import VERIFICATION
from programs import printed

from emergency_ckpt.cluster import Cell, Coordinator, LeftProcesses, Round, Rule, Series
from emergency_ckpt.cluster.left_processes import have_left, leaving
from emergency_ckpt.cluster.round import agree, run_on_all
from emergency_ckpt.errors import (
    CheckpointError,
    CoordinationError,
    DeadlineExceeded,
    DirectoryInUse,
    PeerLeft,
)

SCHEDULES = VERIFICATION / "simulation" / "round_schedules.py"
LONG_S = 120.0


def together(
    service: MemoryService, hold: Callable[[Round, int], bytes], **more: bool
) -> list[bytes | Exception]:
    """What each process's part of one round returns or raises."""

    def one(process: int) -> bytes:
        return hold(Round(service.member(process), "round", LONG_S, **more), process)

    return everywhere(service.process_count, one)


def sum_of(said: Mapping[int, bytes]) -> bytes:
    return str(sum(map(int, said.values()))).encode()


def named(processes: Collection[int]) -> bytes:
    """Each of some processes by its number, in one value."""
    return b" ".join(b"%d" % process for process in processes)


def test_answers_to_many_lie_in_few_keys() -> None:
    service = MemoryService(20)
    ends = together(
        service,
        lambda held, me: held.hold(b"", held.when_all(lambda _: named)),
        grouped=True,
    )
    assert [len(ends[process].split()) for process in (0, 1, 8, 16)] == [1, 7, 8, 4]
    assert all(b"%d" % process in ends[process].split() for process in range(20))
    assert len([key for key in service.values if "told" in key]) == 3


class SpokenAtTheLook(MemoryCoordinator):
    """The leader's coordinator: a member speaks right after a wait for it has ended in vain."""

    def __init__(self, service: MemoryService) -> None:
        super().__init__(service, 0)
        self.member = service.member(1)

    def get(self, key: str, timeout_s: float) -> bytes:
        self.member.put(key, b"1")
        raise DeadlineExceeded("wait for", key, f"not set within {timeout_s:g} s")


def test_rule_is_asked_no_more_once_it_has_answered() -> None:
    """Else the leader acts by its first answer, and tells the others another one."""
    answers = [b"first", b"second"]
    held = Round(SpokenAtTheLook(MemoryService(2)), "round", LONG_S)
    assert held.hold(b"0", held.when_all(lambda _: answers.pop(0))) == b"first"
    assert answers == [b"second"]


def test_long_answers_lie_apart() -> None:
    service = MemoryService(20)

    def long(processes: Collection[int]) -> bytes:
        return b" ".join(b"%d" % p * (10_000 if 8 <= p < 16 else 1) for p in processes)

    hold = lambda held, me: held.hold(b"", held.when_all(lambda _: long))  # noqa: E731
    ends = together(service, hold, grouped=True)
    assert [end for process, end in enumerate(ends) if 8 <= process < 16] == [
        long([process]) for process in range(8, 16)
    ]
    assert ends[1] == named(range(1, 8))
    own = [key for key in service.values if "told/own" in key]
    assert sorted(int(key.rpartition("/")[2]) for key in own) == list(range(8, 16))


def test_answer_of_a_leader_that_failed_on_the_way_counts_not() -> None:
    service = MemoryService(3)
    service.member(0).put("round.told/own/1", b"an answer")
    Round(service.member(0), "round", LONG_S, grouped=True).fail(OSError("no room"))
    with pytest.raises(CoordinationError, match="no room"):
        Round(service.member(1), "round", LONG_S, grouped=True).learn()


def test_value_that_is_no_answer_is_an_error() -> None:
    service = MemoryService(3)
    service.member(0).put("round.told/0", b"damaged")
    with pytest.raises(CoordinationError, match=r"round\.told/0, process 0"):
        Round(service.member(1), "round", LONG_S, grouped=True).learn()


def test_keys_of_a_series_are_those_of_its_last_round() -> None:
    service = MemoryService(3)
    every = [Series() for _ in range(3)]

    def hold(number: int, me: int) -> bytes:
        member = service.member(me)
        said = Round(member, f"{number}/said", LONG_S, series=every[me])
        told = Round(member, f"{number}/told", LONG_S, grouped=True, series=every[me])
        total = said.hold(b"%d" % me, said.when_all(sum_of))
        return told.tell(lambda _: total) if me == 0 else told.learn()

    counts: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        for number in range(20):
            ends = list(pool.map(lambda me, n=number: hold(n, me), range(3)))
            assert ends == [b"3"] * 3
            counts.append(len(service.values))
    assert max(counts) == counts[0], "three values, the sum of them, and an answer for each"
    assert all(key.startswith("19/") for key in service.values)


def test_rule_may_answer_before_all_have_spoken() -> None:
    service = MemoryService(3)
    rule: Rule = lambda said, absent: b"no" if b"error" in said.values() else None  # noqa: E731
    Round(service.member(2), "round", LONG_S).say(b"error")
    assert Round(service.member(0), "round", LONG_S).hold(b"fine", rule) == b"no"
    assert Round(service.member(1), "round", LONG_S).learn() == b"no"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("spoil", ["rule", "reading"])
def test_error_of_the_leader_is_told_to_all(spoil: str, grouped: bool) -> None:
    service = MemoryService(3)
    if spoil == "reading":
        service.fail(0, "list", "round", CoordinationError("list", "round", "it is damaged"))

    def damaged(said: Mapping[int, bytes]) -> bytes:
        raise ValueError(f"{len(said)} values: it is damaged")

    ends = together(
        service, lambda held, me: held.hold(b"", held.when_all(damaged)), grouped=grouped
    )
    assert "it is damaged" in str(ends[0])
    for end in ends[1:]:
        assert isinstance(end, CoordinationError)
        assert "process 0 failed" in str(end)
        assert "it is damaged" in str(end)


STRANGE = "no record in caf\udce9.tfrecord"
"""With the name of a file that is not UTF-8, as ``os.listdir`` returns it."""
WRITTEN = "no record in caf\\udce9.tfrecord"


def test_error_that_is_no_unicode_is_told_to_all() -> None:
    def fail(said: Mapping[int, bytes]) -> bytes:
        raise ValueError(STRANGE)

    first, second = together(MemoryService(2), lambda held, _: held.hold(b"", held.when_all(fail)))
    assert isinstance(first, ValueError)
    assert isinstance(second, CoordinationError)
    assert second.problem == f"process 0 failed: unexpected ValueError: {WRITTEN}"


def test_agreed_errors_that_are_no_unicode_are_told_to_all() -> None:
    service = MemoryService(2)

    def say(process: int) -> str:
        return agree(service.member(process), "errors", STRANGE if process else "", LONG_S)

    assert everywhere(2, say) == [f"process 1: {WRITTEN}"] * 2


class Counted:
    """A number that goes on alike."""

    last_number = 0

    def go_on_from(self, number: int) -> None:
        self.last_number = number


def test_failed_work_that_is_no_unicode_is_told_to_all() -> None:
    service = MemoryService(2)

    def work(process: int) -> None:
        if process:
            raise DirectoryInUse("save in", STRANGE, STRANGE, hint=STRANGE)

    def run(process: int) -> str:
        member = service.member(process)
        return run_on_all(member, "ready", lambda: work(process), Counted(), LONG_S)

    first, second = everywhere(2, run)
    assert isinstance(second, DirectoryInUse)
    assert isinstance(first, DirectoryInUse)
    assert (first.target, first.problem, first.hint) == (WRITTEN,) * 3


def test_reason_of_leaving_that_is_no_unicode_is_told() -> None:
    service = MemoryService(2)
    left_processes = LeftProcesses(service.member(1))
    left_processes.leave(STRANGE, {})
    assert leaving(service.member(0)) == {1: f"process 1 has left: {WRITTEN}"}
    left_processes.gone(STRANGE)
    assert have_left(service.member(0), [1]) == {1: f"process 1 has left: {WRITTEN}"}


def test_rule_that_waits_when_all_have_spoken_is_an_error_on_all() -> None:
    ends = together(MemoryService(2), lambda held, _: held.hold(b"", lambda said, absent: None))
    assert all(isinstance(end, CoordinationError) for end in ends)


def test_member_that_left_ends_the_round_on_all() -> None:
    service = MemoryService(3)
    LeftProcesses(service.member(2)).gone("it has ended")

    def hold(held: Round, me: int) -> bytes:
        return b"" if me == 2 else held.hold(b"", held.when_all(sum_of))

    ends = together(service, hold)
    for end in ends[:2]:
        assert isinstance(end, PeerLeft)
        assert "process 2 has left: it has ended" in str(end)


def test_member_that_spoke_and_left_counts() -> None:
    service = MemoryService(2)
    Round(service.member(1), "round", LONG_S).say(b"1")
    LeftProcesses(service.member(1)).gone("it has ended")
    held = Round(service.member(0), "round", LONG_S)
    assert held.hold(b"0", held.when_all(sum_of)) == b"1"


def test_answer_about_many_absent_members_is_short() -> None:
    """All members read the answer, so it must not grow with their number."""
    service = MemoryService(10_000)
    round_of = lambda process: Round(service.member(process), "round", 0.0)  # noqa: E731
    with pytest.raises(DeadlineExceeded) as at_leader:
        round_of(0).hold(b"", round_of(0).when_all(sum_of))
    assert at_leader.value.missing == tuple(f"process {p}" for p in range(1, 10_000))
    assert len(service.values["round.told"]) < 1000
    with pytest.raises(DeadlineExceeded) as elsewhere:
        round_of(1).learn()
    assert elsewhere.value.missing == at_leader.value.missing[:16]
    assert elsewhere.value.more == 9_999 - 16
    problem = "not all processes came within 0 s; missing: process 1, process 2, "
    assert elsewhere.value.problem.startswith(problem)
    assert elsewhere.value.problem.endswith(", process 16 and 9983 more")
    Round(service.member(0), "outer", 0.0).fail(elsewhere.value)  # a rule may ask another round
    assert service.values["outer.told"] == service.values["round.told"]


def test_leader_that_left_ends_the_wait() -> None:
    service = MemoryService(2)
    LeftProcesses(service.member(0)).gone("it has ended")
    with pytest.raises(PeerLeft, match="process 0 has left"):
        Round(service.member(1), "round", LONG_S).learn()


class Unheard(MemoryCoordinator):
    """Loses the reply of each first ``put``."""

    def put(self, key: str, value: bytes) -> None:
        super().put(key, value)
        raise CoordinationError("put", key, "no reply")


def test_lost_replies_change_nothing() -> None:
    service = MemoryService(2)
    members: list[Coordinator] = [Unheard(service, process) for process in range(2)]

    def one(process: int) -> bytes:
        held = Round(members[process], "round", LONG_S)
        return held.hold(b"%d" % process, held.when_all(sum_of))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [b"1", b"1"]


def test_cell_that_cannot_be_set_nor_read_raises() -> None:
    service = MemoryService(2)
    service.fail(0, "put", "cell", CoordinationError("put", "cell", "the service does not answer"))
    with pytest.raises(CoordinationError, match="does not answer"):
        Cell(service.member(0), "cell").settle(b"")


@pytest.mark.parametrize("data", [b"", b"text", b"!", b"![1]", b"!\xff"])
def test_hostile_answer_is_typed(data: bytes) -> None:
    service = MemoryService(2)
    service.member(1).put("round.told", data)
    with pytest.raises(CheckpointError, match=r"round\.told, process 0"):
        Round(service.member(1), "round", LONG_S).learn()


def test_rounds_hold_under_all_schedules() -> None:
    """Slow and lost calls, lost replies, pauses, leaving and kills at any call of any process.

    No two processes end with different values, every wait ends, and the keys are bounded; a round
    without a fault ends as its rule says, with the leader's error where the rule raises.
    """
    told = printed(SCHEDULES, 600, env={"PYTHONHASHSEED": "0"})
    assert "value" in told
    assert "PeerLeft" in told
