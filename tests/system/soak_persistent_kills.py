"""Every role of a persistent save killed at every point; ``make soak-kill``, about half an hour.

Points: each event; each request of the save that changes the bucket, before it is applied; each
change that Python makes to a directory. ``ECKPT_SOAK_EVERY=n`` takes each n-th of the latter two.
"""

from __future__ import annotations

import os
from itertools import count

import pytest
from crashes import Kill, crash
from kill_job import THROUGH
from persistent_kills import (
    EVENTS,
    NEW,
    OLD,
    check,
    crash_all,
    is_complete,
    kill_of,
    place_for_jobs,
    recover_all,
)

pytestmark = pytest.mark.timeout(3600)

EVERY = int(os.environ.get("ECKPT_SOAK_EVERY", "1"))
WRITERS = ("writer", "first_writer", "second_writer")


@pytest.mark.parametrize("role", ["writer", "giver", "first_writer", "second_writer"])
@pytest.mark.parametrize("bucket", [False, True])
def test_killed_at_each_event(role: str, bucket: bool) -> None:
    kills = {kill_of(*key, bucket=bucket): step for key, step in EVENTS.items() if key[0] == role}
    with place_for_jobs() as (root, gcs):
        assert crash_all(root, list(kills)) == {}
        steps = {kill: NEW if is_complete(root, gcs, kill) else OLD for kill in kills}
        assert {kill: step for kill, step in steps.items() if kills[kill]} == {
            kill: step for kill, step in kills.items() if step
        }
        found = recover_all(root, list(kills))
        for kill, step in steps.items():
            check(found[kill.name], kill, step)


@pytest.mark.parametrize("role", WRITERS)
@pytest.mark.parametrize("kind", ["request", "file"])
def test_killed_at_each_change(role: str, kind: str) -> None:
    with place_for_jobs() as (root, gcs):
        kills: list[Kill] = []
        for number in count(0, EVERY):
            kill = kill_of(role, f"{kind}#{number}", bucket=kind == "request")
            kills.append(kill)
            if crash(root, kill).step == THROUGH:
                break
        steps = {kill: NEW if is_complete(root, gcs, kill) else OLD for kill in kills}
        gcs.clear_faults()  # that of the last one hit nothing
        print(f"{role}: died at {len(kills) - 1} changes; whole afterwards: {list(steps.values())}")
        found = recover_all(root, kills)
        for kill, step in steps.items():
            check(found[kill.name], kill, step)
        # It was killed before, and after, the one change that makes the step count.
        assert steps[kills[0]] == OLD
        assert steps[kills[-1]] == NEW
