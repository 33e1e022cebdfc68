"""Values of the coordination service that nobody of this job can have written, or not like this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from announcing import Member, train
from damage import damaged
from memory_coordination import MemoryService, everywhere

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster import left_processes, membership, peers
from emergency_ckpt.cluster import round as rounds_and_cells
from emergency_ckpt.cluster.coordination import (
    Coordinator,
    by_process,
    decode_each,
    decode_message,
    number_of,
    reason_of,
)
from emergency_ckpt.cluster.left_processes import LeftProcesses, leaving
from emergency_ckpt.cluster.peers import Known
from emergency_ckpt.cluster.preemption import PreemptionWatch
from emergency_ckpt.core.limits import MAX_MESSAGE_BYTES, MAX_PLAN_MESSAGE_BYTES
from emergency_ckpt.core.save.announcements import Announcement, SaveReport
from emergency_ckpt.errors import CheckpointError, ConfigError, CoordinationError
from emergency_ckpt.save import ending, vote
from emergency_ckpt.save.persistent.rounds import (
    FIRST_STAGE,
    StageReport,
    StorageRounds,
)
from emergency_ckpt.save.vote import Ballot, Vote
from emergency_ckpt.types import SaveId, ShardId

# pyright: reportPrivateUsage=false

LONG_S = 30.0
SAVE = SaveId(40, "0198f2c4a1b0-5e9d000000000000", "run")
SHARD = ShardId("['w']", ((0, 4),))
MESSAGES: tuple[tuple[Any, Any], ...] = (
    (Ballot(b"\x5e" * 32, b"\x9d" * 8), Ballot),
    (vote._Decision(0, "process 1: no"), vote._Decision),
    (peers._Hello("127.0.0.1:4000", Known(7, 40, SAVE), ""), peers._Hello),
    (peers.Started("000000000008-5e9d000000000000", 40, SAVE), peers.Started),
    (rounds_and_cells._Ready("", 7), rounds_and_cells._Ready),
    (membership._Hello("5e" * 32, ""), membership._Hello),
    (membership._Decision("5e9d", ""), membership._Decision),
    (
        left_processes._Leaving("done", {"local": (7, 40, "000001")}),
        left_processes._Leaving,
    ),
    (Announcement(3, "local", 40), Announcement),
    (SaveReport(41, 3, -250, 7), SaveReport),
    (StageReport(documents={0: ("5e", False)}, crcs=((SHARD, 77),)), StageReport),
    ((7, 40, "000001"), left_processes.Place),
    ({"dir": "'/a'"}, dict[str, str]),
    (["dir differs"], list[str]),
)
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "no text": b"\xff\xfe",
    "number": b"17",
    "null": b"null",
    "text": b'"a"',
    "list of list": b"[[1]]",
    "unknown field": b'{"nobody": 1}',
    "deep": b"[" * 200_000,
    "deep objects": b'{"error":' * 100_000,
    "huge number": b"9" * 100_000,
    "oversized": b'"' + b"a" * MAX_MESSAGE_BYTES + b'"',
}


@pytest.mark.parametrize(("value", "kind"), MESSAGES, ids=[str(kind) for _, kind in MESSAGES])
def test_every_damaged_message_is_one_or_a_typed_error(value: Any, kind: Any) -> None:
    data = msgspec.json.encode(value)
    assert decode_message(data, kind, "a") == value
    name, errors = "vote/5e9d/40/ballot/1", list[str]()
    for each in damaged(data):
        try:
            decode_message(each, kind, name)
        except CoordinationError as error:
            errors.append(str(error))
    assert len(errors) > len(data)
    assert all(name in text for text in errors)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("kind", [kind for _, kind in MESSAGES], ids=str)
def test_hostile_message_is_a_typed_error(kind: Any, data: bytes) -> None:
    with pytest.raises(CoordinationError, match="hello/3"):
        decode_message(data, kind, "hello/3", limit_bytes=MAX_MESSAGE_BYTES)


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "01", "1_0", " 1", "1\n", "x", "\u0661", "9" * 5000, "3", "1/ballot/2"]
)
def test_key_of_no_process_is_a_typed_error(text: str) -> None:
    with pytest.raises(CoordinationError, match="leaving"):
        by_process({text: b""}, "leaving", 3)


def test_damaged_number_is_that_or_a_typed_error() -> None:
    errors: list[str] = []
    for each in [*damaged(b"1207"), b"a" * 5000]:
        try:
            number_of(each, "check/1")
        except CoordinationError as error:
            errors.append(str(error))
        assert len(reason_of(each)) <= 4000
    assert errors
    assert all("check/1" in text for text in errors)


def test_limit_of_a_message_is_its_size() -> None:
    data = msgspec.json.encode(["a" * 100])
    assert decode_message(data, list[str], "a", limit_bytes=len(data)) == ["a" * 100]
    with pytest.raises(CoordinationError, match="more than 50"):
        decode_message(data, list[str], "a", limit_bytes=50)
    (text,) = decode_each({2: data}, list[str], "a", lambda text: [text], limit_bytes=50)[2]
    assert "'a/2'" in text


# What becomes of it: each call below is made as a job would, with one value of a stranger.


class Tampered:
    """A coordinator which writes ``data`` in place of each value whose key has ``part``."""

    def __init__(self, inner: Coordinator, part: str, data: bytes) -> None:
        self._inner = inner
        self._part = part
        self._data = data

    def put(self, key: str, value: bytes) -> None:
        self._inner.put(key, self._data if self._part in key else value)

    def replace(self, key: str, value: bytes) -> None:
        self._inner.replace(key, self._data if self._part in key else value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def together(
    call: Callable[[Any], object], part: str, data: bytes, liar: int, count: int = 3
) -> list[object]:
    """Make ``call`` on all; what each returned or raised. ``liar`` writes ``data``."""
    service = MemoryService(count)

    def run(process: int) -> object:
        member: Any = service.member(process)
        return call(Tampered(member, part, data) if process == liar else member)

    return everywhere(count, run)


DATA = pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)


@DATA
def test_start_with_hostile_hello_fails_everywhere(data: bytes) -> None:
    outcomes = together(
        lambda member: peers.agree_start(member, lambda: ("h:1", Known()), LONG_S),
        "hello/",
        data,
        1,
    )
    assert all("process 1: decode message 'hello/1'" in str(o) for o in outcomes), outcomes


@DATA
def test_settings_with_hostile_hello_fail_everywhere(data: bytes) -> None:
    outcomes = together(
        lambda member: membership.agree_settings(member, {"a": "1"}, LONG_S),
        "settings/",
        data,
        2,
    )
    assert all(isinstance(o, ConfigError) and "'settings/2'" in str(o) for o in outcomes), outcomes


@DATA
def test_differing_settings_with_hostile_table_are_told(data: bytes) -> None:
    def call(member: Coordinator) -> object:
        own = {"a": str(member.process_index)}
        return membership.agree_settings(member, own, LONG_S)

    outcomes = together(call, "settings.texts/", data, 1)
    assert all(isinstance(o, ConfigError) and "settings.texts/1" in str(o) for o in outcomes)


@DATA
def test_going_on_with_hostile_word_fails_everywhere(data: bytes) -> None:
    def call(member: Coordinator) -> object:
        watch = PreemptionWatch(None, grace_s=1.0)
        return rounds_and_cells.run_on_all(member, "ready", lambda: None, watch, LONG_S)

    outcomes = together(call, "ready/", data, 1)
    assert all("process 1: decode message 'ready/1'" in str(o) for o in outcomes), outcomes


@DATA
def test_vote_with_hostile_ballot_is_decided_against(data: bytes) -> None:
    def call(member: Coordinator) -> object:
        return Vote(member, LONG_S).cast(SAVE, Ballot(b"\x5e", b"\x9d"))

    outcomes: list[Any] = together(call, "/ballot/", data, 2)
    assert [outcome.kind for outcome in outcomes] == ["incomplete"] * 3
    assert all("/ballot/2" in outcome.reason for outcome in outcomes)


@DATA
def test_vote_with_hostile_decision_is_in_doubt(data: bytes) -> None:
    def call(member: Coordinator) -> object:
        return Vote(member, LONG_S).cast(SAVE, Ballot(b"\x5e", b"\x9d"))

    outcomes: list[Any] = together(call, "/decision", data, 0)
    assert [outcome.kind for outcome in outcomes[1:]] == ["in_doubt"] * 2
    assert all("/decision, process 0" in outcome.reason for outcome in outcomes[1:])


@DATA
def test_hostile_departure_counts_as_one(data: bytes) -> None:
    service = MemoryService(2)
    service.member(1).put("leaving/1", data)
    assert "leaving/1" in leaving(service.member(0))[1]
    absent = LeftProcesses(service.member(0)).absent("local", SAVE, {1})
    assert "leaving/1" in absent[1]


@DATA
def test_hostile_outcome_of_persistent_save_is_typed(data: bytes) -> None:
    service = MemoryService(2)
    keys = [StorageRounds(service.member(p), LONG_S) for p in range(2)]
    keys[0]._outcome(SAVE).settle(data)
    with pytest.raises(CoordinationError, match="outcome of step 40, process 0"):
        keys[1].learn(SAVE, 0)
    service.member(0).put("at/persistent/0", data)
    with pytest.raises(CoordinationError, match=r"at/persistent/0"):
        keys[1].absent(SAVE, [0])
    service.member(0).put(f"persist/{SAVE.incarnation}/40/{FIRST_STAGE}/stranger", data)
    with pytest.raises(CoordinationError, match="stranger"):
        keys[1].stage(SAVE, FIRST_STAGE, [0, 1]).said()


@DATA
def test_hostile_report_of_a_writer_ends_the_stage_on_all(data: bytes) -> None:
    service = MemoryService(2)
    rounds = [StorageRounds(service.member(p), LONG_S) for p in range(2)]
    first, second = (each.stage(SAVE, FIRST_STAGE, [0, 1]) for each in rounds)
    second.say(data)
    with pytest.raises(CoordinationError, match="host_states of step 40, process 1"):
        first.decide(rounds[0].rule_of(SAVE, FIRST_STAGE, first, 0))
    with pytest.raises(CoordinationError, match="host_states of step 40, process 1"):
        second.learn()


class FailOnce(Tampered):
    """Tampers with the first such value alone."""

    def put(self, key: str, value: bytes) -> None:
        part, self._part = (self._part, "\n" if self._part in key else self._part)
        self._inner.put(key, self._data if part in key else value)

    def replace(self, key: str, value: bytes) -> None:
        part, self._part = (self._part, "\n" if self._part in key else self._part)
        self._inner.replace(key, self._data if part in key else value)


@pytest.mark.parametrize("data", [HOSTILE[n] for n in ("empty", "unknown field", "deep")])
@pytest.mark.parametrize(("part", "liar"), [("/step/", 0), ("/report/", 1)])
def test_announcements_go_on_after_a_hostile_message(part: str, liar: int, data: bytes) -> None:
    service = MemoryService(2)
    coordinators: list[Any] = [service.member(process) for process in range(2)]
    coordinators[liar] = FailOnce(coordinators[liar], part, data)
    members = [Member(coordinator) for coordinator in coordinators]
    train(members, 4)
    leader, other = members
    assert len(leader.saved) >= 4
    assert set(leader.saved[1:]) <= {*other.saved, *other.missed}
    assert any(
        part.strip("/") in str(error) for error in _recorded([leader.failures, other.failures])
    )


def _recorded(failures: list[Failures]) -> list[Exception]:
    found: list[Exception] = []
    for each in failures:
        try:
            each.raise_pending()
        except CheckpointError as error:
            found.append(error)
    return found


def test_bounds_of_messages_are_in_order() -> None:
    assert MAX_MESSAGE_BYTES < MAX_PLAN_MESSAGE_BYTES


LAST_SAVE = ending.LastSave(SAVE, SAVE, (0, 2), (2,))


@pytest.mark.parametrize(
    "change",
    [
        {"stored": None},
        {"members": (), "holders": ()},
        {"holders": (1,)},
        {"members": (0, 4), "holders": (4,)},
        {"members": (2, 0)},
        {"members": (0, 2, 2)},
        {"stored": SaveId(41, SAVE.incarnation, SAVE.run_id)},
        {"stored": SaveId(40, SAVE.incarnation, "another")},
        {"in_ram": SaveId(40, "../up", SAVE.run_id)},
    ],
)
def test_decision_on_the_last_save_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    right = msgspec.json.encode(LAST_SAVE)
    assert ending.decision_of(right, SAVE.run_id, 4) == LAST_SAVE
    wrong = msgspec.json.encode(msgspec.structs.replace(LAST_SAVE, **change))
    with pytest.raises(CheckpointError):
        ending.decision_of(wrong, SAVE.run_id, 4)
