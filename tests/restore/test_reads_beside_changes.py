"""Files of a step that change between the look at them and the reads of their bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import World, save_all

from emergency_ckpt.ram import LocalTier
from emergency_ckpt.storage.chunks import ChunkIndex


def after_the_index(monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], None]) -> None:
    """Do ``work`` once, with the item's folder, when its index was read."""
    read: Callable[..., Any] = ChunkIndex.open
    done: list[str] = []

    def read_and_work(item: str, progress: Any) -> Any:
        index = read(item, progress)
        assert index is not None
        if not done:
            done.append(item)
            work(Path(item))
        return index

    monkeypatch.setattr(ChunkIndex, "open", read_and_work)


def data_file(item: Path) -> Path:
    """Return the file with the most chunks."""
    return max(item.glob("**/d/*"), key=lambda path: path.stat().st_size)


def cut(item: Path) -> None:
    os.truncate(data_file(item), 1)


def flip(item: Path) -> None:
    path = data_file(item)
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(each ^ 0x10 for each in data))


def remove_file(item: Path) -> None:
    data_file(item).unlink()


def remove_step(item: Path) -> None:
    shutil.rmtree(item.parent)


def table(step: int) -> np.ndarray:
    """Return an array of several chunks' bytes, which are not kept in the index."""
    return np.random.default_rng(step).integers(0, 1 << 30, (64, 64))


@pytest.fixture
def stored(world: World) -> World:
    """Steps 2 and 4 in storage, in chunks that are not inlined; nothing in RAM."""
    world.more = lambda step: {"table": table(step)}
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4)
    world.lose_ram()
    world.events.clear()
    return world


@pytest.mark.dear
@pytest.mark.parametrize("work", [cut, flip, remove_file, remove_step])
def test_restore_of_a_step_changed_meanwhile_is_of_the_older(
    stored: World, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], None]
) -> None:
    after_the_index(monkeypatch, work)
    with stored.open_both() as checkpointer:
        _held = stored.restores(2, host=True, by=checkpointer)
        assert [e.fields["step"] for e in stored.events if e.name == "restore.rejected"] == [4]
        save_all(checkpointer, stored, 4)
    stored.lose_ram()
    stored.restores(4, host=True)


def test_reader_whose_step_retention_removes_takes_the_newer(
    stored: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job reads; the one that saves keeps one step, and removes what is being read."""

    def save_newer(item: Path) -> None:
        with stored.open_both(keep_last_n=1) as checkpointer:
            assert checkpointer.restore(state=stored.state(0), host_state={})[0] == 4
            save_all(checkpointer, stored, 6)
        assert not item.exists()

    after_the_index(monkeypatch, save_newer)
    reader = {"local_dir": str(stored.ramdisk.with_name("reader")), "save_every": 0}
    stored.restores(6, host=True, **reader)


def slot_of(world: World, step: int) -> Path:
    """Return the file of the slot that has a step."""
    manifests = world.ramdisk.rglob("slot_*.manifest.json")
    (manifest,) = [path for path in manifests if f'"step":{step}' in path.read_text()]
    return manifest.with_name(manifest.name.replace(".manifest.json", ".bin"))


@pytest.mark.parametrize("call", ["verify", "reading"])
def test_slot_cut_after_the_choice_is_a_failed_copy(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The step before it is restored instead, and no process sees an error."""
    with world.open_both(save_every=0) as checkpointer:
        save_all(checkpointer, world, 1, 2)
    original: Callable[..., Any] = getattr(LocalTier, call)
    cuts: list[Path] = []

    def cut_first(tier: LocalTier, digest: str, *rest: Any) -> Any:
        if not cuts:
            cuts.append(slot_of(world, 2))
            # By one byte, so that a read of the slot would not end the tests by SIGBUS.
            os.truncate(cuts[0], cuts[0].stat().st_size - 1)
        return original(tier, digest, *rest)

    monkeypatch.setattr(LocalTier, call, cut_first)
    _held = world.restores(1, host=True)
    assert cuts
    assert [event.fields["step"] for event in world.named("restore.rejected")] == [2]
