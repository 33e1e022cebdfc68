"""A job on a fake machine with a DMA of its own: devices copy straight into the slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fake_link import FakeMachine

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import CheckpointError, SaveFailed
from emergency_ckpt.ram.process_directory import ProcessDirectory
from emergency_ckpt.state.link import Link

LONG_S = 60.0


def open_on(machine: FakeMachine, ramdisk: Path) -> EmergencyCheckpointer:
    kind = type("EmergencyCheckpointer", (EmergencyCheckpointer,), {"_link": machine.link()})
    return kind(local_dir=str(ramdisk), run_id="run", local_save_every=1)


def state_at(step: int) -> dict[str, Any]:
    return {"w": jax.device_put(np.full((64, 256), step, np.float32), jax.local_devices()[0])}


@pytest.fixture
def ramdisk(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_saves_go_straight_into_the_mapped_slot(ramdisk: Path) -> None:
    machine = FakeMachine()
    with open_on(machine, ramdisk) as checkpointer:
        checkpointer.restore(state=state_at(0))
        checkpointer.wait_until_finished()
        deadline_s = time.monotonic() + LONG_S
        while len(machine.mapped) < 2:  # both slots, in the background
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        machine.copied.clear()
        for step in range(1, 5):
            checkpointer.save(step=step, state=state_at(step))
            checkpointer.wait_until_finished()
        # The first may come before what was mapped last is known to be.
        assert machine.copied.total() >= 3 * 64 * 256 * 4
        found, restored = checkpointer.restore(state=state_at(0))
        assert found == 4
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.link.way == "direct"
        assert (np.asarray(restored["w"]) == 4).all()
    assert not machine.mapped


def test_restore_into_a_new_process_sends_from_mapped_memory(ramdisk: Path) -> None:
    with open_on(FakeMachine(), ramdisk) as checkpointer:
        checkpointer.restore(state=state_at(0))
        checkpointer.save(step=1, state=state_at(1))
        checkpointer.wait_until_finished()
    machine = FakeMachine()
    link = machine.link()
    sent: list[bool] = []

    class Watched(Link):
        def write(
            self, views: Sequence[np.ndarray], targets: Sequence[jax.sharding.Sharding | None]
        ) -> list[jax.Array]:
            sent.extend(machine.has_mapped(view) for view in views)
            machine.map_gate.set()  # a restore that has not waited ends too
            return super().write(views, targets)

    kind = type(
        "EmergencyCheckpointer",
        (EmergencyCheckpointer,),
        {"_link": Watched(link.facts, machine, link.dma)},
    )
    machine.map_gate.clear()
    slow = threading.Timer(1.0, machine.map_gate.set)
    with kind(local_dir=str(ramdisk), run_id="run", local_save_every=1) as checkpointer:
        slow.start()
        found, restored = checkpointer.restore(state=state_at(0))
        assert found == 1
        assert (np.asarray(restored["w"]) == 1).all()
    slow.join()
    assert sent
    assert all(sent)


def test_lost_device_leaves_the_last_complete_step(ramdisk: Path) -> None:
    machine = FakeMachine()
    device = jax.local_devices()[0]
    with open_on(machine, ramdisk) as checkpointer:
        checkpointer.restore(state=state_at(0))
        for step in range(1, 4):
            checkpointer.save(step=step, state=state_at(step))
            checkpointer.wait_until_finished()
        machine.lost = {device.id}
        checkpointer.save(step=4, state=state_at(4))
        checkpointer.wait_until_finished()
        with pytest.raises(SaveFailed, match="step 4") as failed:
            checkpointer.check_for_errors()
        assert str(device) in str(failed.value)
        machine.lost = set()
        found, restored = checkpointer.restore(state=state_at(0))
        assert found == 3
        assert (np.asarray(restored["w"]) == 3).all()


@pytest.mark.parametrize("way", ["pinned_host", "pageable"])
def test_device_lost_in_a_transfer_leaves_the_last_step(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    settings = {"local_dir": str(ramdisk), "run_id": "run", "local_save_every": 1}
    with EmergencyCheckpointer(**settings, device_reads=way) as checkpointer:
        checkpointer.restore(state=state_at(0))
        checkpointer.save(step=1, state=state_at(1))
        checkpointer.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr("emergency_ckpt.state.staging.begin_transfers", lost)
            checkpointer.save(step=2, state=state_at(2))
            checkpointer.wait_until_finished()
        with pytest.raises(SaveFailed, match=r"step 2.*DEVICE_LOST"):
            checkpointer.check_for_errors()
        found, restored = checkpointer.restore(state=state_at(0))
        assert found == 1
        assert (np.asarray(restored["w"]) == 1).all()


def lost(*_: object) -> list[jax.Array]:
    raise jax.errors.JaxRuntimeError("INTERNAL: DEVICE_LOST")


def test_device_lost_in_a_restore_leaves_the_step(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_on(FakeMachine(), ramdisk) as checkpointer:
        checkpointer.restore(state=state_at(0))
        checkpointer.save(step=1, state=state_at(1))
        checkpointer.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr(Link, "write", lost)
            with pytest.raises(CheckpointError, match="DEVICE_LOST"):
                checkpointer.restore(state=state_at(0))
        found, restored = checkpointer.restore(state=state_at(0))
        assert found == 1
        assert (np.asarray(restored["w"]) == 1).all()


def test_refused_mapping_costs_no_save(ramdisk: Path) -> None:
    machine = FakeMachine()
    link = machine.link()
    machine.limit_bytes = 0
    kind = type("EmergencyCheckpointer", (EmergencyCheckpointer,), {"_link": link})
    machine.copied.clear()
    with kind(local_dir=str(ramdisk), run_id="run", local_save_every=1) as checkpointer:
        checkpointer.restore(state=state_at(0))
        checkpointer.save(step=1, state=state_at(1))
        checkpointer.wait_until_finished()
        checkpointer.check_for_errors()
        found, restored = checkpointer.restore(state=state_at(0))
        assert found == 1
        assert (np.asarray(restored["w"]) == 1).all()
    assert not machine.copied


def test_first_save_without_restore_reserves_its_own_slot_alone(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread reserves none, and the other slots come after that save."""
    makers: list[str] = []
    make_slot = ProcessDirectory.make_slot

    def noted(self: ProcessDirectory, size_bytes: int) -> Any:
        makers.append(threading.current_thread().name)
        return make_slot(self, size_bytes)

    monkeypatch.setattr(ProcessDirectory, "make_slot", noted)
    with open_on(FakeMachine(), ramdisk) as checkpointer:
        checkpointer.save(step=1, state=state_at(1))
        checkpointer.wait_until_finished()
        deadline_s = time.monotonic() + LONG_S
        while len(makers) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert makers == ["eckpt-local-saves", "eckpt-prefault"]
        assert checkpointer.all_steps() == [1]
