"""A stranger writes to the coordination service: deleted, forged, moved and replayed values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from memory_coordination import MemoryService

from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.cluster.round import Round
from emergency_ckpt.cluster.secret_agreement import SealedCoordinator
from emergency_ckpt.errors import CoordinationError, DeadlineExceeded, ForgedValue

KEY = b"k" * 32
SOON_S = 0.2
LONG_S = 60.0
READS: dict[str, Callable[[Coordinator], object]] = {
    "get": lambda job: job.get("a/key", SOON_S),
    "find": lambda job: job.find("a/key"),
    "list": lambda job: job.list("a"),
    "put": lambda job: job.put("a/key", b"own"),
}


def world(count: int = 2) -> tuple[MemoryService, list[SealedCoordinator]]:
    service = MemoryService(count)
    return service, [SealedCoordinator(service.member(p), KEY) for p in range(count)]


@pytest.mark.parametrize("read", READS)
def test_sealed_value_forged_is_named(read: str) -> None:
    service, (job, _) = world()
    service.member(1).put("a/key", b'{"step": 7}')
    with pytest.raises(ForgedValue, match=r"a/key: .*another client wrote it") as caught:
        READS[read](job)
    assert isinstance(caught.value, CoordinationError)
    assert not caught.value.retryable


@pytest.mark.parametrize("read", READS)
def test_sealed_value_of_an_earlier_start_is_refused(read: str) -> None:
    service, (job, _) = world()
    SealedCoordinator(service.member(1), b"o" * 32).put("a/key", b"recorded")
    with pytest.raises(ForgedValue, match="a/key"):
        READS[read](job)


def test_sealed_value_copied_to_another_key_is_refused() -> None:
    service, (job, _) = world()
    job.put("ballot/0", b"yes")
    service.member(1).put("ballot/1", service.values["ballot/0"])
    with pytest.raises(ForgedValue, match="ballot/1"):
        job.list("ballot")


def test_sealed_value_replaced_and_put_back_is_refused() -> None:
    service, (writer, reader) = world()
    writer.replace("led", b"4")
    old = service.values["led"]
    writer.replace("led", b"5")
    assert reader.find("led") == b"5"
    service.member(1).replace("led", old)
    for read in (lambda: reader.find("led"), lambda: reader.get("led", SOON_S)):
        with pytest.raises(ForgedValue, match="led: an older value was written back"):
            read()
    writer.replace("led", b"6")
    assert reader.find("led") == b"6"


def test_sealed_values_of_several_writers_need_no_order() -> None:
    _, (first, second) = world()
    for _ in range(3):
        first.replace("notice", b"first")
    assert second.find("notice") == b"first"
    second.replace("notice", b"second")
    assert first.find("notice") == second.find("notice") == b"second"


def test_sealed_value_seen_late_by_a_thread_is_no_replay() -> None:
    """It asked before the newer value was set, and is told after another thread saw that one."""
    service, (writer, _) = world()
    writer.replace("led", b"4")

    class Slow:
        def find(self, key: str) -> bytes | None:
            found = service.values[key]
            if len(asked) == 0:
                asked.append(key)
                writer.replace("led", b"5")
                assert reader.find("led") == b"5"
            return found

    asked: list[str] = []
    slow = Slow()
    slow.__dict__["process_index"] = 1
    reader = SealedCoordinator(slow, KEY)  # pyright: ignore[reportArgumentType]
    assert reader.find("led") == b"4"
    assert reader.find("led") == b"5"


def test_sealed_put_beside_an_honest_value_is_no_forgery() -> None:
    _, (first, second) = world()
    first.put("decision", b"yes")
    with pytest.raises(CoordinationError, match="set already") as caught:
        second.put("decision", b"no")
    assert not isinstance(caught.value, ForgedValue)


def test_sealed_value_deleted_ends_in_a_deadline() -> None:
    service, (writer, reader) = world()
    writer.put("plan/1", b"step 7")
    service.member(1).delete("plan")
    with pytest.raises(DeadlineExceeded, match="plan/1"):
        reader.get("plan/1", SOON_S)


def test_forged_value_shows_a_bounded_escaped_key() -> None:
    service, (job, _) = world()
    service.member(1).put("a/\x1b[2J\n" + "x" * 5000, b"")
    with pytest.raises(ForgedValue) as caught:
        job.list("a")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_round_with_a_process_too_many_names_the_key() -> None:
    service, (leader, other) = world()
    Round(other, "round", LONG_S).say(b"its")
    service.member(1).put("round/7", service.values["round/1"])
    held = Round(leader, "round", LONG_S)
    with pytest.raises(ForgedValue, match="round/7"):
        held.hold(b"mine", held.when_all(lambda _: b"step 9"))
    with pytest.raises(CoordinationError, match="process 0 failed: list round/7"):
        Round(other, "round", LONG_S).learn()


def test_round_answered_by_a_stranger_is_refused_by_all() -> None:
    service, members = world()
    service.member(1).put("round.told", b"=step 7")
    for member in reversed(members):
        held = Round(member, "round", LONG_S)
        with pytest.raises(ForgedValue, match=r"round\.told"):
            held.hold(b"", held.when_all(lambda _: b"step 9"))
