"""Storage that refuses: the true error at once, then a pause, and one line in the log."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import fill_disk, storage_fails
from mounts import make_read_only
from orbax.checkpoint import checkpoint_managers as ocm
from world import (
    LONG_S,
    STORAGE,
    World,
    finish,
    logged,
    same,
    save_all,
    small_tmpfs,
    storage_lacks,
)

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.background import BackgroundWorker, Failures, run_in_thread
from emergency_ckpt.config import Config
from emergency_ckpt.config.policies import plan_saves
from emergency_ckpt.core.save.announcements import Progress
from emergency_ckpt.core.step_log import Table
from emergency_ckpt.errors import PersistentTierError, SaveFailed
from emergency_ckpt.observer import AtStep, JobView, Observer, StepProgress
from emergency_ckpt.save.persistent.rounds import SaveLeftOut, StageReport
from emergency_ckpt.save.persistent.save import PersistentSave, PersistentSaves
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.save.vote import LEARNED_LATE
from emergency_ckpt.storage import PersistentTier, StepLog, StorageDirectory


@pytest.fixture
def read_only(world: World) -> Iterator[str]:
    """A directory on a file system that turned read-only."""
    disk = world.persistent.parent / "disk"
    with small_tmpfs(disk, 16 << 20):
        (disk / "run").mkdir()
        make_read_only(disk)
        yield str(disk / "run")


@pytest.fixture
def refused(world: World) -> str:
    """A directory that cannot be made: a file is in its place."""
    blocker = world.persistent.parent / "file"
    blocker.write_text("")
    return str(blocker / "dir")


def test_save_read_only_storage_fails_at_once(world: World, read_only: str) -> None:
    """Else the save is tried again and again for the whole timeout, and the wait fails."""
    with world.open_both(dir=read_only, total_timeout_s=LONG_S) as checkpointer:
        assert checkpointer.save(step=2, state=world.state(2))
        checkpointer.wait_until_finished(LONG_S / 4)
        with pytest.raises(SaveFailed, match="Read-only"):
            checkpointer.check_for_errors()


def test_save_full_storage_fails_with_a_hint(world: World) -> None:
    disk = world.persistent.parent / "disk"
    with (
        small_tmpfs(disk, 1 << 20),
        world.open_both(dir=str(disk / "run"), total_timeout_s=LONG_S) as checkpointer,
    ):
        fill_disk(disk / "other")
        assert checkpointer.save(step=2, state=world.state(2))
        checkpointer.wait_until_finished(LONG_S / 4)
        with pytest.raises(SaveFailed, match=r"No space left on device.*make room"):
            checkpointer.check_for_errors()


def test_version_of_the_log_counts_without_its_hint(tmp_path: Path) -> None:
    """The disk has room for the version alone."""
    disk, life = tmp_path / "disk", "000000000001-aaaaaaaaaaaaaaaa"
    with small_tmpfs(disk, 1 << 20):
        log = StepLog(StorageDirectory(str(disk), LONG_S))
        assert log.append(Table(1, "run", False, life))
        fill_disk(disk / "other")
        os.truncate(disk / "other", (disk / "other").stat().st_size - mmap.PAGESIZE)
        with logged() as lines:
            written = log.append(Table(2, "run", False, life))
        assert written is not None
        assert (written.number, log.seen.number) == (2, 2)
        (line,) = lines
        assert "newest" in line
        assert "No space left on device" in line
        assert StepLog(StorageDirectory(str(disk), LONG_S)).read().number == 2


def test_save_that_failed_to_be_listed_is_listed_by_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are whole, and only the version of the log that names it was refused."""
    with world.open_both(**STORAGE) as checkpointer:
        save_all(checkpointer, world, 2)
        storage_fails(monkeypatch, "publish", once=True)
        assert checkpointer.save(step=4, state=world.state(4))
        with pytest.raises(SaveFailed, match="storage failed"):
            finish(checkpointer)
        save_all(checkpointer, world, 5)
        table = PersistentTier(str(world.persistent)).found.log.read().table
    assert table is not None
    assert [entry.step for entry in table.counting()] == [2, 4, 5]


@pytest.mark.dear
def test_save_after_failures_pauses_and_recovers(world: World, refused: str) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
    with world.open_both(dir=refused, save_every=1) as checkpointer:
        with pytest.raises(PersistentTierError):
            checkpointer.check_for_errors()
        checkpointer.check_for_errors()  # it is told once
        found, state = checkpointer.restore(state=world.state(0))
        assert found == 1
        assert same(state, world.state(1))
        for step in range(2, 202):
            checkpointer.save(step=step, state=world.state(step))
            checkpointer.wait_until_finished(LONG_S)
        with pytest.raises(SaveFailed, match="to the persistent tier"):
            checkpointer.check_for_errors()
        checkpointer.check_for_errors()
        # The pauses double: ten failures would take four minutes.
        tried, skipped = world.names().count("persistent.failed"), _skipped(world)
        assert 1 <= tried < 10
        assert tried + len(skipped) == 200
        assert world.names().count("save.complete") == 201, "RAM pauses for nothing"
        Path(refused).parent.unlink()
        assert checkpointer.save(step=202, state=world.state(202), force=True)
        checkpointer.wait_until_finished(LONG_S)
        assert checkpointer.save(step=203, state=world.state(203))
        checkpointer.wait_until_finished(LONG_S)
        assert _skipped(world) == skipped, "forced saves know no pause, and a success ends it"
    assert {202, 203} <= {
        event.fields["step"] for event in world.events if event.name == "persistent.complete"
    }


def _skipped(world: World) -> list[object]:
    return [event.fields["step"] for event in world.named("save.skipped", cause="paused")]


def test_saves_for_which_a_process_was_late_make_no_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All leave such a save out, and the leader announces that save once more at once."""
    take_part, late = PersistentSaves._save, iter(range(4))

    def left_out(saves: PersistentSaves, job: PersistentSave) -> StageReport:
        if next(late, None) is not None:
            raise SaveLeftOut("save", f"step {job.save.step}", LEARNED_LATE, cause="late")
        return take_part(saves, job)

    monkeypatch.setattr(PersistentSaves, "_save", left_out)
    with world.open_both(save_every=1, local_save_every=0) as checkpointer:
        save_all(checkpointer, world, 1, 2, 3, 4, 5)
        assert len(world.named("save.skipped", cause="late")) == 4
        assert _skipped(world) == []
        assert checkpointer.all_steps() == [5]


def test_schedule_in_a_pause_announces_no_step() -> None:
    plan = plan_saves(ocm.ContinuousCheckpointingPolicy())
    schedule = TierSchedule("persistent", plan, Failures())
    progress = Progress(step=5, arrived_s=time.monotonic(), step_time_s=0.01)
    try:
        assert schedule.choose_step(progress, 6, 0.01, others_save=False) is not None
        for _ in range(8):  # a pause of a minute
            schedule.note_outcome(failed=True)
        assert schedule.choose_step(progress, 6, 0.01, others_save=False) is None
        schedule.note_outcome(failed=False)
        assert schedule.choose_step(progress, 6, 0.01, others_save=False) is not None
    finally:
        schedule.worker.stop(LONG_S)


def test_failures_repeated_are_logged_once(world: World, refused: str) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 0)
    with (
        logged() as lines,
        storage_lacks(40),
        world.open_both(dir=refused, local_save_every=0) as checkpointer,
    ):
        checkpointer.restore(state=world.state(0))
        for step in range(1, 41):
            checkpointer.save(step=step, state=world.state(step), force=True)
            checkpointer.wait_until_finished(LONG_S)
        assert checkpointer.failed_saves == 41, "and one at the start"
    failures = [line for line in lines if "Not a directory" in line]
    assert [line.split(":", maxsplit=1)[0] for line in failures] == [
        "persistent.problem.unreachable",
        f"create {refused}",
        "persistent.problem.unreachable",  # of the restore
        "save step 1 to the persistent tier",
    ]


class Hang:
    """Storage that gives no answer to the first save of a life until ``answers`` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.waits_s: list[float] = []
        """Maximum wait of each call of the training thread for the save under way."""
        self.is_waited_for = threading.Event()
        write, wait_idle = PersistentTier.write_document, BackgroundWorker.wait_idle

        def hang(tier: PersistentTier, step: int, owner: int, count: int, data: bytes) -> None:
            assert self.answers.wait(LONG_S)
            write(tier, step, owner, count, data)

        def note(worker: BackgroundWorker, timeout_s: float) -> bool:
            self.waits_s.append(timeout_s)
            if timeout_s > 0:
                self.is_waited_for.set()
            return wait_idle(worker, timeout_s)

        patch.setattr(PersistentTier, "write_document", hang)
        patch.setattr(BackgroundWorker, "wait_idle", note)


@contextlib.contextmanager
def hung(
    world: World, patch: pytest.MonkeyPatch, storage_wait_timeout_s: float, **more: Any
) -> Iterator[tuple[EmergencyCheckpointer, Hang]]:
    """A life whose first save, of step 1, hangs in storage. ``more``: settings."""
    wait = {"storage_wait_timeout_s": storage_wait_timeout_s}
    settings = {"local_save_every": 0, "save_every": 1, **wait, **more}
    with world.open_both(**settings) as checkpointer:
        hang = Hang(patch)
        assert checkpointer.save(step=1, state=world.state(1))
        hang.waits_s.clear()
        hang.is_waited_for.clear()
        try:
            yield checkpointer, hang
        finally:
            hang.answers.set()
        checkpointer.wait_until_finished(LONG_S)


def test_save_by_default_does_not_wait_for_storage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hung(world, monkeypatch, Config().storage_wait_timeout_s) as (checkpointer, hang):
        for step in (2, 3, 4):
            assert not checkpointer.save(step=step, state=world.state(step))
        assert hang.waits_s == [0, 0, 0]
    skipped = [event.fields for event in world.named("save.skipped", cause="busy")]
    assert [each["step"] for each in skipped] == [2, 3, 4]
    assert {each["reason"] for each in skipped} == {"the previous save is still under way"}
    assert world.names().count("persistent.complete") == 1


def test_forced_save_by_default_waits_for_storage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hung(world, monkeypatch, Config().storage_wait_timeout_s) as (checkpointer, hang):

        def answer_once_waited_for() -> None:
            assert hang.is_waited_for.wait(LONG_S)
            hang.answers.set()

        answering = run_in_thread("answer", answer_once_waited_for)
        assert checkpointer.save(step=2, state=world.state(2), force=True)
        answering.result()
    assert not world.named("save.skipped", cause="busy")
    assert world.names().count("persistent.complete") == 2


def test_save_waits_once_for_a_save_that_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hung(world, monkeypatch, 0.25) as (checkpointer, hang):
        for step in (2, 3, 4):
            assert not checkpointer.save(step=step, state=world.state(step))
        assert hang.waits_s == [0.25, 0, 0]
    assert len(world.named("save.skipped", cause="busy")) == 3
    assert world.names().count("persistent.complete") == 1


class Seen(Observer):
    """Sees where the training thread is: also whenever its host state is captured."""

    progress: StepProgress
    wait: AtStep

    def __init__(self) -> None:
        self.captures: list[AtStep] = []

    def join(self, job: JobView) -> None:
        self.progress = job.progress

    def get_state(self) -> int:
        self.captures.append(self.progress.read())
        return 0

    def set_state(self, state: int) -> None:
        """Nothing is kept."""

    def look_at_wait(self, hang: Hang) -> None:
        """Note where the training thread waits for storage, which answers then."""
        assert hang.is_waited_for.wait(LONG_S)
        self.wait = self.progress.read()
        hang.answers.set()


def test_save_may_wait_longer_for_storage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang watch lets the longer time count only while storage is waited for."""
    seen = Seen()
    with hung(world, monkeypatch, 10 * LONG_S, on_event=seen) as (checkpointer, hang):
        looking = run_in_thread("look", lambda: seen.look_at_wait(hang))
        assert checkpointer.save(step=2, state=world.state(2), host_state=seen)
        looking.result()
    (capture,) = seen.captures
    assert (seen.wait.call, seen.wait.call_limit_s) == ("save", 10 * LONG_S)
    assert (capture.call, capture.call_limit_s) == ("save", 3 * LONG_S)
    assert seen.progress.read().call == ""


def test_save_may_wait_long_for_its_own_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    settings = {"local_save_every": 0, "save_every": 1, "storage_wait_timeout_s": 0.0}
    with world.open_both(async_save=False, on_event=seen, **settings) as checkpointer:
        hang = Hang(monkeypatch)
        looking = run_in_thread("look", lambda: seen.look_at_wait(hang))
        assert checkpointer.save(step=1, state=world.state(1), host_state=seen)
        looking.result()
    (capture,) = seen.captures
    longest_s = 4 * LONG_S + 3 * Config().total_timeout_s
    assert (seen.wait.call, seen.wait.call_limit_s) == ("wait_until_finished", longest_s)
    assert (capture.call, capture.call_limit_s) == ("save", 3 * LONG_S)
