"""Removal of persistent steps, on a real directory that plain Orbax reads too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import checkpoint_managers as ocm

from emergency_ckpt.errors import PersistentTierError, SaveFailed
from emergency_ckpt.runtime.events import Event, EventSink
from emergency_ckpt.runtime.preservation import Preservation
from emergency_ckpt.runtime.worker import Failures
from emergency_ckpt.tiers.persistent import PersistentTier
from emergency_ckpt.tiers.removal import StepShelf
from emergency_ckpt.types import LeafSpec, SaveId

STEPS = [10, 20, 30, 40]
LONG_S = 60.0


class Died(PersistentTierError):
    """Stands for the end of the process."""


class DyingTier(PersistentTier):
    """Dies in the middle of a removal, after the step was hidden."""

    def remove(self, step: int) -> None:
        raise Died("remove", str(step), "the process died")


def fill(directory: Path, *, metrics: Callable[[int], Any] | None = None) -> PersistentTier:
    """Whole steps, as saves leave them."""
    tier = PersistentTier(str(directory))
    tier.create()
    shelf = StepShelf(tier)
    with ocp.CheckpointManager(directory) as manager:
        for step in STEPS:
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(4, step)}))
    for step in STEPS:
        tier.write_document(step, 0, 1, b"{}")
        if metrics is not None:
            shelf.write_metrics(step, metrics(step))
        save = SaveId(step, "life", "run")
        tier.publish(save, {0: ("0" * 64, True)}, [LeafSpec("w", "int64", (4,))], {})
    return tier


def preserved(
    tier: PersistentTier, policy: Any = None, keep_last_n: int | None = None, **settings: Any
) -> tuple[list[int], Failures, list[Event]]:
    """What is left after one look."""
    events: list[Event] = []
    failures = Failures()
    preservation = Preservation(
        StepShelf(tier),
        EventSink(events.append, process_index=0),
        failures,
        policy=policy,
        keep_last_n=keep_last_n,
        keep_every_n_steps=settings.get("keep_every_n_steps"),
    )
    preservation.after_save()
    assert preservation.wait_idle(LONG_S)
    preservation.stop(LONG_S)
    return tier.whole_steps(), failures, events


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
    tier = fill(tmp_path / "run", metrics=lambda step: {"score": -abs(step - 20)})
    left, failures, events = preserved(tier, **settings)
    assert left == kept == orbax_steps(tmp_path / "run")
    assert [event.fields["step"] for event in events] == [s for s in STEPS if s not in kept]
    assert failures.count == 0
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert (manager.restore(40, args=ocp.args.StandardRestore())["w"] == 40).all()


def test_a_removal_that_was_cut_short_shows_nothing_and_is_finished_later(tmp_path: Path) -> None:
    fill(tmp_path / "run")
    shelf = StepShelf(DyingTier(str(tmp_path / "run")))
    with pytest.raises(Died):
        shelf.remove(20)
    again = PersistentTier(str(tmp_path / "run"))
    assert again.whole_steps() == orbax_steps(tmp_path / "run") == [10, 30, 40]
    assert 20 not in [found.step for found in again.steps()]
    assert again.remove_leftovers() == [20]
    assert not [p for p in (tmp_path / "run").rglob("*") if "20" in p.name.split(".")[:1]]


def test_steps_of_plain_orbax_are_not_touched(tmp_path: Path) -> None:
    tier = fill(tmp_path / "run")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(50, args=ocp.args.StandardSave({"w": np.zeros(4)}))
    left, _, _ = preserved(tier, keep_last_n=1)
    assert left == [40]
    assert orbax_steps(tmp_path / "run") == [40, 50]


def test_nothing_is_removed_while_a_restore_reads(tmp_path: Path) -> None:
    tier = fill(tmp_path / "run")
    preservation = Preservation(
        StepShelf(tier),
        EventSink(None, process_index=0),
        Failures(),
        policy=None,
        keep_last_n=1,
        keep_every_n_steps=None,
    )
    with preservation.held():
        preservation.after_save()
        assert not preservation.wait_idle(0.2)
        assert tier.whole_steps() == STEPS
    assert preservation.wait_idle(LONG_S)
    assert tier.whole_steps() == [40]
    preservation.stop(LONG_S)


class Raises:
    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        raise RuntimeError(f"in {threading.current_thread().name}")


class AnswersShort:
    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [False]


@pytest.mark.parametrize("policy", [Raises(), AnswersShort()])
def test_a_policy_that_fails_removes_nothing(tmp_path: Path, policy: Any) -> None:
    left, failures, _ = preserved(fill(tmp_path / "run"), policy)
    assert left == STEPS
    with pytest.raises(SaveFailed, match=r"eckpt-preservation|answered for 1 of 4"):
        failures.raise_pending()
