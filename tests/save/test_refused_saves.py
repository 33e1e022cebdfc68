"""P7 where a local save is refused or fails: training waits for no vote of the others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest
from world import LONG_S, World, save, save_all

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster import LocalCoordinator, Peers
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.core.save.snapshot_plan import DeviceReads
from emergency_ckpt.core.shard_layout import lay_out, shard_nbytes
from emergency_ckpt.errors import (
    HostStateError,
    InvalidState,
    RamdiskFull,
    SaveFailed,
    SlotBusy,
)
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.ram import LocalTier
from emergency_ckpt.save import Ballot, Outcome, Vote
from emergency_ckpt.save.local_save import LocalSave, LocalSaves
from emergency_ckpt.save.persistent.capture import SlotCapture
from emergency_ckpt.save.persistent.save import PersistentSaves
from emergency_ckpt.save.value_checks import FiniteLeaves
from emergency_ckpt.state import Snapshot, SnapshotRecipe, describe, host_state
from emergency_ckpt.state.link import find_link
from emergency_ckpt.transfer import TransferClient
from emergency_ckpt.types import SaveId, ShardId, Writer

SHARD_BYTES = 16384
WAYS: dict[str, tuple[DeviceReads, int]] = {
    "pinned": ("pinned_host", 4 * SHARD_BYTES),
    "a shard at a time": ("pageable", SHARD_BYTES),
}


class LateVote(Vote):
    """Others vote late: notes whether training went on before they have."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(LocalCoordinator(), 1.0)
        self._snapshot = snapshot
        self.training_went_on: list[bool] = []

    def cast(self, save: SaveId, ballot: Ballot, *, is_announced: bool = False) -> Outcome:
        assert ballot.refused
        self.training_went_on.append(self._snapshot.wait_captured(0))
        return Outcome("incomplete", ballot.refused, {0: ballot})


def refuse_slot(*_: Any, **__: Any) -> Any:
    raise SlotBusy("begin write of", "step 1", "both slots are read")


def refuse_copy(*_: Any, **__: Any) -> Any:
    raise RamdiskFull("copy to", "slot", "no space left")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("where", "name", "refuse"),
    [(LocalTier, "begin_write", refuse_slot), (SlotCapture, "read_into", refuse_copy)],
    ids=["before a byte is read", "in the first batch"],
)
def test_training_goes_on_before_the_vote_ends(
    ramdisk: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: tuple[DeviceReads, int],
    where: type,
    name: str,
    refuse: Callable[..., Any],
) -> None:
    state = {f"w{i}": jax.numpy.full(SHARD_BYTES // 4, i, np.float32) for i in range(4)}
    tree = describe(state, "save")
    leaves = tuple(leaf.spec for leaf in tree.leaves)
    shards = [ShardId(leaf.path, tuple((0, n) for n in leaf.global_shape)) for leaf in leaves]
    layout = lay_out(leaves, [(s, shard_nbytes(tree.specs[s.leaf], s.box)) for s in shards])
    placed = [each.shard for each in layout.shards]
    recipe = SnapshotRecipe(tree, placed, find_link().reading(way[0]), way[1])
    snapshot = recipe.take(jax.tree.leaves(state))
    snapshot.start()
    if way[1] == SHARD_BYTES:
        assert not snapshot.wait_captured(0), "else it shows nothing"
    tier = LocalTier(ramdisk, "run", Writer(0, 1, 0, "host-0"), copy_threads=1)
    failures, vote = Failures(), LateVote(snapshot)
    client = TransferClient(run_id="run", secret=b"s" * 32)
    events = EventSink(None, process_index=0)
    saves = LocalSaves(
        tier,
        vote,
        Peers(LocalCoordinator(), client),
        events,
        failures,
        process=(0, 1),
        copy_batch_bytes=SHARD_BYTES,
        timelines=Timelines(tier, events),
        finite=FiniteLeaves(events),
    )
    monkeypatch.setattr(where, name, refuse)
    save = SaveId(1, "life", "run")
    saves.run(LocalSave(save, leaves, layout, SlotCapture(snapshot), host_state.capture(0), ()))
    assert vote.training_went_on == [True]
    with pytest.raises(SaveFailed, match=r"both slots are read|no space left"):
        failures.raise_pending()
    snapshot.close()
    client.close()
    tier.close()


def test_save_that_cannot_begin_is_voted_against_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for the ballot of this process until its next save."""
    said: list[tuple[int, str]] = []
    hand_in = Vote.hand_in

    def heard(vote: Vote, save: SaveId, ballot: Ballot) -> None:
        said.append((save.step, ballot.refused))
        hand_in(vote, save, ballot)

    monkeypatch.setattr(Vote, "hand_in", heard)
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
        with pytest.raises(HostStateError, match=r"builtins\.set"):
            checkpointer.save(step=2, state=world.state(2), host_state={1, 2})
        with pytest.raises(InvalidState, match="type str"):
            checkpointer.save(step=3, state={"w": "a text"})
        checkpointer.leave_out(step=4, problem="no arrays are given")
        checkpointer.leave_out(step=4, problem="not due a second time")
        checkpointer.leave_out(step=2, problem="behind the newest", force=True)
        save_all(checkpointer, world, 5)
        assert checkpointer.all_steps() == [5]
    assert [step for step, _ in said] == [1, 2, 3, 4, 5]
    refusals = [reason for _, reason in said]
    assert refusals[0] == refusals[-1] == ""
    assert refusals[1].startswith("HostStateError: capture host_state: cannot store")
    assert refusals[2].startswith("InvalidState: save leaf")
    assert refusals[3] == "InvalidState: save step 4: no arrays are given"


def told_of_storage(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Return what others are told from now on: a step that is left out, and the reason."""
    said: list[tuple[int, str]] = []
    leave_out = PersistentSaves.leave_out

    def heard(saves: PersistentSaves, save: SaveId, writers: Sequence[int], reason: str) -> None:
        said.append((save.step, reason))
        leave_out(saves, save, writers, reason)

    monkeypatch.setattr(PersistentSaves, "leave_out", heard)
    return said


def test_save_to_storage_that_cannot_begin_is_told_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for the host state of this process, for minutes."""
    said = told_of_storage(monkeypatch)
    for settings in ({"save_every": 1}, {"save_every": 1, "local_save_every": 0}):
        said.clear()
        with world.open_both(**settings) as checkpointer:
            checkpointer.restore(state=world.state(0), host_state={})
            first = (checkpointer.latest_step() or 0) + 1
            save_all(checkpointer, world, first)
            with pytest.raises(HostStateError, match=r"builtins\.set"):
                checkpointer.save(step=first + 1, state=world.state(first + 1), host_state={1, 2})
            save_all(checkpointer, world, first + 2)
            assert checkpointer.latest_step() == first + 2
        ((step, reason),) = said
        assert step == first + 1
        assert reason.startswith("HostStateError: capture host_state: cannot store")


@pytest.mark.parametrize("reaction", ["save", "exit"])
def test_notice_save_that_cannot_begin_is_told_twice(
    world: World, monkeypatch: pytest.MonkeyPatch, reaction: Literal["save", "exit"]
) -> None:
    """The others would wait for this process until the grace period is over."""
    said = told_of_storage(monkeypatch)
    error = SystemExit if reaction == "exit" else HostStateError
    with contextlib.suppress(SystemExit), world.open_both(on_preemption=reaction) as checkpointer:
        save_all(checkpointer, world, 1)
        checkpointer.request_preemption()
        assert checkpointer.reached_preemption(2)
        with pytest.raises(error):
            checkpointer.save(step=2, state=world.state(2), host_state={1, 2})
        checkpointer.wait_until_finished()
    ((step, reason),) = said
    assert step == 2
    assert reason.startswith("HostStateError: capture host_state: cannot store")
    missed = [event.fields["tier"] for event in world.events if event.name == "preemption.missed"]
    assert sorted(map(str, missed)) == ["local", "persistent"]


def test_listener_that_exits_ends_no_later_save(world: World) -> None:
    """Python ends the thread alone, and without a word."""

    def exit_at_first(event: Event) -> None:
        if event.name == "save.complete" and event.fields["step"] == 1:
            sys.exit("of a listener")

    with world.open(on_event=exit_at_first, save_timeout_s=1.0) as checkpointer:
        assert save(checkpointer, world, 1)
        checkpointer.wait_until_finished(LONG_S)
        checkpointer.check_for_errors()
        save_all(checkpointer, world, 2, 3)
        assert checkpointer.latest_step() == 3
