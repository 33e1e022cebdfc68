"""What holds with Orbax's emergency manager holds with ours: one job checks all, case by case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from running_jobs import job_root, run_life, spec_of

pytestmark = pytest.mark.timeout(600)


def is_due(step: int, interval: int) -> bool:
    """Return whether a save is due by Orbax's rule; step 0 is always saved."""
    return step % interval == 0


def all_steps(
    total: int,
    local: tuple[int, int],
    persistent: tuple[int, int | None],
    *,
    keep_period: int | None = None,
) -> list[int]:
    """Return the steps that Orbax's manager has after steps 0 to ``total`` - 1.

    ``local`` and ``persistent``: interval, and how many steps are kept.
    """
    in_ram = [step for step in range(total) if is_due(step, local[0])]
    stored = [step for step in range(total) if is_due(step, persistent[0])]
    newest = stored if persistent[1] is None else stored[-persistent[1] :]
    spared = [step for step in stored if keep_period and step % keep_period == 0]
    return sorted({*in_ram[-local[1] :], *newest, *spared})


@pytest.fixture(scope="module")
def job() -> Iterator[list[dict[str, Any]]]:
    with job_root() as root:
        yield run_life(spec_of(root, "orbax_job.py", devices=2), root)


def of_each(job: list[dict[str, Any]], program: str) -> list[Any]:
    assert all("value" in result[program] for result in job), [r[program] for r in job]
    return [result[program]["value"] for result in job]


def of_all(job: list[dict[str, Any]], program: str) -> Any:
    found = of_each(job, program)
    assert all(value == found[0] for value in found), found
    return found[0]


@pytest.mark.parametrize("row", [(0, 2, 3), (1, 1, 4), (1, 2, 2), (3, 5, 7), (3, 2, 3)])
def test_what_is_due(job: list[dict[str, Any]], row: tuple[int, int, int]) -> None:
    assert of_all(job, f"due {row}") is (is_due(row[0], row[1]) or is_due(row[0], row[2]))


LISTED = {
    "newest_few": all_steps(10, (1, 3), (2, 2)),
    "rare_storage": all_steps(7, (2, 2), (50, None)),
    "one_local": all_steps(5, (1, 1), (3, None)),
    "period": all_steps(9, (3, 1), (2, 1), keep_period=4),
    "functions": [1, 2, 5, 7],
    "save_policies": [0, 1, 3, 4, 5],
    "any_policy": [0, 3, 5, 6],
    "preservation": [0, 4, 7, 8],
    "read_only": [0, 2],
}


@pytest.mark.parametrize("name", LISTED)
def test_which_steps_there_are(job: list[dict[str, Any]], name: str) -> None:
    """For the manager that saved them, after ``reload``, and for a new one.

    ``close`` brings the newest step of RAM to storage, which then lets go of its oldest one.
    """
    steps = LISTED[name]
    later = steps[1:] if name == "newest_few" else steps
    assert of_all(job, f"listed {name}") == [steps, steps[-1], steps, later, steps[-1], False]


def test_steps_are_known_without_the_other_processes(job: list[dict[str, Any]]) -> None:
    found = of_each(job, "asked by one")
    assert found == [[], [[0, 3, 4], [0, 3, 4]], [], []]


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_saves_without_waiting(job: list[dict[str, Any]], kind: str) -> None:
    steps = all_steps(17, (3, 2), (5, 3))
    assert of_all(job, f"fast {kind}") == [steps, [False, True, False], [10, 15, 17]]


@pytest.mark.parametrize(
    "case",
    [
        "storage lost, axis 0",
        "storage lost, axis 0, sync",
        "storage lost, axis 1",
        "storage lost, axis 2",
    ],
)
def test_ram_is_enough(job: list[dict[str, Any]], case: str) -> None:
    found = of_each(job, case)
    assert found == [[first, ["state"], []] for first in (True, True, False, False)]


@pytest.mark.parametrize(
    ("case", "left"),
    [
        ("all RAM lost, axis 0", [0, 2]),
        ("all RAM lost, axis 1", [0, 2]),
        ("a slice's RAM lost, axis 1", [0, 1, 2]),
    ],
)
def test_ram_was_wiped(job: list[dict[str, Any]], case: str, left: list[int]) -> None:
    """Restored, saved on, restored from RAM without the persistent directory."""
    assert of_all(job, case) == [[], left, [4, 5]]


def test_older_restore_takes_nothing_away(job: list[dict[str, Any]]) -> None:
    wrong, before, after, latest = of_all(job, "older then newer")
    assert wrong == [[]] * 5
    assert (before, after, latest) == ([0, 4, 5, 6], [0, 4, 5, 6], 6)


def test_all_steps_with_a_slow_removal_are_equal(job: list[dict[str, Any]]) -> None:
    """Where process 0 has still to remove one; and where a rollback uses numbers again."""
    found = of_all(job, "slow removal")
    assert found == [[0, 4], *[[False, True]] * 4, [0, 4], [0, 4]]


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_swapped(job: list[dict[str, Any]], axis: int) -> None:
    for process, found in enumerate(of_each(job, f"swapped, axis {axis}")):
        first = process < 2
        assert found == [first, not first, [0, 1, 2], [], 3, [0, 1, 2, 3]]


@pytest.mark.parametrize("mesh", ["(8,) 0", "(8,) 1", "(1, 8)", "(8, 1)"])
def test_one_slice(job: list[dict[str, Any]], mesh: str) -> None:
    assert of_all(job, f"one slice {mesh}") == [True, [5, 10, 15], 15, []]


def test_one_slice_may_save_to_ram_too(job: list[dict[str, Any]]) -> None:
    assert of_all(job, "one slice with RAM") == [True, [5, 10, 12, 15], 15, []]


def test_first_axis_with_replicas_is_taken_for_one_of_size_1(job: list[dict[str, Any]]) -> None:
    """Such as MaxText's ``diloco``. Both slices have a copy, so nothing is said."""
    processes = of_each(job, "copies (1, 2, 4)")
    half = len(processes) // 2
    assert [is_first for is_first, *_ in processes] == [True] * half + [False] * half
    for _, *found in processes:
        assert found == [[0, 1, 2], [], [0, 1, 2], [], []]


def test_parts_with_one_copy_in_ram_are_told_at_each_start(job: list[dict[str, Any]]) -> None:
    first, *others = of_each(job, "copies (1, 1, 8)")
    for *found, said in others:
        assert found == [True, [0, 1, 2], [], [0, 1, 2], []]
        assert said == []
    *_, said = first
    assert len(said) == 2
    for text in said:
        assert "the job has one slice" in text
        assert "goes back to the newest step in /" in text


def test_dataset_is_of_the_step_of_the_tensors(job: list[dict[str, Any]]) -> None:
    assert of_all(job, "dataset") == [[True, []]] * 4 + [True] * 3


def test_what_orbax_leaves_out(job: list[dict[str, Any]]) -> None:
    def known(step: int, loss: float, *, stored: bool) -> list[Any]:
        metrics = {"loss": loss}
        return [{"note": f"step {step}"}, metrics, metrics, stored, [[8], "int8"], True]

    assert of_all(job, "left out by Orbax") == {
        "steps": [0, 2, 3, 4],
        "best": 3,
        "at 0": known(0, 3.0, stored=True),
        "at 3": known(3, 1.0, stored=False),
        "left": [[0, 3], 3, 3],
        "then": [[], ["FileNotFoundError"] * 2, [0, 3, 4]],
        "next life": [0, 3, 4],
        "gone": [[], "FileNotFoundError"],
    }


def test_best_step_after_a_loss_is_that_of_all(job: list[dict[str, Any]]) -> None:
    first, *others = of_each(job, "best after a loss")
    assert first == ["KeyError", 2, []]
    assert others == [["RestoreFailed", 2, []]] * 3


def test_what_is_refused(job: list[dict[str, Any]]) -> None:
    kinds, steps = of_all(job, "refused")
    assert steps == []
    assert kinds == {
        "reserved": "ValueError",
        "no state": "ValueError",
        "other item": "ValueError",
        "not composite": "ValueError",
        "cast": "ValueError",
        "nothing there": "FileNotFoundError",
        "no such step": "FileNotFoundError",
        "closed": "CheckpointError",
        "no directory": "FileNotFoundError",
    }
