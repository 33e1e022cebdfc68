"""A round of a restore: each says how far it is, and all hear what comes next."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from memory_coordination import MemoryService, everywhere

from emergency_ckpt.cluster.round import Series
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.core.restore.plan_types import Copies, HostStateFetch, RestorePlan
from emergency_ckpt.errors import HolderUnreachable, RestoreFailed
from emergency_ckpt.restore.rounds import (
    AllDone,
    Answer,
    Failed,
    RestoreRounds,
    Row,
    Status,
    refuse,
    status_of,
)
from emergency_ckpt.types import SaveId

WAIT_S = 20.0
SAVE = SaveId(8, "1-a", "run")
FIRST = RestorePlan(8, SAVE, {0: Copies(place=0), 1: Copies(place=1)})
"""A choice with a part for each of two processes."""


class Scripted:
    """A leader with a list of answers; what all said before each."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)
        self.rows: list[Mapping[int, Row]] = []

    def answer(self, rows: Mapping[int, Row]) -> Answer:
        self.rows.append(rows)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def rounds_of(service: MemoryService, process: int, leader: Any) -> RestoreRounds:
    return RestoreRounds(
        service.member(process),
        "restore/0",
        Series(),
        {},
        leader,
        deadline_s=time.monotonic() + WAIT_S,
    )


def run(leader: Scripted, *statuses: Status) -> list[list[Any]]:
    """What each of two processes hears: after its report, and after each status of its own."""
    service = MemoryService(2)

    def restore(process: int) -> list[Any]:
        rounds = rounds_of(service, process, leader)
        held = HolderInventory(f"process/{process}", process, "", (), ())
        heard: list[Any] = [rounds.hold(rounds.report(held, wants_host_state=False))]
        heard += [rounds.hold(Row(status if process else Status())) for status in statuses]
        return heard

    return everywhere(2, restore)


def test_answer_to_reports_has_the_part_of_each_process() -> None:
    leader = Scripted(FIRST)
    (first,), (second,) = run(leader)
    assert (first.copies[0], second.copies[1]) == (Copies(place=0), Copies(place=1))
    (rows,) = leader.rows
    assert {p: row.report.inventory.holder for p, row in rows.items() if row.report} == {
        0: "process/0",
        1: "process/1",
    }


def test_host_states_for_all_are_sent_once() -> None:
    """Where a remap is due each process needs all: a copy for each would be 19 GB for 10,000."""
    every = tuple(HostStateFetch(owner, "d" * 64, ("process/1",)) for owner in range(3))
    addresses = {"process/0": "a:1", "process/1": "b:1"}
    plan = msgspec.structs.replace(FIRST, every_host_state=every, addresses=addresses)
    service = MemoryService(2)

    def restore(process: int) -> Any:
        rounds = rounds_of(service, process, Scripted(plan))
        held = HolderInventory(f"process/{process}", process, "", (), ())
        return rounds.hold(rounds.report(held, wants_host_state=True))

    for answer in everywhere(2, restore):
        assert answer.every_host_state == every
        assert answer.addresses == {"process/1": "b:1"}
    assert len([value for value in service.values.values() if b"d" * 64 in value]) == 1


def test_answer_to_a_failure_is_the_next_choice() -> None:
    """In the same round: nobody waits once more for the leader's plan."""
    leader = Scripted(FIRST, FIRST, AllDone("2-b"))
    heard = run(leader, Status("a copy failed"), Status())
    assert [type(answer) for answer in heard[0]] == [RestorePlan, RestorePlan, AllDone]
    assert heard[1][2] == AllDone("2-b")
    assert [rows[1].status.error for rows in leader.rows] == ["", "a copy failed", ""]
    assert leader.rows[1][1].report is None


def test_report_is_taken_beside_a_leader_whose_part_has_failed() -> None:
    """A step from storage is in the RAM of one process, and process 0 has read damaged bytes."""
    script = Scripted(FIRST, FIRST)
    service = MemoryService(2)

    def restore(process: int) -> Any:
        rounds = rounds_of(service, process, script)
        held = HolderInventory(f"process/{process}", process, "", (), ())
        rounds.hold(rounds.report(held, wants_host_state=False))
        failed = Row(Status("its CRC32C differs"))
        return rounds.hold(rounds.report(held, wants_host_state=False) if process else failed)

    assert [type(answer) for answer in everywhere(2, restore)] == [RestorePlan, RestorePlan]
    assert [row.report is None for row in script.rows[1].values()] == [True, False]


def test_end_of_a_restore_is_an_error_on_all() -> None:
    first, second = run(Scripted(Failed("it is silent", "holder", "step 8")))
    assert isinstance(first, HolderUnreachable)
    assert isinstance(second, HolderUnreachable)
    assert (first.target, first.problem) == (second.target, second.problem)


def test_fault_of_the_leader_is_raised_as_it_was_there() -> None:
    fault = RestoreFailed("restore", "step 8", "a fault of the leader")
    first, second = run(Scripted(fault))
    assert first is fault
    assert isinstance(second, RestoreFailed)
    assert "a fault of the leader" in str(second)


STRANGE = "cannot open caf\udce9.tfrecord"
"""With the name of a file that is not UTF-8, as ``os.listdir`` returns it."""
WRITTEN = "RuntimeError: cannot open caf\\udce9.tfrecord"


def test_failed_part_that_is_no_unicode_reaches_the_leader() -> None:
    leader = Scripted(FIRST, Failed("it is over"))
    first, second = run(leader, status_of(RuntimeError(STRANGE), FIRST))
    assert leader.rows[1][1].status == Status(WRITTEN)
    assert isinstance(first, RestoreFailed)
    assert isinstance(second, RestoreFailed)


def test_refusal_that_is_no_unicode_reaches_the_leader() -> None:
    service, leader = MemoryService(2), Scripted(Failed("it is over"))

    def restore(process: int) -> Any:
        if process:
            refuse(service.member(1), "restore/0", Series(), RuntimeError(STRANGE))
            return None
        rounds = rounds_of(service, 0, leader)
        held = HolderInventory("process/0", 0, "", (), ())
        return rounds.hold(rounds.report(held, wants_host_state=False))

    first, second = everywhere(2, restore)
    assert isinstance(first, RestoreFailed)
    assert second is None
    assert leader.rows[0][1].status == Status(WRITTEN)


def test_fault_of_the_leader_that_is_no_unicode_is_told() -> None:
    first, second = run(Scripted(RuntimeError(STRANGE)))
    assert isinstance(first, RestoreFailed)
    assert "cannot open caf\\udce9.tfrecord" in str(second)
