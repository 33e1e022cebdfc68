"""The checkpointer in a job of one process: the code of a large one, every promise of its face."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import coordinated_by
from jax.sharding import Mesh
from memory_coordination import MemoryService
from world import LONG_S, World, check_restored, finish, logged, same, save_all, small_tmpfs

from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES
from emergency_ckpt.errors import (
    CheckpointError,
    DeadlineExceeded,
    HostStateError,
    InvalidState,
    LocalTierError,
    RamdiskFull,
    SaveFailed,
    StepNotFound,
)
from emergency_ckpt.events import Event
from emergency_ckpt.observer import JobView, Observer


def test_save_and_restore(world: World) -> None:
    with world.open() as checkpointer:
        assert checkpointer.last_restore is None
        assert (checkpointer.all_steps(), checkpointer.latest_step()) == ([], None)
        save_all(checkpointer, world, 1, 2, 3)
        assert (checkpointer.all_steps(), checkpointer.latest_step()) == ([3], 3)
    with world.open() as checkpointer:
        assert checkpointer.latest_step() == 3
        world.restores(3, host=True, by=checkpointer)
        report = checkpointer.last_restore
        assert report is not None
        assert (report.step, report.tier, report.rejected) == (3, "local", ())
        assert (report.bytes_local, report.bytes_peer) == (128 + 4 + 8, 0)
        assert report.host_state == {"at": 3}


def test_nothing_there_gives_the_state_back(world: World) -> None:
    with world.open() as checkpointer:
        given = world.state(0)
        step, state = checkpointer.restore(state=given)
        assert step is None
        assert state is given


def test_restore_takes_specs(world: World) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
        specs = jax.tree.map(
            lambda x: (
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                if isinstance(x, jax.Array)
                else x
            ),
            world.state(0),
        )
        step, state = checkpointer.restore(state=specs)
        assert step == 1
        assert same(state, world.state(1))


def test_iterator_is_repositioned(world: World) -> None:
    class Batches:
        position = 0

        def get_state(self) -> dict[str, Any]:
            return {"position": self.position, "rng": b"\x00\xff"}

        def set_state(self, state: dict[str, Any]) -> None:
            assert state["rng"] == b"\x00\xff"
            self.position = state["position"]

    batches = Batches()
    with world.open() as checkpointer:
        batches.position = 17
        checkpointer.save(step=1, state=world.state(1), host_state=batches)
        batches.position = 99  # moves on while the save is under way
        checkpointer.wait_until_finished()
        checkpointer.restore(state=world.state(0), host_state=batches)
    assert batches.position == 17


def host_values(step: int) -> dict[str, Any]:
    return {"weights": np.arange(5.0) + step, "step": step}


def plain_state(step: int) -> dict[str, Any]:
    """A state as small programs have it: on the default device, without mesh or sharding."""
    return {
        "weights": jax.random.normal(jax.random.key(step), (7, 3), jnp.bfloat16),
        "count": jnp.int32(step),
        "keys": jax.random.split(jax.random.key(step), 3),
        "none": jnp.zeros((0, 2)),
        "table": np.arange(5) * step,
        "rate": 0.5 * step,
    }


@pytest.mark.dear
@pytest.mark.parametrize("state_of", [host_values, plain_state])
def test_state_without_a_mesh_comes_back_from_each_tier(world: World, state_of: Any) -> None:
    """Of its arrays the restore knows shapes and dtypes only."""
    state, other = state_of(4), state_of(0)
    with world.open_both(mesh=None) as checkpointer:
        assert checkpointer.save(step=4, state=state, host_state={"at": 4})
        finish(checkpointer)
    arrays = {name: value for name, value in other.items() if isinstance(value, jax.Array)}
    specs = {**other, **jax.eval_shape(lambda: arrays)}
    for tier in world.each_tier():
        with world.open_both(mesh=None) as checkpointer:
            host: dict[str, int] = {}
            step, back = checkpointer.restore(state=specs, host_state=host)
            assert (step, host) == (4, {"at": 4})
            assert checkpointer.last_restore is not None
            assert checkpointer.last_restore.tier == tier
            assert same(back, state)


def test_mesh_of_one_slice_comes_back_from_each_tier(world: World) -> None:
    world.mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ("slice", "fsdp"))
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 4)
    check_restored(world, 4)


def test_saves_happen_at_their_intervals_once(world: World) -> None:
    with world.open_both(local_save_every=2, save_every=4) as checkpointer:
        started = []
        for step in (0, 1, 2, 2, 3, 4, 4, 3, 2, 5, 6):
            started.append(checkpointer.save(step=step, state=world.state(step)))
        checkpointer.wait_until_finished()
    yes = [e.fields["step"] for e in world.events if e.name == "save.started"]
    assert started == [True, False, True, False, False, True, False, False, False, False, True]
    assert sorted(yes) == [0, 0, 2, 4, 4, 6]


def test_training_goes_before_saving(world: World) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found: dict[str, int] = {}

    def note(event: Event) -> None:
        found[event.point] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with world.open_both(on_event=note) as checkpointer:
        save_all(checkpointer, world, 1, 2)
    lower = min(before + 10, 19)
    assert found["save.started"] == before
    assert found["save.stage.copied"] == found["persistent.stage.tensors_written"] == lower


def test_force_saves_in_every_tier_that_is_on(world: World) -> None:
    with world.open_both(local_save_every=100, save_every=1000) as checkpointer:
        assert not checkpointer.save(step=7, state=world.state(7))
        assert checkpointer.save(step=7, state=world.state(7), force=True)
        assert not checkpointer.save(step=7, state=world.state(7), force=True), "it is saved"
        with pytest.raises(InvalidState, match=r"step 7, .* is newer"):
            checkpointer.save(step=6, state=world.state(6), force=True)
        finish(checkpointer)
        assert checkpointer.all_steps() == [7]
    world.lose_ram()
    with world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 7
    with world.open(local_save_every=0) as off:
        assert not off.save(step=9, state=world.state(9), force=True)


def test_after_a_restore_the_run_goes_back_and_saves_again(world: World) -> None:
    with world.open_both(save_every=4) as checkpointer:
        save_all(checkpointer, world, 4, 5, 6, 7)
        step, _ = checkpointer.restore(step=4, state=world.state(0))
        assert step == 4
        assert checkpointer.all_steps() == [4]
        assert not checkpointer.save(step=4, state=world.state(4))
        changed = {**world.state(8), "host": -1}
        assert checkpointer.save(step=8, state=changed)
        finish(checkpointer)
        step, state = checkpointer.restore(state=world.state(0))
        assert step == 8
        assert same(state, changed)


def test_step_that_nobody_has(world: World) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1, 2)
        host = {"at": 0}
        with pytest.raises(StepNotFound, match="step 17") as caught:
            checkpointer.restore(step=17, state=world.state(0), host_state=host)
        assert isinstance(caught.value, ValueError)
        assert host == {"at": 0}
        assert checkpointer.restore(state=world.state(0))[0] == 2


def test_restored_memory_may_be_given_away(world: World) -> None:
    """What JAX writes over it with is in no slot."""

    @partial(jax.jit, donate_argnums=0)
    def train(arrays: dict[str, Any]) -> dict[str, Any]:
        return jax.tree.map(lambda x: x * 2 + 1, arrays)

    with world.open() as checkpointer:
        for step in (1, 2):
            save_all(checkpointer, world, step)
            _, state = checkpointer.restore(state=world.state(0))
            del state["host"]
            jax.block_until_ready(train(train(state)))
            found, again = checkpointer.restore(state=world.state(0))
            assert found == step
            assert same(again, world.state(step))
        checkpointer.check_for_errors()


def test_number_that_changes_its_type_is_saved_as_what_it_is(world: World) -> None:
    with world.open() as checkpointer:
        for step, value in enumerate((1, 0.75, True, np.float32(0.5)), start=1):
            checkpointer.save(step=step, state={"best": value})
            checkpointer.wait_until_finished()
            assert checkpointer.restore(state={"best": value})[1] == {"best": value}
        checkpointer.check_for_errors()


def test_host_state_too_large_fails_save_and_not_training(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 1)
        assert checkpointer.save(
            step=2, state=world.state(2), host_state="x" * MAX_HOST_STATE_BYTES
        )
        checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 2
        with pytest.raises(SaveFailed, match=r"step 2.*over the limit"):
            checkpointer.check_for_errors()
        checkpointer.check_for_errors()
        assert checkpointer.latest_step() == 1
        save_all(checkpointer, world, 4)
        assert checkpointer.failed_saves == 2
        assert checkpointer.restore(state=world.state(0))[0] == 4


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"state": {"x": "text"}}, InvalidState),
        ({"state": {"x": 1}, "host_state": object()}, HostStateError),
        ({"state": {"x": np.zeros(2)}, "host_state": {"f": print}}, HostStateError),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    world: World, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with world.open() as checkpointer:
        with pytest.raises(error):
            checkpointer.save(step=1, **arguments)
        save_all(checkpointer, world, 2)


def test_ramdisk_that_is_too_small_stops_before_training(world: World) -> None:
    huge = {"w": jax.ShapeDtypeStruct((1 << 42,), jnp.float32)}
    with world.open() as checkpointer:
        with pytest.raises(RamdiskFull) as caught:
            checkpointer.restore(state=huge)
        assert "free" in str(caught.value)
        save_all(checkpointer, world, 1)


@pytest.mark.parametrize("in_training", [False, True], ids=["at the first save", "later"])
def test_full_ramdisk_fails_the_save_and_never_kills(world: World, in_training: bool) -> None:
    """The file system takes no more: an error of the save, not a SIGBUS, and training goes on."""
    with small_tmpfs(world.ramdisk, size_bytes=5 << 20):
        big = {"w": np.ones(3 << 20, np.uint8)}
        with world.open() as checkpointer:
            if in_training:
                save_all(checkpointer, world, 1)
            with pytest.raises(RamdiskFull):
                checkpointer.save(step=2, state=big)
            for step in (3, 4, 5):
                checkpointer.save(step=step, state=big)
                checkpointer.wait_until_finished()
            with pytest.raises(SaveFailed, match="RamdiskFull"):
                checkpointer.check_for_errors()
            assert checkpointer.failed_saves == 2, "one slot has room, a second has not"
            assert checkpointer.latest_step() == 3
            save_all(checkpointer, world, 6)
            assert checkpointer.restore(state=world.state(0))[0] == 6


def test_nothing_is_saved_or_restored_after_stop(world: World) -> None:
    checkpointer = world.open()
    save_all(checkpointer, world, 1)
    checkpointer.stop()
    checkpointer.stop()
    for call in (
        lambda: checkpointer.save(step=2, state=world.state(2)),
        lambda: checkpointer.restore(state=world.state(0)),
    ):
        with pytest.raises(CheckpointError, match=r"was stopped; build another one"):
            call()
    with world.open() as again:
        assert again.restore(state=world.state(0))[0] == 1


def test_keys_of_restores_and_saves_do_not_pile_up(world: World) -> None:
    service = MemoryService(1)
    with coordinated_by(service), world.open_both() as checkpointer:
        counts: list[int] = []
        for step in range(1, 31):
            save_all(checkpointer, world, step)
            if step % 5 == 0:
                assert checkpointer.restore(state=world.state(0))[0] == step
                counts.append(len(service.values))
    assert max(counts) <= counts[3]


def test_listener_that_raises_disturbs_nobody(world: World) -> None:
    seen: list[str] = []

    def broken(event: Event) -> None:
        seen.append(event.name)
        raise RuntimeError("observer's fault")

    with world.open_both(on_event=broken) as checkpointer:
        save_all(checkpointer, world, 1, 2)
        world.restores(2, by=checkpointer)
    assert {"save.complete", "persistent.complete", "restore.finished"} <= set(seen)


def test_stop_twice_and_by_context(world: World) -> None:
    checkpointer = world.open()
    with checkpointer as entered:
        assert entered is checkpointer
        checkpointer.save(step=1, state=world.state(1))
    checkpointer.stop()
    assert "save.complete" in world.names(), "stop finishes what is under way"
    with world.open() as again:
        assert again.latest_step() == 1


def test_waiting_has_a_deadline(world: World) -> None:
    release = threading.Event()
    entered = threading.Event()

    def slow(event: Event) -> None:
        if event.point == "save.stage.copied":
            entered.set()
            release.wait(LONG_S)

    with world.open(on_event=slow, save_timeout_s=0.05) as checkpointer:
        assert checkpointer.save(step=1, state=world.state(1))
        assert entered.wait(LONG_S)
        for timeout_s in (0, 0.01):
            with pytest.raises(DeadlineExceeded, match="save to the local tier"):
                checkpointer.wait_until_finished(timeout_s)
        assert not checkpointer.save(step=2, state=world.state(2)), "the one before is not done"
        checkpointer.check_for_errors()
        assert not checkpointer.save(step=3, state=world.state(3), force=True)
        release.set()
        checkpointer.wait_until_finished(LONG_S)
        with pytest.raises(SaveFailed, match="step 3 to the local tier"):
            checkpointer.check_for_errors()
        assert checkpointer.latest_step() == 1


def test_steps_without_a_save_do_nothing(world: World) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was used on a step without a save")

    with world.open(local_save_every=10) as checkpointer:
        before = len(world.events)
        for step in range(1, 10):
            assert not checkpointer.save(step=step, state=Untouchable(), host_state=Untouchable())
        assert len(world.events) == before


@pytest.mark.parametrize("of_kind", [np.int64, jnp.int32], ids=["numpy", "jax"])
def test_step_outlives_the_array_that_named_it(world: World, of_kind: Any) -> None:
    """Asked with the step of a state, which the next step of training donates."""

    class Watching(Observer):
        def join(self, job: JobView) -> None:
            self.progress = job.progress

    watching = Watching()
    with world.open(local_save_every=100, on_event=watching) as checkpointer:
        asks = (checkpointer.should_save, checkpointer.reached_preemption)
        for number, ask in enumerate((*asks, *asks), 1):
            step = of_kind(number)
            assert not ask(step)
            if isinstance(step, jax.Array):
                step.delete()
            assert type(watching.progress.read().step) is int


def test_second_checkpointer_of_run_in_one_process_is_error(world: World) -> None:
    """A notebook's cell that is run twice: it must not train from step 1 beside the first."""
    with world.open() as first:
        save_all(first, world, 1)
        with pytest.raises(LocalTierError, match="this process has a checkpointer of that run"):
            world.open()
        save_all(first, world, 2)
    with world.open() as again:
        assert again.restore(state=world.state(0))[0] == 2


def test_save_after_the_ramdisk_was_removed_succeeds(world: World) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1, 2)
        world.lose_ram()
        save_all(checkpointer, world, 3, 4)
        assert checkpointer.failed_saves == 0
    with world.open() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 4


def test_saves_go_on_while_restored_arrays_are_held(world: World) -> None:
    """On a ramdisk with room for two slots, as README asks for."""

    def state(step: int) -> dict[str, Any]:
        return {"w": jnp.full(3 << 20, step, jnp.uint8)}

    with small_tmpfs(world.ramdisk, size_bytes=8 << 20):
        with world.open() as checkpointer:
            for step in (1, 2):
                checkpointer.save(step=step, state=state(step))
                checkpointer.wait_until_finished()
            checkpointer.check_for_errors()
        with world.open() as checkpointer:
            found, held = checkpointer.restore(state=state(0))
            assert found == 2
            for step in (3, 4, 5):
                checkpointer.save(step=step, state=state(step))
                checkpointer.wait_until_finished()
            checkpointer.check_for_errors()
            assert same(held, state(2))
            assert checkpointer.latest_step() == 5


def test_no_restored_array_is_in_the_slot(world: World) -> None:
    state = {"w": jnp.full(1 << 20, 1, jnp.uint8)}
    with world.open() as checkpointer:
        checkpointer.save(step=1, state=state)
        checkpointer.wait_until_finished()
    with world.open() as checkpointer:
        _, held = checkpointer.restore(state=state)
        (path,) = world.ramdisk.glob("run/process_00000/slot_0.bin")
        assert path.stat().st_size == 1 << 20
        lines = Path("/proc/self/maps").read_text().splitlines()
        maps = [line.split() for line in lines if line.endswith(str(path))]
        spans = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in maps]
        at = held["w"].unsafe_buffer_pointer()
        assert spans
        assert not any(start <= at < end for start, end in spans)


def test_restore_without_the_host_state_of_the_step_warns_once(world: World) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
    with world.open() as checkpointer, logged() as lines:
        assert checkpointer.restore(state=world.state(0))[0] == 1
        assert checkpointer.restore(state=world.state(0), tensors_only=True)[0] == 1
        assert checkpointer.restore(state=world.state(0), host_state={})[0] == 1
    said = [line for line in lines if "host_state" in line]
    assert len(said) == 1
    assert "step 1 has a host_state" in said[0]
    assert "from the beginning" in said[0]
    assert len(world.named("warning", cause="restore_without_host_state")) == 1


@pytest.mark.dear
def test_restore_from_storage_without_its_host_state_warns_once(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 1, 2)
    world.lose_ram()
    with world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 2
    assert len(world.named("warning", cause="restore_without_host_state")) == 1


def test_save_without_the_host_state_given_to_restore_warns_once(world: World) -> None:
    """The loop trains on with the iterator, and a restart would begin its data anew."""
    with world.open() as checkpointer:
        checkpointer.restore(state=world.state(0), host_state={"at": 0})
        with logged() as lines:
            for step in (1, 2):
                assert checkpointer.save(step=step, state=world.state(step))
    assert sum("saved without a host_state" in line for line in lines) == 1
    assert [e.fields["step"] for e in world.named("warning", cause="save_without_host_state")] == [
        1
    ]


@pytest.mark.parametrize("given", [{"at": 0}, None])
def test_save_with_the_host_state_given_to_restore_says_nothing(
    world: World, given: dict[str, int] | None
) -> None:
    with world.open() as checkpointer:
        checkpointer.restore(state=world.state(0), host_state=given)
        assert checkpointer.save(step=1, state=world.state(1), host_state=given)
    assert not world.named("warning", cause="save_without_host_state")


def test_restore_of_a_step_without_host_state_says_nothing(world: World) -> None:
    with world.open() as checkpointer:
        assert checkpointer.save(step=1, state=world.state(1))
    with world.open() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 1
    assert not world.named("warning", cause="restore_without_host_state")
