"""axlearn's trainer, as its double makes the calls, on four real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_jobs import ByProgram, job_root, renumbered, run_life, spec_of

pytestmark = pytest.mark.timeout(900)

CONTRACT = (
    "nothing_is_there",
    "structure_is_exact",
    "one_process_fails",
    "policies_are_asked_once",
    "an_exception_in_the_loop",
)
FIRST = (
    "undisturbed",
    "until_44",
    "what_the_tools_see",
    "iterator_saved_but_not_wanted",
    "as_the_readme_says",
    *CONTRACT,
)
PHRASE = "checkpoint tree dtypes or shapes"


def life(root: Path, *programs: str, number: int, order: list[int] | None = None) -> ByProgram:
    spec = spec_of(root, "axlearn_job.py", *programs)
    hosts = None if order is None else renumbered(order)
    results = run_life(spec, root, life=number, host_of_process=hosts)
    return ByProgram(results)


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with job_root() as path:
        yield path


@pytest.fixture(scope="module")
def first(root: Path) -> ByProgram:
    return life(root, *FIRST, number=0)


@pytest.fixture(scope="module")
def second(root: Path, first: ByProgram) -> ByProgram:
    """Step 40 lacks the iterator of process 0; each process runs on another host than before."""
    removed = list((root / "hosts").glob("*/acceptance/**/*-40/process_00000_of_00004.json"))
    assert len(removed) == 2, "its own and that of a buddy on the other slice"
    for document in removed:
        document.unlink()
    return life(root, "resumed", "nothing_left_to_train", number=1, order=[3, 2, 1, 0])


def test_newest_whole_step_and_its_iterators_come_back(first: ByProgram, second: ByProgram) -> None:
    wanted = {
        "restored": 35,
        "tier": "local",
        "rejected": [40],
        "persistent_before": [25],
        "latest_before": 25,
        "restores": 1,
        "step": 99,
    }
    for resumed, whole in zip(second["resumed"], first["undisturbed"], strict=True):
        assert {key: resumed[key] for key in wanted} == wanted
        assert resumed["losses"] == whole["losses"][35:], "the batches differ"
        assert resumed["state"] == whole["state"]
    assert [seen["losses"] for seen in first["until_44"]] == [
        seen["losses"][:44] for seen in first["undisturbed"]
    ]


def test_tools_find_the_steps_in_storage(first: ByProgram) -> None:
    seen = first["what_the_tools_see"][0]
    names = ["step_00000050", "step_00000075"]
    assert (seen["steps"], seen["paths"], seen["indexed"]) == ([50, 75], names, names)
    assert seen["arrays"]["model/layers/w"] == [[8, 8], "float32"]
    assert seen["arrays"]["learner/optimizer/0/count"] == [[], "int32"]
    assert len(seen["arrays"]) == 1 + 2 + 2 * 2 + 1


def test_trainer_may_ask_again_without_the_iterator(first: ByProgram) -> None:
    for seen in first["iterator_saved_but_not_wanted"]:
        assert seen == {"restores": 2, "trained": 4, "step": 9}


def test_trainer_with_nothing_left_ends_without_stop(second: ByProgram) -> None:
    for seen in second["nothing_left_to_train"]:
        assert seen == {"trained": False, "step": 95, "restores": 1}


def test_nothing_to_restore_gives_the_state_back(first: ByProgram) -> None:
    for seen in first["nothing_is_there"]:
        assert seen == {"found": [None, None], "same": True, "missing": [True, "StepNotFound"]}


def test_structure_is_compared_exactly(first: ByProgram) -> None:
    for process, seen in enumerate(first["structure_is_exact"]):
        for name, error in seen["errors"].items():
            assert error[:2] == [True, "StateMismatch"], (name, error)
            assert PHRASE in error[2], error[2]
            assert f"{name.split()[-1]}: " in error[2], (process, error[2])
        assert seen["unmoved"]
        assert (seen["found"], seen["exactly"]) == (5, [True] * 4)
        assert seen["iterator"] == [True, True]


def test_failure_of_one_process_is_that_of_all(first: ByProgram) -> None:
    for seen in first["one_process_fails"]:
        assert seen == {
            "first": "RestoreFailed",
            "named": True,
            "unmoved": True,
            "without": [True, "StateMismatch"],
            "again": [5, True],
        }


def test_policies_are_asked_once_a_step(first: ByProgram) -> None:
    summaries = [{}, {"score": 0.5}, {"score": 0.4}, {"score": 0.9}, {}]
    asked = [[step, each] for step, each in enumerate(summaries)]
    for seen in first["policies_are_asked_once"]:
        assert seen == {"asked": asked, "steps": [1, 3], "latest": 3}


def test_exception_in_the_loop_passes(first: ByProgram) -> None:
    for seen in first["an_exception_in_the_loop"]:
        assert seen == {"passed": True, "found": 3, "right": True}


def test_readme_sets_it_up(first: ByProgram) -> None:
    for seen in first["as_the_readme_says"]:
        assert seen == [[12, 12], [5, 15]]


def test_without_axlearn_there_is_one_clear_error() -> None:
    program = """
from emergency_ckpt.errors import CheckpointError
try:
    import emergency_ckpt.axlearn
except ImportError as error:
    assert isinstance(error, CheckpointError)
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "axlearn is not installed" in done.stdout
    assert "BaseCheckpointer" in done.stdout
