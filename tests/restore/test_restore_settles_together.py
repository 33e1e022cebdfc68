"""What a restore still does after its verdict: an error there is told to all, or ends nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest
from memory_coordination import MemoryService
from world import World, save_all

from emergency_ckpt.cluster.preemption import PreemptionWatch
from emergency_ckpt.cluster.round import run_on_all
from emergency_ckpt.errors import CheckpointError, LocalTierError, RamdiskFull
from emergency_ckpt.ram import LocalTier
from emergency_ckpt.types import SaveId

LONG_S = 60.0


def broken_push() -> NoReturn:
    raise OSError("no more threads")


def full_ramdisk() -> NoReturn:
    raise RamdiskFull("write", "ledger.json", "no space left")


@pytest.mark.parametrize("fails", [broken_push, full_ramdisk])
def test_what_one_process_fails_with_reaches_the_others_at_once(
    fails: Callable[[], NoReturn],
) -> None:
    """Whatever kind of error it is: the others get its text, not their deadline."""
    service = MemoryService(2)
    watches = [PreemptionWatch(None, grace_s=1.0) for _ in range(2)]

    def one(process: int) -> str:
        work = fails if process == 1 else lambda: None
        try:
            member = service.member(process)
            return run_on_all(member, "ready", work, watches[process], LONG_S)
        except CheckpointError as error:
            return f"own {error}"
        finally:
            watches[process].close()

    with ThreadPoolExecutor(2) as pool:
        told, own = pool.map(one, range(2))
    assert told.startswith("process 1: ")
    text = "no more threads" if fails is broken_push else "no space left"
    assert text in told
    assert own.startswith("own ")
    assert text in own


def test_full_ramdisk_keeps_nobody_from_what_ram_holds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of what is complete finds no room; the step needs none."""
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)

    def refuse(tier: LocalTier, save: SaveId, **noted: object) -> None:
        full_ramdisk()

    with world.open() as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(LocalTier, "note_complete", refuse)
            step, _ = checkpointer.restore(state=world.state(0))
        assert step == 1
        notes = [event.fields["text"] for event in world.events if event.name == "restore.note"]
        assert len(notes) == 1
        assert "no space left" in str(notes[0])
        save_all(checkpointer, world, 2)
    with world.open() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 2


@pytest.mark.parametrize("found", [True, False], ids=["a step", "nothing"])
def test_leftovers_that_cannot_be_forgotten_are_an_error_for_all(
    world: World, monkeypatch: pytest.MonkeyPatch, *, found: bool
) -> None:
    """Raised before it, it would be raised by this process alone, and the others would wait."""
    if found:
        with world.open() as checkpointer:
            save_all(checkpointer, world, 1)
    in_round: list[bool] = []

    def refuse(tier: LocalTier, than: SaveId, timeline: object = None) -> None:
        in_round.append(asked[-1:] == ["working"])
        raise LocalTierError("invalidate in", "run", "no space left")

    asked: list[str] = []

    def watched(
        coordinator: object,
        name: str,
        work: Callable[[], object],
        watch: PreemptionWatch,
        timeout_s: float,
        series: object,
    ) -> str:
        def noted() -> None:
            asked.append("working")
            try:
                work()
            finally:
                asked.append("told")

        return run_on_all(coordinator, name, noted, watch, timeout_s, series)  # type: ignore[arg-type]

    host = {"at": 0}
    with world.open() as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(LocalTier, "invalidate_newer", refuse)
            patch.setattr("emergency_ckpt.resume.run_on_all", watched)
            with pytest.raises(LocalTierError):
                checkpointer.restore(state=world.state(0), host_state=host)
        assert in_round == [True]
        assert asked == ["working", "told"]
        assert host == {"at": 0}, "as it was before"
        assert checkpointer.restore(state=world.state(0))[0] == (1 if found else None)


@pytest.mark.parametrize("asked", [4, None], ids=["by its number", "newest"])
def test_saves_after_a_restore_that_failed_late_count(
    world: World, monkeypatch: pytest.MonkeyPatch, asked: int | None
) -> None:
    """The loop goes on from its own state: no save of it belongs to the life that never began."""
    with world.open_both(save_every=2) as checkpointer:
        save_all(checkpointer, world, *range(1, 6))

        def refuse(tier: LocalTier, size_bytes: int) -> NoReturn:
            raise LocalTierError("reserve", "run", "no such device")

        with monkeypatch.context() as patch:
            patch.setattr(LocalTier, "check_reservable", refuse)
            with pytest.raises(LocalTierError):
                checkpointer.restore(asked, state=world.state(0))
        save_all(checkpointer, world, *range(6, 9))
    world.restores(8, host=True)
    world.lose_ram()
    world.restores(8, host=True)
