"""A process is killed with SIGKILL at each named point of a save to the persistent tier.

After each crash all RAM is lost. Step 10 must be restorable as long as step 15 is not whole, and
the next life must be able to save step 15 again, over whatever the dead one left.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crashes import Kill, crash
from support import job_root, run_life, spec_of

pytestmark = pytest.mark.timeout(900)

OLD, NEW = 10, 15

# Two slices of one host: process 0 writes, process 1 gives it its host state.
# One slice of two hosts: both write.
WANTED = {
    ("writer", "persistent.started"): OLD,
    ("writer", "persistent.tensors_written"): OLD,
    ("writer", "persistent.host_states_written"): OLD,
    ("writer", "persistent.complete"): NEW,
    ("giver", "persistent.started"): OLD,
    # The writer ends the save alone.
    ("giver", "persistent.complete"): NEW,
    ("second_writer", "persistent.started"): OLD,
    ("second_writer", "persistent.tensors_written"): OLD,
    ("second_writer", "persistent.host_states_written"): OLD,
    ("second_writer", "persistent.complete"): NEW,
}
SHAPES = {"writer": (2, 1), "giver": (2, 1), "second_writer": (1, 2)}


def kill_of(role: str, point: str) -> Kill:
    slices, hosts = SHAPES[role]
    return Kill(
        name=f"{role}-{point}",
        program="crash_in_persistent_save",
        point=point,
        victim=0 if role == "writer" else 1,
        finishes=(role, point) == ("giver", "persistent.complete"),
        slices=slices,
        hosts=hosts,
    )


KILLS = [kill_of(*key) for key in WANTED]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, list[Any]]]:
    """Crash every case that was asked for; then one life for each shape of job restores them."""
    kills: list[Kill] = [
        item.callspec.params["kill"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    with job_root() as root:
        found: dict[str, list[Any]] = {}
        with ThreadPoolExecutor(2) as pool:
            errors = dict(zip(kills, pool.map(lambda k: attempt(root, k), kills), strict=True))
        for life, (slices, hosts) in enumerate(sorted(set(SHAPES.values()))):
            names = [k.name for k in kills if (k.slices, k.hosts) == (slices, hosts)]
            spec = spec_of(
                root, "kill_job.py", "recover_persistent", *names, slices=slices, hosts=hosts
            )
            results = run_life(spec, root, life=life) if names else []
            found.update({name: [result[name] for result in results] for name in names})
        found.update({k.name: [error] for k, error in errors.items() if error is not None})
        yield found


def attempt(root: Path, kill: Kill) -> AssertionError | None:
    try:
        crash(root, kill)
    except AssertionError as error:
        return error
    return None


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.name)
def test_killed_in_a_persistent_save(outcomes: dict[str, list[Any]], kill: Kill) -> None:
    if isinstance(outcomes[kill.name][0], AssertionError):
        raise outcomes[kill.name][0]
    assert all("value" in outcome for outcome in outcomes[kill.name]), outcomes[kill.name]
    role, _, point = kill.name.partition("-")
    step = WANTED[role, point]
    right = {"tier": "persistent", "differences": [], "iterator_right": True}
    for outcome in outcomes[kill.name]:
        seen = outcome["value"]
        assert seen == {
            "step": step,
            **right,
            "saved": [5, *range(10, step + 15, 5)],
            "leftovers": [],
            "again": {"step": step + 10, **right},
        }
