"""One capture of a step for both tiers, whatever becomes of either save meanwhile."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from faults import CopiesOnDevices, DeviceTransfers, SlowStorage, copies_to_slots_fail
from world import LONG_S, World, finish, same

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.errors import CheckpointError, PersistentTierError, SlotBusy
from emergency_ckpt.ram import LocalTier
from emergency_ckpt.save import Ballot, Vote
from emergency_ckpt.storage import PersistentTier

STAGED: dict[str, Any] = {"device_reads": "pinned_host"}
SMALL = Buffers(40)
MODES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cpu, device copies": {"device_copy_bytes": 40},
    "staged": STAGED,
    "staged in parts": {**STAGED, "buffers": SMALL},
    "pageable": {"device_reads": "pageable", "buffers": SMALL},
    "device copies": {**STAGED, "device_copy_bytes": 1 << 20},
    "device copies of some": {**STAGED, "buffers": SMALL, "device_copy_bytes": 40},
}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
DISTINCT_SHARDS = 6
"""Four parts of ``w``, ``empty`` and ``step``; ``host`` is on no device."""


@partial(jax.jit, donate_argnums=0)
def overwrite(arrays: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda x: x * 0 - 1, arrays)


def save(checkpointer: EmergencyCheckpointer, world: World, step: int, **settings: Any) -> bool:
    """Save ``step``, then give its arrays to the next step at once."""
    state = world.state(step)
    saved = checkpointer.save(step=step, state=state, host_state={"at": step}, **settings)
    give_away(state)
    return saved


def give_away(state: dict[str, Any]) -> None:
    arrays = {name: value for name, value in state.items() if name != "host"}
    jax.block_until_ready(overwrite(arrays))


def check_stored(world: World, step: int) -> None:
    """Storage alone has ``step`` with the bits of its capture."""
    world.lose_ram()
    world.restores(step, host=True)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStorage]:
    storage = SlowStorage(monkeypatch)
    yield storage
    storage.go_on.set()


def sources(world: World) -> list[object]:
    events = [event for event in world.events if event.point == "persistent.stage.captured"]
    return [event.fields["source"] for event in events]


def slots_of(world: World) -> int:
    return len(list(world.ramdisk.rglob("slot_*.bin")))


@pytest.mark.parametrize(
    ("local_every", "steps", "source"),
    [(1, [1, 2, 3, 4, 5, 6], ["slot"] * 3), (0, [2, 4], ["scratch"] * 2)],
    ids=["both_tiers", "persistent_alone"],
)
def test_each_shard_leaves_its_device_once(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    local_every: int,
    steps: list[int],
    source: list[str],
) -> None:
    transfers = DeviceTransfers(monkeypatch)
    with world.open_both(local_save_every=local_every, **STAGED) as checkpointer:
        for step in steps:
            assert save(checkpointer, world, step)
            checkpointer.wait_until_finished()
            assert transfers.take() == DISTINCT_SHARDS
        checkpointer.check_for_errors()
    assert sources(world) == source
    check_stored(world, steps[-1])


def test_preemption_saves_one_capture_in_both_tiers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = DeviceTransfers(monkeypatch)
    with world.open_both(save_every=100, **STAGED) as checkpointer:
        assert save(checkpointer, world, 1)
        checkpointer.wait_until_finished()
        transfers.take()
        os.kill(os.getpid(), signal.SIGTERM)
        assert save(checkpointer, world, 2)
        checkpointer.wait_until_finished()
        assert transfers.take() == DISTINCT_SHARDS
        checkpointer.check_for_errors()
    assert sources(world) == ["slot"]
    check_stored(world, 2)


def save_locally(checkpointer: EmergencyCheckpointer, world: World, *steps: int) -> None:
    for step in steps:
        assert save(checkpointer, world, step)
        world.wait_for("save.complete", step=step)


@each_mode
def test_both_tiers_have_the_bits_of_the_captured_step(
    world: World, slow: SlowStorage, mode: dict[str, Any]
) -> None:
    """The state is overwritten at once; slots are used again while storage reads one."""
    with world.open_both(**mode) as checkpointer:
        state = world.state(2)
        assert checkpointer.save(step=2, state=state, host_state={"at": 2})
        give_away(state)
        # Where JAX hands out the array's own memory, the step could not have it yet.
        staged = mode.get("device_reads") == "pinned_host"
        assert state["w"].is_deleted() or not staged
        assert slow.reached.wait(LONG_S)
        save_locally(checkpointer, world, 3, 5, 7, 9)
        slow.go_on.set()
        finish(checkpointer)
    assert sources(world) == ["slot"]
    with world.open_both() as checkpointer:
        found, state = checkpointer.restore(state=world.state(0))
        assert found == 9
        assert same(state, world.state(9))
    check_stored(world, 2)


@each_mode
def test_storage_alone_gets_the_bits_from_memory_of_its_own(
    world: World, slow: SlowStorage, mode: dict[str, Any]
) -> None:
    with world.open_both(local_save_every=0, **mode) as checkpointer:
        assert save(checkpointer, world, 2)
        assert slow.reached.wait(LONG_S)
        slow.go_on.set()
        finish(checkpointer)
    assert sources(world) == ["scratch"]
    check_stored(world, 2)


@pytest.mark.parametrize("settings", [{"local_save_every": 0}, {"local_save_every": 2}])
def test_copies_on_devices_begin_without_a_setting(
    world: World, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The first interval shows what is free; the program that copies is made after its save."""
    copies = CopiesOnDevices(monkeypatch, 1 << 20)
    made: list[int] = []
    with world.open_both(**settings, **STAGED) as checkpointer:
        for step in (2, 4, 6, 8):
            assert save(checkpointer, world, step)
            checkpointer.wait_until_finished()
            made.append(copies.take())
        checkpointer.check_for_errors()
    not_empty = DISTINCT_SHARDS - 1
    assert made == [0, 0, not_empty, not_empty]
    check_stored(world, 8)


def test_storage_that_hangs_leaves_local_saves_enough_slots(
    world: World, slow: SlowStorage
) -> None:
    with world.open_both(**STAGED) as checkpointer:
        save_locally(checkpointer, world, 1, 2)
        assert slow.reached.wait(LONG_S)
        save_locally(checkpointer, world, *range(3, 23, 2))
        assert slots_of(world) == 3
        slow.go_on.set()
        checkpointer.wait_until_finished()
        save_locally(checkpointer, world, 23, 25)
        assert slots_of(world) == 3
        checkpointer.check_for_errors()
        assert checkpointer.failed_saves == 0
    with world.open(**STAGED) as checkpointer:  # without storage the third slot goes
        assert checkpointer.restore(state=world.state(0), host_state={"at": 0})[0] == 25
        save_locally(checkpointer, world, 26, 27)
        assert slots_of(world) == 2


def test_without_a_third_slot_storage_gets_a_copy(
    world: World, slow: SlowStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.open_both(**STAGED) as checkpointer:
        monkeypatch.setattr(LocalTier, "plan_saves", lambda *_, **__: None)
        save_locally(checkpointer, world, 1, 2)
        assert slow.reached.wait(LONG_S)
        save_locally(checkpointer, world, *range(3, 13, 2))
        assert slots_of(world) == 2
        slow.go_on.set()
        finish(checkpointer)
    assert sources(world) == ["scratch"]
    check_stored(world, 2)


@each_mode
def test_save_without_a_slot_leaves_its_capture_to_storage(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise SlotBusy("begin write of", "step 2", "both slots are read")

    transfers = DeviceTransfers(monkeypatch)
    with world.open_both(**mode) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(LocalTier, "begin_write", refuse)
            assert save(checkpointer, world, 2)
            checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 1
        assert transfers.take() <= DISTINCT_SHARDS
        save_locally(checkpointer, world, 3)
    check_stored(world, 2)


def test_copy_that_fails_midway_fails_both_and_frees_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.open_both(**STAGED) as checkpointer:
        with monkeypatch.context() as patch:
            copies_to_slots_fail(patch)
            assert save(checkpointer, world, 2)
            checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 2
        for step in (4, 6):
            save_locally(checkpointer, world, step)
            checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 2
        assert slots_of(world) == 3
    check_stored(world, 6)


def test_slot_of_a_failed_vote_stays_until_storage_has_it(
    world: World, slow: SlowStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing protects that slot but the pin: the next local save would take it first."""
    cast = Vote.cast

    def refuse_step_2(self: Vote, saved: Any, ballot: Ballot, **how: bool) -> Any:
        ballot = Ballot(refused="as a test") if saved.step == 2 else ballot
        return cast(self, saved, ballot, **how)

    monkeypatch.setattr(Vote, "cast", refuse_step_2)
    with world.open_both(**STAGED) as checkpointer:
        save_locally(checkpointer, world, 1)
        assert save(checkpointer, world, 2)
        assert slow.reached.wait(LONG_S)
        world.wait_for("save.incomplete", step=2)
        save_locally(checkpointer, world, 3, 5, 7)
        slow.go_on.set()
        checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 1
    check_stored(world, 2)


@pytest.mark.dear
def test_failed_persistent_saves_give_their_memory_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []

    def fail(tier: Any, saved: Any, tree: Any, shards: Any, *_: Any, **__: Any) -> None:
        held.append(shards)  # as a client of storage that was given up, and still reads
        raise PersistentTierError("save", "step", "storage failed")

    with world.open_both(local_keep_last_n=1, **STAGED) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(PersistentTier, "write_tensors", fail)
            for step in (2, 4, 6):
                assert save(checkpointer, world, step, force=True)
                checkpointer.wait_until_finished()
                save_locally(checkpointer, world, step + 1)
            assert slots_of(world) == 3
            assert sources(world) == ["slot", "scratch", "scratch"]
            assert save(checkpointer, world, 8, force=True)  # no memory is left for it
            checkpointer.wait_until_finished()
            save_locally(checkpointer, world, 9)
            assert sources(world) == ["slot", "scratch", "scratch"]
            for shards, step in zip(held, (2, 4, 6), strict=True):
                parts = [each.view for shard, each in shards.items() if shard.leaf == "w"]
                assert parts
                for part in parts:
                    assert any(
                        np.array_equal(part, want)
                        for want in np.asarray(world.state(step)["w"]).reshape(4, 2, 4)
                    )
            held.clear()
            del shards, parts, part
            gc.collect()
        assert save(checkpointer, world, 10, force=True)
        checkpointer.wait_until_finished()
        save_locally(checkpointer, world, 11)
        assert slots_of(world) == 3
    assert sources(world)[-1] == "slot"
    check_stored(world, 10)


def test_damaged_slot_does_not_make_a_wrong_step_in_storage(
    world: World, slow: SlowStorage
) -> None:
    """The marker has the checksums of the capture, whatever became of the memory since."""
    with world.open_both(**STAGED) as checkpointer:
        save_locally(checkpointer, world, 1)
        assert save(checkpointer, world, 2)
        assert slow.reached.wait(LONG_S)
        world.wait_for("save.complete", step=2)
        want = np.asarray(world.state(2)["w"]).tobytes()[:16]
        for path in world.ramdisk.rglob("slot_*.bin"):
            if (at := path.read_bytes().find(want)) >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(b"\xff")
        slow.go_on.set()
        checkpointer.wait_until_finished()
        save_locally(checkpointer, world, 3)
    world.lose_ram()
    with world.open_both() as checkpointer, pytest.raises(CheckpointError, match="2"):
        checkpointer.restore(state=world.state(0), host_state={"at": 0}, step=2)


def test_persistent_save_that_is_skipped_keeps_no_slot(world: World, slow: SlowStorage) -> None:
    with world.open_both(storage_wait_timeout_s=0.001, **STAGED) as checkpointer:
        assert save(checkpointer, world, 2)
        assert slow.reached.wait(LONG_S)
        save_locally(checkpointer, world, 4, 6, 8, 10)
        assert slots_of(world) == 3
        slow.go_on.set()
        checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 4
    check_stored(world, 2)
