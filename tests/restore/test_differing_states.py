"""Processes that ask for different states or steps are told what differs, and how."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from memory_coordination import MemoryService

from emergency_ckpt.cluster.round import Series
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.restore.rounds import RestoreRounds
from emergency_ckpt.state.tree import describe

WAIT_S = 20.0


class _Leader:
    """In place of the leader, which must not be asked for a plan."""

    def answer(self, rows: Any) -> Any:
        raise AssertionError("states that differ came through")

    survey = answer


def _errors(
    states: list[Any], steps: list[int | None] | None = None, *, survey: bool = False
) -> list[str]:
    """Return the text of the error of each process, which asks for its step and its state."""
    service = MemoryService(len(states))

    def restore(process: int) -> str:
        leader: Any = _Leader()
        rounds = RestoreRounds(
            service.member(process),
            "restore/0",
            Series(),
            describe(states[process], "restore").wanted,
            leader,
            deadline_s=time.monotonic() + WAIT_S,
            step=None if steps is None else steps[process],
        )
        inventory = HolderInventory(f"process/{process}", process, "", (), ())
        row = rounds.report(inventory, wants_host_state=False)
        with pytest.raises(CheckpointError) as caught:
            rounds.survey(row) if survey else rounds.hold(row)
        return str(caught.value)

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(restore, range(len(states))))


@pytest.mark.parametrize("survey", [False, True])
def test_restore_into_another_shape_names_leaf_and_shapes(*, survey: bool) -> None:
    states = [{"w": np.zeros((8, 4)), "b": np.zeros(4)} for _ in range(3)]
    states[2]["w"] = np.zeros((8, 5))
    first, second, third = _errors(states, survey=survey)
    assert "process 2 asks for other leaves, shapes or dtypes than process 0" in first
    assert "process 2 asks for other leaves" in second
    assert "w: float64(8, 5) here, float64(8, 4) on process 0" in third
    assert "; b:" not in third


def test_restore_into_other_leaves_names_them() -> None:
    _, second = _errors([{"w": np.zeros(3)}, {"v": np.zeros(3), "step": 0}])
    assert "step: Python int() here, absent on process 0" in second
    assert "w: absent here, float64(3,) on process 0" in second


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([5, 5, 10], "process 2 asks for step 10, process 0 for step 5"),
        ([5, None, 5], "process 1 asks for the newest complete step, process 0 for step 5"),
        ([None, 0, None], "process 1 asks for step 0, process 0 for the newest complete step"),
    ],
)
def test_restore_of_other_steps_is_an_error_for_all(steps: list[int | None], text: str) -> None:
    """``latest_step`` is this process's own: after a loss it may differ between processes."""
    assert all(text in error for error in _errors([{"w": np.zeros(3)}] * 3, steps))
