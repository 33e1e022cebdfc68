"""Removal of persistent steps, on a real directory that plain Orbax reads too."""

from __future__ import annotations

import hashlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import checkpoint_managers as ocm
from persistent_steps import RUN_ID, complete_steps, fill, life, save_over, writer_of
from state_samples import on_host
from world import World, save, save_all

from emergency_ckpt.background import Failures
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.events import Event, EventSink
from emergency_ckpt.save.persistent import retention
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.storage import DirectoryWriter, PersistentTier
from emergency_ckpt.types import OrbaxStep, SaveId

STEPS = [10, 20, 30, 40]
LONG_S = 60.0


def preserved(
    tier: PersistentTier, policy: Any = None, keep_last_n: int | None = None, **settings: Any
) -> tuple[list[int], Failures, list[Event]]:
    """What is left after one look."""
    events: list[Event] = []
    failures = Failures()
    sink = EventSink(events.append, process_index=0)
    writer = writer_of(tier, emit=sink.emit)
    writer.begin(life(2))
    preservation = Preservation(
        writer,
        failures,
        policy=policy,
        keep_last_n=keep_last_n,
        keep_every_n_steps=settings.get("keep_every_n_steps"),
        timeout_s=LONG_S,
    )
    preservation.after_save()
    assert preservation.wait_idle(LONG_S)
    preservation.stop(LONG_S)
    return complete_steps(tier), failures, events


def keeping_last(steps: int, writer: DirectoryWriter, timeout_s: float = LONG_S) -> Preservation:
    """Of a life that has saved there."""
    writer.begin(life(2))
    return Preservation(
        writer,
        Failures(),
        policy=None,
        keep_last_n=steps,
        keep_every_n_steps=None,
        timeout_s=timeout_s,
    )


def orbax_steps(directory: Path) -> list[int]:
    return sorted(ocp.utils.checkpoint_steps(directory))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, STEPS),
        ({"keep_last_n": 2}, [30, 40]),
        ({"keep_last_n": 1, "keep_every_n_steps": 20}, [20, 40]),
        ({"policy": ocm.LatestN(3)}, [20, 30, 40]),
        ({"policy": ocm.CustomSteps([10])}, [10, 40]),
        ({"policy": ocm.EveryNSeconds(180)}, [10, 40]),
        (
            {
                "policy": ocm.BestN(
                    get_metric_fn=lambda metrics: metrics["score"],
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            },
            [20, 40],
        ),
    ],
)
def test_what_is_kept(tmp_path: Path, settings: dict[str, Any], kept: list[int]) -> None:
    tier = fill(str(tmp_path / "run"), STEPS, metrics=lambda step: {"score": -abs(step - 20)})
    left, failures, events = preserved(tier, **settings)
    assert left == kept == orbax_steps(tmp_path / "run")
    told = [(event.point, event.fields["step"]) for event in events]
    removed = [step for step in STEPS if step not in kept]
    assert told == [
        (f"persistent.removal.{stage}", step) for step in removed for stage in ("begun", "removed")
    ]
    assert failures.count == 0
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert (manager.restore(40).state["w"] == 40).all()


def test_save_after_the_end_of_removals_removes_nothing(tmp_path: Path) -> None:
    """The process ends, and a save to storage is still under way."""
    tier = fill(str(tmp_path), STEPS)
    preservation = keeping_last(1, writer_of(tier))
    assert preservation.stop(LONG_S)
    assert preservation.after_save(STEPS[-1]) == ()
    assert complete_steps(tier) == STEPS


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_best_steps_are_kept_among_metrics_that_are_no_numbers(
    world: World, *, reverse: bool, nested: bool
) -> None:
    """In the life that saved them, and in one that reads them from the step log."""
    sign = -1 if reverse else 1
    scores = {2: 4.0, 4: float("nan"), 6: 3.0, 8: float("inf"), 10: 1.0, 12: float("nan")}
    policy: Any = ocm.BestN(get_metric_fn=lambda found: sign * found["score"], n=2, reverse=reverse)
    if nested:
        policy = ocm.AnyPreservationPolicy([policy])
    kept: list[set[int]] = []
    for steps in (list(scores), [14]):
        with world.open_both(preservation_policy=policy) as checkpointer:
            checkpointer.restore(state=world.state(0))
            for step in steps:
                save(checkpointer, world, step, metrics={"score": scores.get(step, 0.0)})
                checkpointer.wait_until_finished()
            checkpointer.check_for_errors()
        kept.append(set(complete_steps(str(world.persistent))))
    assert kept == [{2, 6, 12}, {2, 6, 14}]


class BestScore(ocm.BestN):
    """A user's own, with arguments of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(get_metric_fn=lambda metrics: metrics["score"], n=count)


class Union(ocm.AnyPreservationPolicy):
    """As ``BestScore``."""

    def __init__(self, *policies: ocm.PreservationPolicy) -> None:
        super().__init__(policies)


@pytest.mark.parametrize("policy", [BestScore(2), Union(BestScore(1), BestScore(2))])
def test_subclass_of_best_n_with_its_own_arguments_is_asked(tmp_path: Path, policy: Any) -> None:
    scores = {10: 4.0, 20: float("nan"), 30: 3.0, 40: 1.0}
    tier = fill(str(tmp_path / "run"), STEPS, metrics=lambda step: {"score": scores[step]})
    before = dict(vars(policy))
    left, failures, _ = preserved(tier, policy)
    failures.raise_pending()
    assert left == [10, 30, 40]
    assert vars(policy) == before


def test_steps_of_plain_orbax_are_not_touched(tmp_path: Path) -> None:
    tier = fill(str(tmp_path / "run"), STEPS)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(50, args=ocp.args.StandardSave({"w": np.zeros(4)}))
    left, _, _ = preserved(tier, keep_last_n=1)
    assert left == [40]
    assert orbax_steps(tmp_path / "run") == [40, 50]


def test_nothing_is_removed_while_a_restore_reads(tmp_path: Path) -> None:
    tier = fill(str(tmp_path / "run"), STEPS)
    preservation = keeping_last(1, writer_of(tier))
    with preservation.held():
        preservation.after_save()
        assert not preservation.wait_idle(0.2)
        assert complete_steps(tier) == STEPS
    assert preservation.wait_idle(LONG_S)
    assert complete_steps(tier) == [40]
    preservation.stop(LONG_S)


class StalledWriter(DirectoryWriter):
    """Storage answers ``retire`` when the event is set, and says when it was asked."""

    def __init__(self, tier: PersistentTier) -> None:
        super().__init__(tier.storage, tier.found, run_id=RUN_ID, from_dir=False)
        self.asked = threading.Event()
        self.answers = threading.Event()

    def retire(self, step: int) -> None:
        self.asked.set()
        self.answers.wait(LONG_S)
        super().retire(step)


def test_restore_waits_for_a_removal_as_for_a_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM may have all that it restores; a call to storage may take ten minutes."""
    monkeypatch.setattr(retention, "SOON_S", 0.5)
    fill(str(tmp_path / "run"), STEPS)
    writer = StalledWriter(PersistentTier(str(tmp_path / "run")))
    preservation = keeping_last(1, writer, timeout_s=10 * LONG_S)
    preservation.after_save()
    assert writer.asked.wait(LONG_S)
    with preservation.held():
        assert complete_steps(str(tmp_path / "run")) == STEPS, "the removal is still under way"
    writer.answers.set()
    assert preservation.stop(LONG_S)


def test_restore_does_not_wait_for_ever_for_a_removal(tmp_path: Path) -> None:
    fill(str(tmp_path / "run"), STEPS)
    writer = StalledWriter(PersistentTier(str(tmp_path / "run")))
    preservation = keeping_last(1, writer, timeout_s=1.0)
    preservation.after_save()
    assert writer.asked.wait(LONG_S)
    held = threading.Event()
    go_on = threading.Event()

    def restore() -> None:
        with preservation.held():
            held.set()
            go_on.wait(LONG_S)

    reader = threading.Thread(target=restore, daemon=True)
    reader.start()
    try:
        assert held.wait(LONG_S / 2)
        writer.answers.set()
        assert preservation.wait_idle(LONG_S)
        # The step that it was at is gone, and no other while the restore reads.
        assert complete_steps(str(tmp_path / "run")) == [20, 30, 40]
    finally:
        writer.answers.set()
        go_on.set()
    reader.join(LONG_S)
    preservation.after_save()
    assert preservation.wait_idle(LONG_S)
    assert complete_steps(str(tmp_path / "run")) == [40]
    preservation.stop(LONG_S)


def test_save_while_others_are_removed_is_looked_at_too(tmp_path: Path) -> None:
    """The last save of a run may be such a one: no other comes to look again."""
    directory = str(tmp_path / "run")
    fill(directory, STEPS[:3])
    writer = StalledWriter(PersistentTier(directory))
    preservation = keeping_last(2, writer)
    preservation.after_save()
    assert writer.asked.wait(LONG_S)
    save_over(PersistentTier(directory), 40, 40, life(2), writer=writer)
    preservation.after_save()
    writer.answers.set()
    assert preservation.wait_idle(LONG_S)
    assert complete_steps(directory) == [30, 40]
    preservation.stop(LONG_S)


def test_removal_that_is_let_go_ends_after_its_present_step(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    fill(directory, STEPS)
    writer = StalledWriter(PersistentTier(directory))
    preservation = keeping_last(1, writer)
    preservation.after_save()
    assert writer.asked.wait(LONG_S)
    preservation.after_save()  # one more, which has not begun
    preservation.let_go()
    writer.answers.set()
    assert preservation.wait_idle(LONG_S)
    assert complete_steps(directory) == [20, 30, 40]
    preservation.after_save()
    assert preservation.wait_idle(LONG_S)
    assert complete_steps(directory) == [40], "the next save looks again"
    preservation.stop(LONG_S)


class StalledRemovals:
    """All writers of this process: the first removal of a step waits, and each later one apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.first, self.rest = (threading.Event() for _ in range(3))
        retire = DirectoryWriter.retire

        def retire_late(writer: DirectoryWriter, step: int) -> None:
            answers = self.rest if self.asked.is_set() else self.first
            self.asked.set()
            assert answers.wait(LONG_S)
            retire(writer, step)

        monkeypatch.setattr(DirectoryWriter, "retire", retire_late)


def three_steps(world: World) -> None:
    with world.open_both(save_every=1) as checkpointer:
        save_all(checkpointer, world, 1, 2, 3)


def test_preemption_does_not_wait_for_a_removal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of the notice is in storage: the process ends as it should, within its grace."""
    three_steps(world)
    stalled = StalledRemovals(monkeypatch)
    settings = {"save_every": 100, "keep_last_n": 1, "preemption_grace_s": 15.0}
    with world.open_both(**settings) as checkpointer:
        checkpointer.restore(state=world.state(0))
        checkpointer.request_preemption()
        save(checkpointer, world, 4)
        assert stalled.asked.wait(LONG_S)
        try:
            checkpointer.wait_until_finished()
        finally:
            stalled.first.set()
            stalled.rest.set()
    assert world.named("preemption.missed") == []
    assert complete_steps(str(world.persistent)) == [2, 3, 4]
    world.lose_ram()
    world.restores(4)


def test_restore_ends_a_removal_of_the_step_it_returns_to(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_steps(world)
    stalled = StalledRemovals(monkeypatch)
    with (
        ThreadPoolExecutor(1) as pool,
        world.open_both(save_every=1, keep_last_n=1) as checkpointer,
    ):
        checkpointer.restore(state=world.state(0))
        save(checkpointer, world, 4)
        assert stalled.asked.wait(LONG_S)  # for step 1
        restoring = pool.submit(checkpointer.restore, 2, state=world.state(0))
        with pytest.raises(TimeoutError):
            restoring.result(0.5)
        stalled.first.set()
        try:
            assert restoring.result(LONG_S)[0] == 2
        finally:
            stalled.rest.set()
        checkpointer.wait_until_finished()
        assert complete_steps(str(world.persistent)) == [2, 3, 4]
        save_all(checkpointer, world, 3)
    assert complete_steps(str(world.persistent)) == [3]


class Raises:
    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        raise RuntimeError(f"in {threading.current_thread().name}")


class AnswersShort:
    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [False]


class Exits:
    def should_preserve(self, checkpoints: Any, *, context: Any) -> Any:
        sys.exit("RuntimeError: in")


@pytest.mark.parametrize("policy", [Raises(), AnswersShort(), Exits()])
def test_policy_that_fails_removes_nothing(tmp_path: Path, policy: Any) -> None:
    left, failures, _ = preserved(fill(str(tmp_path / "run"), STEPS), policy)
    assert left == STEPS
    with pytest.raises(SaveFailed, match=r"RuntimeError: in|called sys.exit|answered for 1 of 4"):
        failures.raise_pending()


def test_preservation_distrusts_what_a_restore_rejected(tmp_path: Path) -> None:
    """It neither counts among those to keep, nor goes; until it is saved anew."""
    tier = fill(str(tmp_path / "run"), STEPS)
    preservation = keeping_last(1, writer_of(tier))
    preservation.mark_failed({40})
    preservation.after_save(30)
    assert preservation.wait_idle(LONG_S)
    assert complete_steps(tier) == [30, 40]
    preservation.after_save(40)
    assert preservation.wait_idle(LONG_S)
    preservation.stop(LONG_S)
    assert complete_steps(tier) == [40]


def test_step_listed_by_the_next_life_has_its_metrics(tmp_path: Path) -> None:
    """The writer was killed after the marker: the best step is still known as the best."""
    tier = PersistentTier(str(tmp_path / "run"))
    tier.create()
    writer_of(tier).begin(life(1))
    for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0)):
        orbax = OrbaxStep(metrics={"loss": loss})
        tree, shards = on_host({"w": np.full(4, step)})
        save = SaveId(step, life(1), RUN_ID)
        tier.write_document(step, 0, 1, b"{}")
        tier.write_tensors(save, tree, shards, (0,), orbax=orbax)
        specs = [leaf.spec for leaf in tree.leaves]
        tier.finish(save, {0: (hashlib.sha256(b"{}").hexdigest(), True)}, specs, {}, orbax=orbax)
    best = ocm.BestN(
        get_metric_fn=lambda metrics: metrics["loss"],
        reverse=True,
        n=1,
        keep_checkpoints_without_metrics=False,
    )
    kept, failures, _ = preserved(tier, best)
    failures.raise_pending()
    assert kept == [10, 30], "the best and the newest"
