"""What processes tell each other during persistent saves: failures soon, and nothing for ever.

Threads stand for processes; tensors are left out, they need a job of real ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from memory_coordination import MemoryCoordinator, MemoryService
from persistent_steps import complete_steps, life, writer_of
from places import VERIFICATION
from programs import printed

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster import LeftProcesses, Peers
from emergency_ckpt.cluster.shard_source import HostStateInbox
from emergency_ckpt.cluster.timelines import StoredChain, Timelines
from emergency_ckpt.config.policies import plan_saves
from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES
from emergency_ckpt.core.placement import Topology
from emergency_ckpt.core.stall import TimeLimits
from emergency_ckpt.errors import (
    CoordinationError,
    PersistentTierError,
    SaveFailed,
    TransferError,
)
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.observer import StepProgress
from emergency_ckpt.save.persistent.rounds import (
    DOCUMENTS,
    FIRST_STAGE,
    StageReport,
    StorageRounds,
    report_of,
)
from emergency_ckpt.save.persistent.save import PersistentSave, PersistentSaves
from emergency_ckpt.save.save_work import SaveRequest
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.save.turn_wait import TurnWait
from emergency_ckpt.state import HostShard, StateTree, describe, host_state
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.meetings import Meet, meet_nobody
from emergency_ckpt.transfer import TransferClient
from emergency_ckpt.types import PERSISTENT, OrbaxStep, SaveId, ShardId
from emergency_ckpt.work_progress import WorkProgress

STAGES = (FIRST_STAGE, DOCUMENTS)
CALLS = VERIFICATION / "simulation" / "storage_calls.py"
SOON_S, LONG_S = 0.5, 120.0
LIFE = life(1)
LIMITS = TimeLimits(60.0, LONG_S)
STUCK_SOON = TimeLimits(1.0, LONG_S)  # a process that hears nothing finds another one stuck
TOPOLOGY = Topology(4, (0, 0, 1, 1))  # 0 and 1 write; 0 is the scribe of 2, 1 that of 3
TREE = describe({"x": 1}, "save")


class NoTensors(PersistentTier):
    """Stores an empty directory for the tensors of a step."""

    def write_tensors(
        self,
        save: SaveId,
        tree: StateTree,
        shards: Mapping[ShardId, HostShard],
        writers: Sequence[int],
        meet: Meet = meet_nobody,
        attempt: str = "",
        orbax: OrbaxStep | None = None,
        progress: WorkProgress | None = None,
        holders: Sequence[int] | None = None,
    ) -> None:
        (Path(self.directory) / str(save.step)).mkdir(exist_ok=True)


class DirectPeers(Peers):
    """Pushes straight into the inbox of the other; ``broken`` says whose pushes fail."""

    def __init__(self, job: Job, process: int) -> None:
        coordinator = job.service.member(process)
        super().__init__(coordinator, TransferClient(run_id="run", secret=b"s" * 32))
        self._job = job
        self._process = process

    def push_host_state(
        self, process: int, save: SaveId, data: bytes, *, for_storage: bool = False
    ) -> None:
        assert for_storage  # a full ramdisk must not stop it
        if self._process in self._job.broken:
            raise TransferError("push", f"process {process}", "connection refused")
        self._job.inboxes[process].put(save, self._process, data)


QUIET = EventSink(None, process_index=0)
NO_RAM: Any = SimpleNamespace(timeline=None, note_stored=lambda _: None)


class Job:
    def __init__(self, directory: Path, limits: TimeLimits = LIMITS) -> None:
        count = TOPOLOGY.process_count
        self.service = MemoryService(count)
        self.broken: set[int] = set()
        self.inboxes = [HostStateInbox() for _ in range(count)]
        self.tier = NoTensors(str(directory))
        self.failures = [Failures() for _ in range(count)]
        self.events: list[Event] = []
        self.saves = [
            PersistentSaves(
                self.tier,
                self.service.member(process),
                DirectPeers(self, process),
                self.inboxes[process],
                EventSink(self.events.append, process_index=process),
                self.failures[process],
                chain=StoredChain(
                    writer_of(self.tier),
                    lambda: writer_of(self.tier),
                    Timelines(NO_RAM, QUIET),
                    QUIET,
                ),
                limits=limits,
            )
            for process in range(count)
        ]

    def save(self, step: int, sizes: Mapping[int, int] | None = None) -> None:
        """One save on all; ``sizes`` of their host states."""

        def one(process: int) -> None:
            size = (sizes or {}).get(process, 10)
            job = PersistentSave(
                save=SaveId(step=step, incarnation=LIFE, run_id="run"),
                tree=TREE,
                load=dict[ShardId, HostShard],
                host_state=host_state.capture("x" * size),
                topology=TOPOLOGY,
                writers=TOPOLOGY.writers,
            )
            self.saves[process].run(job)

        with ThreadPoolExecutor(TOPOLOGY.process_count) as pool:
            list(pool.map(one, range(TOPOLOGY.process_count)))

    def completed(self) -> set[tuple[object, object]]:
        """(process, step) of each ``persistent.complete``."""
        return {
            (event.fields["process"], event.fields["step"])
            for event in self.events
            if event.name == "persistent.complete"
        }

    def pause(self, step: int) -> None:
        """As ``save``, but the first writer leaves it out."""

        def one(process: int) -> None:
            if process == 0:
                save = SaveId(step=step, incarnation=LIFE, run_id="run")
                self.saves[0].tell_pause(save, TOPOLOGY.writers)
            else:
                assert not self.saves[process].run(_empty_save(step))

        with ThreadPoolExecutor(TOPOLOGY.process_count) as pool:
            list(pool.map(one, range(TOPOLOGY.process_count)))

    def be_late(self, who: int, step: int, known: Sequence[int]) -> None:
        """As ``save``, but ``who`` learns too late that it is due; it knows these writers."""

        def one(process: int) -> None:
            if process == who:
                save = SaveId(step=step, incarnation=LIFE, run_id="run")
                self.saves[who].tell_late(save, known)
            else:
                assert not self.saves[process].run(_empty_save(step))

        with ThreadPoolExecutor(TOPOLOGY.process_count) as pool:
            list(pool.map(one, range(TOPOLOGY.process_count)))

    def complete_steps(self) -> list[int]:
        return complete_steps(self.tier)

    def come_to(self, process: int) -> int:
        """Return the step of the newest save that ``process`` has begun, -1 without one."""
        left = LeftProcesses(self.service.member(process))
        first = SaveId(step=-1, incarnation=LIFE, run_id="run")
        return left.passed(PERSISTENT, first, [process]).get(process, -1)


def _empty_save(step: int, *, is_announced: bool = False) -> PersistentSave:
    return PersistentSave(
        save=SaveId(step=step, incarnation=LIFE, run_id="run"),
        tree=TREE,
        load=dict[ShardId, HostShard],
        host_state=host_state.capture(0),
        topology=TOPOLOGY,
        writers=TOPOLOGY.writers,
        is_announced=is_announced,
    )


def _request(save: SaveId) -> SaveRequest:
    return SaveRequest(save, None, None, None, time.monotonic())


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def _break_push(job: Job) -> dict[int, int]:
    job.broken.add(3)
    return {}


def _make_host_state_too_large(_: Job) -> dict[int, int]:
    return {3: MAX_HOST_STATE_BYTES + 1}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_break_push, "push process 1: connection refused"),
        (_make_host_state_too_large, "host state"),
    ],
    ids=["push fails", "host state is too large"],
)
def test_host_state_that_cannot_come_fails_save_by_its_reason(
    job: Job, spoil: Callable[[Job], dict[int, int]], reason: str
) -> None:
    job.save(1, spoil(job))
    for process in range(TOPOLOGY.process_count):  # process 2 has done its part, and learns it
        with pytest.raises(SaveFailed, match=reason):
            job.failures[process].raise_pending()
    assert job.complete_steps() == []
    job.broken.clear()
    job.save(3)
    assert job.complete_steps() == [3]


@pytest.mark.dear
def test_service_does_not_fill_up_with_saves(job: Job) -> None:
    counts: list[int] = []
    for step in range(1, 51):
        job.save(step)
        counts.append(len(job.service.values))
    assert job.complete_steps() == list(range(1, 51))
    assert max(counts) <= counts[1], "the keys of two saves, never more"


def test_service_does_not_fill_up_with_saves_that_fail(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def storage_is_down() -> None:
        raise PersistentTierError("create", job.tier.directory, "storage is down")

    job.broken.add(2)
    monkeypatch.setattr(job.tier, "create", storage_is_down)
    counts: list[int] = []
    for step in range(1, 13):
        job.save(step)
        counts.append(len(job.service.values))
    assert job.failures[0].count == 12
    assert max(counts[4:]) <= max(counts[:4])


def test_refusal_that_comes_late_does_not_stay(job: Job) -> None:
    """The writers are many saves ahead of one that only now learns that its push fails."""
    for step in range(1, 20):
        job.save(step)
    job.broken.add(3)
    before = len(job.service.values)
    for step in range(1, 20):
        job.saves[3].run(_empty_save(step))
    assert len(job.service.values) <= before + 2


def test_save_failed_at_one_writer_completes_nowhere(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = job.tier.finish

    def full(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise PersistentTierError("write", "marker.json", "no space left")

    monkeypatch.setattr(job.tier, "finish", full)
    job.save(1)
    assert job.completed() == set()
    for process in range(TOPOLOGY.process_count):
        assert job.saves[process].steps == ()
        with pytest.raises(SaveFailed, match="no space left"):
            job.failures[process].raise_pending()
    monkeypatch.setattr(job.tier, "finish", works)
    job.save(3)
    assert job.completed() == {(process, 3) for process in range(TOPOLOGY.process_count)}
    assert {saves.steps[-1] for saves in job.saves} == {3}


FAILED_CALLS = [
    *((process, "replace", "at/persistent/") for process in (0, 1, 2)),
    *((process, "put", f"/{stage}/{process}") for stage in STAGES for process in (0, 1)),
]


@pytest.mark.parametrize(("process", "operation", "part"), FAILED_CALLS)
def test_failed_call_of_one_process_is_told_to_all(
    tmp_path: Path, process: int, operation: str, part: str
) -> None:
    job = Job(tmp_path, STUCK_SOON)
    error = CoordinationError(operation, part, "UNAVAILABLE")
    job.service.fail(process, operation, part, error)
    job.save(1)
    for failures in job.failures:
        with pytest.raises(SaveFailed, match="UNAVAILABLE"):
            failures.raise_pending()
    assert job.complete_steps() == []
    job.save(2)
    assert job.completed() == {(process, 2) for process in range(TOPOLOGY.process_count)}


CALLS_BESIDE_A_COMPLETE_STEP = [
    (0, "list", "/2/host_states"),
    (0, "put", "/outcome"),
    (1, "get", "/outcome"),
    (2, "get", "/outcome"),
]


@pytest.mark.parametrize(("process", "operation", "part"), CALLS_BESIDE_A_COMPLETE_STEP)
def test_failed_call_beside_a_complete_step_fails_no_save(
    tmp_path: Path, process: int, operation: str, part: str
) -> None:
    """The first writer looks which keys are to go, or says that the step is complete.

    A writer waits until it is, and so does a process that does not write.
    """
    job = Job(tmp_path, STUCK_SOON)
    job.save(1)
    job.save(2)
    job.service.fail(process, operation, part, CoordinationError(operation, part, "UNAVAILABLE"))
    job.save(3)
    assert job.completed() == {(process, n) for process in range(4) for n in (1, 2, 3)}
    assert [failures.count for failures in job.failures] == [0] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_second_save_skipped_is_told_only_where_needed(job: Job, fails: bool) -> None:
    """Process 1 still had the first save of the step under way when the second one came."""
    again = SaveId(1, f"{LIFE}.000001", "run")
    if fails:
        job.broken.add(3)
    job.save(1)
    job.saves[1].tell_skipped(again, TOPOLOGY.writers)
    told = [key for key in job.service.values if again.incarnation in key]
    assert bool(told) == fails


def test_skipped_save_of_a_number_that_is_saved_anew_is_told(job: Job) -> None:
    """Once after a restore of an older step in the same process, once after a removal."""
    job.save(1)
    saves, service = job.saves[1], job.service
    after_restore = SaveId(1, life(2), "run")
    saves.tell_skipped(after_restore, TOPOLOGY.writers)
    assert any(after_restore.incarnation in key for key in service.values)
    again = SaveId(1, f"{LIFE}.000001", "run")
    saves.forget(1)
    saves.tell_skipped(again, TOPOLOGY.writers)
    assert any(again.incarnation in key for key in service.values)


def test_schedule_forgets_starts_at_restores_and_removals() -> None:
    """Otherwise a save of that number is taken for a second save of the same step."""
    schedule = TierSchedule(PERSISTENT, plan_saves(1), Failures())
    schedule.note_started(40, 0.0)
    schedule.restart_from(30)
    assert schedule.last_started is None
    schedule.note_started(40, 0.0)
    schedule.forget(39)
    assert schedule.last_started == 40
    schedule.forget(40)
    assert schedule.last_started is None
    schedule.worker.stop(LONG_S)


OTHER_WORK: list[Callable[[PersistentSaves, SaveId], object]] = [
    lambda saves, save: saves.roll_back(save),
    lambda saves, save: saves.tell_pause(save, TOPOLOGY.writers),
    lambda saves, save: saves.leave_out(save, TOPOLOGY.writers, "it is not in RAM"),
    lambda saves, save: None,  # what follows a save, such as preparing the next one
]


@pytest.mark.parametrize("work", OTHER_WORK, ids=["roll_back", "tell_pause", "leave_out", "end"])
def test_save_skipped_beside_other_work_is_told(
    job: Job, work: Callable[[PersistentSaves, SaveId], object]
) -> None:
    """The first writer is busy for storage, but with no save; the others begin the save."""
    first, skipped = SaveId(1, LIFE, "run"), SaveId(2, LIFE, "run")
    begun, skips, reports = threading.Event(), threading.Event(), list[int]()
    schedule = TierSchedule(PERSISTENT, plan_saves(1), job.failures[0])
    schedule.begin_reports(reports.append)

    def busy() -> None:
        begun.set()
        assert skips.wait(LONG_S)
        work(job.saves[0], first)

    schedule.note_due(1)
    schedule.start(busy)
    assert begun.wait(LONG_S)
    of_process: Any = SimpleNamespace(
        progress=StepProgress(),
        inspect=lambda: None,
        events=QUIET,
        failures=Failures(),
        config=SimpleNamespace(save_timeout_s=LONG_S, storage_wait_timeout_s=0.0),
    )
    saves: Any = SimpleNamespace(by_tier={PERSISTENT: job.saves[0]})
    turn = TurnWait(
        of_process, saves, lambda _, save: job.saves[0].tell_skipped(save, TOPOLOGY.writers)
    )
    assert not turn.wait(schedule, _request(skipped), is_again=False)
    skips.set()
    assert schedule.wait_idle(LONG_S)
    assert reports[-1] == 2
    assert any(f"{LIFE}/2/" in key for key in job.service.values), "else they wait in vain"
    others = range(1, TOPOLOGY.process_count)
    with ThreadPoolExecutor(TOPOLOGY.process_count) as pool:
        ended = pool.map(lambda process: job.saves[process].run(_empty_save(2)), others)
        assert not any(ended)
    for process in others:
        with pytest.raises(SaveFailed, match="previous save was under way"):
            job.failures[process].raise_pending()
    schedule.worker.stop(LONG_S)


def test_tell_pause_ends_the_save_everywhere_without_a_failure(job: Job) -> None:
    counts: list[int] = []
    for step in range(1, 21):
        job.pause(step)
        counts.append(len(job.service.values))
    assert [failures.count for failures in job.failures] == [0] * 4
    assert max(counts) <= counts[1] + 2, "the keys of two saves, never more"
    job.save(21)
    assert job.complete_steps() == [21]


@pytest.mark.parametrize(
    ("who", "known"),
    [*((who, TOPOLOGY.writers) for who in range(4)), *((who, ()) for who in range(1, 4))],
)
def test_save_that_one_learns_of_too_late_is_left_out_by_all(
    job: Job, who: int, known: Sequence[int]
) -> None:
    """It may have placed no state yet, and then does not know who writes."""
    job.be_late(who, 1, known)
    left_out = [event for event in job.events if event.name == "save.skipped"]
    assert {event.fields["process"] for event in left_out} == set(range(4)) - {who}
    assert {event.fields["cause"] for event in left_out} == {"late"}
    assert [failures.count for failures in job.failures] == [0] * 4
    job.save(3)
    assert job.complete_steps() == [3]


@pytest.mark.parametrize("is_announced", [True, False])
@pytest.mark.parametrize("who", range(1, 4))
def test_process_past_an_announced_save_is_late(job: Job, who: int, is_announced: bool) -> None:
    """A notice makes ``who`` save step 3, before it reads that step 2 was due."""
    job.save(1)
    with ThreadPoolExecutor(TOPOLOGY.process_count) as pool:
        later = pool.submit(job.saves[who].run, _empty_save(3))
        while job.come_to(who) < 3:
            time.sleep(0.001)
        others = [process for process in range(4) if process != who]
        save = _empty_save(2, is_announced=is_announced)
        assert not any(pool.map(lambda process: job.saves[process].run(save), others))
        left_out = {e.fields["process"] for e in job.events if e.fields.get("cause") == "late"}
        assert left_out == (set(others) if is_announced else set())
        is_failure = [not is_announced and process != who for process in range(4)]
        assert [failures.count == 1 for failures in job.failures] == is_failure
        assert all(pool.map(lambda process: job.saves[process].run(_empty_save(3)), others))
        assert later.result()
    assert job.complete_steps() == [1, 3]


def test_outcome_beside_the_first_writers_next_save_is_read() -> None:
    """Process 0 completes an announced save, and begins its next one, between two looks."""
    save, later = (SaveId(step=step, incarnation=LIFE, run_id="run") for step in (2, 3))
    service = MemoryService(2)
    first = StorageRounds(service.member(0), LONG_S)
    first.begin(save, lambda _: None, is_announced=True)

    class Waiting(MemoryCoordinator):
        def find(self, key: str) -> bytes | None:
            if key == "gone/0" and "at/persistent/0" in service.values:
                first.decide(save, StageReport(steps=(2,)))
                first.begin(later, lambda _: None)
            return super().find(key)

    waiting = StorageRounds(Waiting(service, 1), LONG_S)
    waiting.begin(save, lambda _: None, is_announced=True)
    assert waiting.learn(save, 0).steps == (2,)


def test_service_that_fails_on_ends_the_wait_for_an_outcome() -> None:
    """Until the deadline of the wait, or the end of the process."""

    class Unreachable(MemoryCoordinator):
        def get(self, key: str, timeout_s: float) -> bytes:
            raise CoordinationError("wait for", key, "UNAVAILABLE")

    save = SaveId(step=2, incarnation=LIFE, run_id="run")
    waiting = StorageRounds(Unreachable(MemoryService(2), 1), SOON_S)
    with pytest.raises(CoordinationError, match="UNAVAILABLE"):
        waiting.learn(save, 0)
    ending = StorageRounds(Unreachable(MemoryService(2), 1), LONG_S)
    ending.end_waits()
    with pytest.raises(CoordinationError, match="UNAVAILABLE"):
        ending.learn(save, 0)


def test_failure_of_a_writer_past_the_save_is_read() -> None:
    """Process 1 reports that it failed, and a notice makes it begin its next save at once."""
    save, later = (SaveId(step=step, incarnation=LIFE, run_id="run") for step in (2, 3))
    service = MemoryService(2)
    other = StorageRounds(service.member(1), LONG_S)
    stage = other.stage(save, FIRST_STAGE, [0, 1])

    class Waiting(MemoryCoordinator):
        def find(self, key: str) -> bytes | None:
            if key == "gone/1" and "at/persistent/1" not in service.values:
                stage.say(msgspec.json.encode(StageReport("no room")))
                other.begin(later, lambda _: None)
            return super().find(key)

    first = StorageRounds(Waiting(service, 0), LONG_S)
    first.begin(save, lambda _: None, is_announced=True)
    waiting = first.stage(save, FIRST_STAGE, [0, 1])
    rule = first.rule_of(save, FIRST_STAGE, waiting, 0)
    answer = waiting.hold(msgspec.json.encode(StageReport()), rule)
    report = report_of(answer, FIRST_STAGE, 2, 0)
    assert "no room" in report.error
    assert not report.left_out


def test_calls_of_the_service_grow_with_the_writers_alone() -> None:
    """Each writer says three things and learns three; the first one alone reads what all say."""
    told = printed(CALLS, 2, 200, env={"PYTHONHASHSEED": "0"})
    two, many = map(json.loads, told.splitlines())
    assert two["calls"] < 24
    assert many["calls"] < 1800
    assert many["most_keys"] < 2 * 800, "the keys of two saves, never more"
