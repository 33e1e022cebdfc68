"""After a SIGKILL at any named point of a save or restore, the next life restores a whole step.

Two slices of one host: each holds the whole state. After each crash three worlds are tried: all RAM
kept, the victim's slice lost, the survivor's slice lost. Steps 5 and 10 were complete before; step
15 may come back only where every shard and both host states of it are held by what is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crashes import RESTORE_RETURNED, Kill, copy_without, crash
from running_jobs import job_root, run_life, spec_of

# The cases of this file crash in one fixture and are restored by one life.
pytestmark = pytest.mark.timeout(1800)

OLD, NEW = 10, 15

# The step that must come back: all RAM kept, the victim's lost, the survivor's lost.
AFTER_SAVE = {
    ("save.started", "ahead"): (OLD, OLD, OLD),
    ("save.stage.invalidated", "ahead"): (OLD, OLD, OLD),
    ("save.stage.copying", "ahead"): (OLD, OLD, OLD),
    ("save.stage.copied", "ahead"): (OLD, OLD, OLD),
    ("save.stage.staged", "ahead"): (OLD, OLD, OLD),
    # The victim's host state of step 15 is nowhere, though both hold all tensors.
    ("save.stage.published", "ahead"): (OLD, OLD, OLD),
    # It is in the victim's RAM alone.
    ("save.stage.host_state_published", "ahead"): (NEW, OLD, NEW),
    ("save.stage.pushed", "ahead"): (NEW, NEW, NEW),
    ("save.stage.voted", "ahead"): (NEW, NEW, NEW),
    ("save.complete", "ahead"): (NEW, NEW, NEW),
    # The survivor's host state of step 15 is nowhere.
    ("save.stage.copying", "behind"): (OLD, OLD, OLD),
    ("save.stage.published", "behind"): (OLD, OLD, OLD),
    ("save.stage.host_state_published", "behind"): (OLD, OLD, OLD),
    ("save.stage.pushed", "behind"): (OLD, OLD, OLD),
}
IN_RESTORE = (
    "restore.stage.planned",
    "restore.stage.fetched",
    "restore.finished",
    RESTORE_RETURNED,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A crash, and the step that each world after it must restore, by its name."""

    kill: Kill
    worlds: dict[str, int]
    lost: dict[str, int]


def save_case(point: str, survivor: Any, victim: int) -> Case:
    name = f"{point}-{survivor}-{victim}"
    kill = Kill(name, "crash_in_save", point, victim, survivor)
    names = (name, f"{name}+victim_lost", f"{name}+survivor_lost")
    steps = AFTER_SAVE[point, survivor]
    return Case(
        kill, dict(zip(names, steps, strict=True)), {names[1]: victim, names[2]: 1 - victim}
    )


def restore_case(point: str, victim: int) -> Case:
    """Host 1 lost its RAM and fetches; once ``restore`` has returned, host 0 may lose its own.

    Not sooner: a process finishes its part while another's host state is still on its way here.
    """
    name = f"{point}-{victim}"
    kept = point == RESTORE_RETURNED
    kill = Kill(name, "crash_in_restore", point, victim, "free" if kept else "ahead")
    last = f"{name}+source_lost"
    return Case(kill, {name: OLD, last: OLD} if kept else {name: OLD}, {last: 0} if kept else {})


IN_MAKE_TEST = {
    "save.stage.copying-ahead-0",
    "save.stage.pushed-ahead-0",
    "restore.stage.planned-0",
}


def of_both(cases: list[Case]) -> list[Any]:
    """Each crash of either victim; every other one, of both in turn, is left to the slow tests."""
    slow = [
        case
        for number, case in enumerate(cases)
        if number % 4 in (1, 2) and case.kill.name not in IN_MAKE_TEST
    ]
    return [
        pytest.param(
            case,
            marks=[
                *([pytest.mark.slow] if case in slow else []),
                *([pytest.mark.core] if case.kill.name in IN_MAKE_TEST else []),
            ],
        )
        for case in cases
    ]


SAVES = [save_case(*key, victim) for key in AFTER_SAVE for victim in (0, 1)]
RESTORES = [restore_case(point, victim) for point in IN_RESTORE for victim in (0, 1)]
BASE = Kill("base", "crash_in_save", "save.stage.staged", 1, "ahead")


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> Iterator[dict[str, list[Any]]]:
    """Crash every case that was asked for; then one life of fresh processes restores them all."""
    cases: list[Case] = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    with job_root() as root:
        outcomes: dict[str, list[Any]] = {}
        if any(case in RESTORES for case in cases):
            crash(root, BASE)
        names: list[str] = []
        with ThreadPoolExecutor(2) as pool:
            for case, error in zip(cases, pool.map(lambda c: attempt(root, c), cases), strict=True):
                outcomes.update({name: [error] for name in case.worlds})
                names += case.worlds if error is None else ()
        results = run_life(spec_of(root, "kill_job.py", "recover", *names, hosts=1), root)
        outcomes.update({name: [result[name] for result in results] for name in names})
        yield outcomes


def attempt(root: Path, case: Case) -> AssertionError | None:
    """One crash, and the worlds after it; what went wrong is for the test of this case."""
    if case in RESTORES:
        copy_without(root, BASE.name, case.kill.name, [1])
    try:
        crash(root, case.kill)
    except AssertionError as error:
        return error
    for name, host in case.lost.items():
        copy_without(root, case.kill.name, name, [host])
    return None


def check(worlds: dict[str, list[Any]], case: Case) -> None:
    for name, step in case.worlds.items():
        outcomes = worlds[name]
        if isinstance(outcomes[0], AssertionError):
            raise outcomes[0]
        assert all("value" in outcome for outcome in outcomes), (name, outcomes)
        for outcome in outcomes:
            seen = outcome["value"]
            saved, slots = seen.pop("saved", None), seen.pop("slots")
            assert seen == {
                "step": step,
                "tier": "local",
                "differences": [],
                "iterator_right": True,
                "leftovers": [],
            }, name
            if name == case.kill.name:
                assert saved == [step + 10], name
                assert slots == ["slot_0.bin", "slot_1.bin"], name


@pytest.mark.parametrize("case", of_both(SAVES), ids=lambda case: case.kill.name)
def test_killed_in_a_save(worlds: dict[str, list[Any]], case: Case) -> None:
    check(worlds, case)


@pytest.mark.parametrize("case", of_both(RESTORES), ids=lambda case: case.kill.name)
def test_killed_in_a_restore(worlds: dict[str, list[Any]], case: Case) -> None:
    check(worlds, case)
