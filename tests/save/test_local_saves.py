"""P4, whatever the votes say: the newest complete save and those in doubt are never overwritten.

A real local tier on a real ramdisk; only the outcomes of the votes are scripted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import host_states_are_too_large
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from memory_coordination import tell_address

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster import LocalCoordinator, Peers
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.core.shard_layout import lay_out, layout_digest
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.ram import LocalTier
from emergency_ckpt.save import Ballot, Outcome, Vote
from emergency_ckpt.save.local_save import LocalSave, LocalSaves
from emergency_ckpt.save.persistent.capture import SlotCapture
from emergency_ckpt.save.value_checks import FiniteLeaves
from emergency_ckpt.state import Snapshot, host_state
from emergency_ckpt.transfer import TransferClient
from emergency_ckpt.types import LeafSpec, SaveId, ShardId, Writer

RUN_ID = "run"
LEAVES = (LeafSpec("w", "uint8", (3, 5000)), LeafSpec("empty", "float32", (0,)))
SHARDS = [ShardId("w", ((0, 3), (0, 5000))), ShardId("empty", ((0, 0),))]
LAYOUT = lay_out(LEAVES, [(SHARDS[0], 15000), (SHARDS[1], 0)])
NAME = layout_digest(LEAVES, sorted(SHARDS))


class ScriptedVote(Vote):
    """Says what it was told to say; remembers the ballots."""

    def __init__(self) -> None:
        super().__init__(LocalCoordinator(), 1.0)
        self.next = "complete"
        self.ballots: list[Ballot] = []
        self.decided: dict[SaveId, str] = {}

    def cast(self, save: SaveId, ballot: Ballot, *, is_announced: bool = False) -> Outcome:
        self.ballots.append(ballot)
        kind = self.next
        if ballot.refused and kind == "complete":
            kind = "incomplete"
        if kind != "in_doubt":
            self.decided[save] = kind
        return _outcome(kind, {0: ballot})

    def learn(self, save: SaveId) -> Outcome:
        return _outcome(self.decided.get(save, "in_doubt"))


def _outcome(kind: Any, ballots: dict[int, Ballot] | None = None) -> Outcome:
    return Outcome(kind, f"scripted {kind}", ballots or {})


def save_id(step: int) -> SaveId:
    return SaveId(step=step, incarnation="life", run_id=RUN_ID)


def content(step: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(step)).integers(0, 256, (3, 5000), np.uint8)


def job(step: int, host: object = None) -> LocalSave:
    by_shard = {SHARDS[0]: content(step), SHARDS[1]: np.zeros(0, np.float32)}
    return LocalSave(
        save=save_id(step),
        leaves=LEAVES,
        layout=LAYOUT,
        capture=SlotCapture(
            Snapshot(enumerate([by_shard[placed.shard] for placed in LAYOUT.shards]))
        ),
        host_state=host_state.capture({"step": step} if host is None else host),
        buddies=(),
    )


def run(process: Process, save: LocalSave, *, fails: bool) -> None:
    """Run ``save``, whose host state has no place in RAM where the save ``fails``."""
    with host_states_are_too_large() if fails else contextlib.nullcontext():
        process.saves.run(save)


class Process:
    """The local saves of one process, and what they need."""

    def __init__(
        self,
        ramdisk: Path,
        vote: ScriptedVote,
        complete: SaveId | None = None,
        keep_last_n: int = 1,
        drops_older: bool = False,
    ) -> None:
        self.tier = LocalTier(
            ramdisk,
            RUN_ID,
            Writer(process_index=0, process_count=1, slice_index=0, hostname="host-0"),
            copy_threads=1,
        )
        self.tier.reserve(LAYOUT.size_bytes)
        self.events: list[Event] = []
        self.failures = Failures()
        self.client = TransferClient(run_id=RUN_ID, secret=b"s" * 32)
        coordinator = LocalCoordinator()
        tell_address(coordinator, 1, "127.0.0.1:1")  # nobody listens there
        events = EventSink(self.events.append, process_index=0)
        self.saves = LocalSaves(
            self.tier,
            vote,
            Peers(coordinator, self.client),
            events,
            self.failures,
            process=(0, 1),
            copy_batch_bytes=1 << 20,
            timelines=Timelines(self.tier, events, -1, complete),
            keep_last_n=keep_last_n,
            drops_older=drops_older,
            finite=FiniteLeaves(events),
        )

    def held(self) -> dict[int, str]:
        return {held.save.step: held.digest for held in self.tier.held()[0]}

    def close(self) -> None:
        self.client.close()
        self.tier.close()


class LocalSavesMachine(RuleBasedStateMachine):
    """Any order of saves, outcomes, late answers and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.ramdisk = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
        self.vote = ScriptedVote()
        self.process = Process(self.ramdisk, self.vote)
        self.step = 0
        self.complete: int | None = None
        self.doubtful: set[int] = set()
        self.refused: set[int] = set()

    def teardown(self) -> None:
        self.process.close()
        shutil.rmtree(self.ramdisk)

    @initialize()
    def first_save(self) -> None:
        self.save("complete", fits=True)

    def _learn(self) -> None:
        for step in sorted(self.doubtful):
            decided = self.vote.decided.get(save_id(step))
            if decided is None:
                continue
            self.doubtful.discard(step)
            if decided == "complete" and (self.complete is None or step > self.complete):
                self._now_complete(step)

    def _now_complete(self, step: int) -> None:
        self.complete = step
        self.doubtful = {other for other in self.doubtful if other > step}

    @rule(outcome=st.sampled_from(["complete", "incomplete", "in_doubt"]), fits=st.booleans())
    def save(self, outcome: str, fits: bool) -> None:
        self.step += 1
        self.vote.next = outcome
        failed_before = self.process.failures.count
        run(self.process, job(self.step), fails=not fits)
        self._learn()
        refused = self.vote.ballots[-1].refused
        if not fits:
            assert refused
        if refused:
            self.refused.add(self.step)
        if outcome == "complete" and not refused:
            self._now_complete(self.step)
            assert self.process.failures.count == failed_before
        else:
            assert self.process.failures.count == failed_before + 1
        if outcome == "in_doubt":
            self.doubtful.add(self.step)
        assert self.process.saves.steps == (() if self.complete is None else (self.complete,))

    @precondition(lambda self: self.doubtful)
    @rule(outcome=st.sampled_from(["complete", "incomplete"]), data=st.data())
    def answer_comes(self, outcome: str, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.doubtful)))
        if step in self.refused:
            outcome = "incomplete"
        self.vote.decided[save_id(step)] = outcome

    @rule()
    def restart_and_restore(self) -> None:
        self.process.close()
        self.process = Process(self.ramdisk, self.vote)
        assert self.complete is not None
        self.process.tier.invalidate_newer(save_id(self.complete))
        self.process.tier.note_complete(save_id(self.complete))
        self.process.saves.restart_from(save_id(self.complete))
        self.process.saves.steps = (self.complete,)
        self.doubtful.clear()

    @invariant()
    def what_must_be_kept_is_kept(self) -> None:
        if self.complete is None:
            return
        held = self.process.held()
        assert self.complete in held
        published = {step for step in self.doubtful if self._was_published(step)}
        for step in {self.complete} | published:
            assert step in held, f"step {step} was overwritten; held: {sorted(held)}"
            assert self.process.tier.verify(held[step], range(2)) == []
            with self.process.tier.reading(held[step]) as view:
                assert view(1).tobytes() == content(step).tobytes()
        document = self.process.tier.host_state_bytes(save_id(self.complete), 0, 1)
        assert document is not None
        assert host_state.value_of(host_state.decode(document).payload) == {"step": self.complete}

    def _was_published(self, step: int) -> bool:
        points = [e.point for e in self.process.events if e.fields.get("step") == step]
        return "save.stage.published" in points


LocalSavesMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, derandomize=True
)
TestLocalSaves = pytest.mark.dear(LocalSavesMachine.TestCase)


@pytest.fixture
def vote() -> ScriptedVote:
    return ScriptedVote()


@pytest.fixture
def process(ramdisk: Path, vote: ScriptedVote):
    process = Process(ramdisk, vote)
    yield process
    process.close()


def test_events_of_a_save_come_in_the_order_of_the_protocol(process: Process) -> None:
    process.saves.run(job(1))
    assert [event.point for event in process.events] == [
        "save.stage.invalidated",
        "save.stage.copied",
        "save.stage.staged",
        "save.stage.published",
        "save.stage.host_state_published",
        "save.stage.pushed",
        "save.stage.voted",
        "save.complete",
    ]


def test_second_save_of_a_complete_step_is_kept_in_ram(process: Process) -> None:
    for _ in range(2):
        process.saves.run(job(1))
    last = process.events[-1]
    assert last.point == "save.skipped.kept"
    assert (last.fields["step"], last.fields["tier"]) == (1, "local")


def test_ballot_names_contents_and_layout(process: Process, vote: ScriptedVote) -> None:
    process.saves.run(job(1))
    assert vote.ballots == [
        Ballot(digest=bytes.fromhex(process.held()[1]), layout=bytes.fromhex(NAME)[:8]),
    ]


def test_failure_is_voted_told_and_forgotten_by_the_next_save(
    process: Process, vote: ScriptedVote
) -> None:
    process.saves.run(job(1))
    run(process, job(2), fails=True)
    assert "HostStateTooLarge" in vote.ballots[-1].refused
    with pytest.raises(SaveFailed, match=r"step 2 to the local tier.*next save tries again"):
        process.failures.raise_pending()
    assert process.saves.steps == (1,)
    process.saves.run(job(3))
    assert process.saves.steps == (3,)
    process.failures.raise_pending()


def test_doubt_made_idle_by_a_newer_complete_save_blocks_nothing(
    process: Process, vote: ScriptedVote
) -> None:
    vote.next = "in_doubt"
    process.saves.run(job(1))
    vote.next = "complete"
    for step in (2, 3, 4):
        process.saves.run(job(step))
        assert process.saves.steps == (step,)


def test_result_in_doubt_is_told_when_the_decision_comes(
    process: Process, vote: ScriptedVote
) -> None:
    vote.next = "in_doubt"
    jobs = [job(1), job(2), job(3)]
    for each in jobs[:2]:
        process.saves.run(each)
        assert each.result.wait(0)
    assert [each.result.is_complete for each in jobs] == [False] * 3
    vote.decided |= {save_id(1): "incomplete", save_id(2): "complete"}
    vote.next = "complete"
    process.saves.run(jobs[2])
    assert [each.result.is_complete for each in jobs] == [False, True, True]


def test_step_that_only_others_hold_is_listed(ramdisk: Path, vote: ScriptedVote) -> None:
    """As on a host that has lost its RAM: all processes list the same."""
    process = Process(ramdisk, vote, keep_last_n=2)
    process.saves.steps = (1,)
    listed: list[tuple[int, ...]] = []
    for step in (2, 3):
        process.saves.run(job(step))
        listed.append(process.saves.steps)
    process.close()
    assert listed == [(1, 2), (2, 3)]


def test_two_saves_to_be_kept_leave_no_slot_while_in_doubt(
    process: Process, vote: ScriptedVote
) -> None:
    process.saves.run(job(1))
    vote.next = "in_doubt"
    process.saves.run(job(2))
    vote.next = "complete"
    process.saves.run(job(3))
    assert "SlotBusy" in vote.ballots[-1].refused
    assert set(process.held()) == {1, 2}
    vote.decided[save_id(2)] = "incomplete"
    process.saves.run(job(4))
    assert set(process.held()) == {1, 4}
    assert process.saves.steps == (4,)


@pytest.mark.parametrize(("told_of", "kept"), [(4, 4), (3, 3), (None, 3), (9, 3)])
def test_next_life_keeps_what_any_process_knows_complete(
    ramdisk: Path, vote: ScriptedVote, told_of: int | None, kept: int
) -> None:
    """This process died before it learned of the decision on step 4; another had learned it."""
    before = Process(ramdisk, vote)
    before.saves.run(job(3))
    vote.next = "in_doubt"
    before.saves.run(job(4))
    before.close()
    after = Process(ramdisk, vote, complete=None if told_of is None else save_id(told_of))
    try:
        after.saves.run(job(5))
        assert set(after.held()) == {kept, 5}
    finally:
        after.close()


def test_replicas_that_differ_are_reported(ramdisk: Path) -> None:
    """Two processes stored one layout; their contents differ in one leaf."""

    class Both(ScriptedVote):
        def cast(self, save: SaveId, ballot: Ballot, *, is_announced: bool = False) -> Outcome:
            other = Ballot(digest=bytes(32), layout=ballot.layout)
            return _outcome("complete", {0: ballot, 1: other})

    process = Process(ramdisk, Both())
    try:
        process.saves.run(job(1))
    finally:
        process.close()
    (event,) = [event for event in process.events if event.name == "divergence"]
    assert event.fields["step"] == 1
    assert "[0, 1]" in str(event.fields["text"])


@pytest.mark.parametrize("fits", [True, False])
def test_own_failure_of_a_late_save_is_recorded(ramdisk: Path, fits: bool) -> None:
    class Late(ScriptedVote):
        def cast(self, save: SaveId, ballot: Ballot, *, is_announced: bool = False) -> Outcome:
            return dataclasses.replace(_outcome("incomplete", {0: ballot}), learned_late=True)

    process = Process(ramdisk, Late())
    try:
        run(process, job(1), fails=not fits)
    finally:
        process.close()
    assert process.failures.count == (0 if fits else 1)


def test_layout_digests_differ_with_the_shards() -> None:
    assert layout_digest(LEAVES, SHARDS[1:]) != NAME
    assert layout_digest(LEAVES[:1], sorted(SHARDS)) != NAME
    assert layout_digest(reversed(LEAVES), sorted(SHARDS)) == NAME


@pytest.mark.parametrize(("drops_older", "held"), [(True, [15]), (False, [10, 15])])
def test_older_step_stays_or_is_dropped(tmp_path: Path, drops_older: bool, held: list[int]) -> None:
    process = Process(tmp_path / "ram", ScriptedVote(), drops_older=drops_older)
    for step in (5, 10, 15):
        process.saves.run(job(step))
    assert sorted(process.held()) == held
    process.close()


@pytest.mark.parametrize("host", [None, {"at": 1}])
def test_unsent_host_state_fails_a_save_that_has_one(tmp_path: Path, host: object) -> None:
    process = Process(tmp_path, vote := ScriptedVote())
    alone = dataclasses.replace(job(1), host_state=host_state.capture(host), buddies=(1,))
    process.saves.run(alone)
    assert bool(vote.ballots[0].refused) == (host is not None)
    assert process.failures.count == (host is not None)
    pushed = [
        event.fields["buddies"] for event in process.events if event.point == "save.stage.pushed"
    ]
    assert pushed == ([0] if host is None else [])
    process.close()
