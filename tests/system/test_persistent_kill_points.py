"""A process is killed with SIGKILL at named points of a save to the persistent tier.

After each crash all RAM is lost. Step 10 must be restorable as long as step 15 is not whole, and
the next life must be able to go on, over whatever the dead one left, and clear it away.
``soak_persistent_kills.py`` has all points and all roles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from crashes import Kill
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

pytestmark = pytest.mark.timeout(900)

KILLS = {
    kill.name: (kill, step)
    for kill, step in [
        *[
            (kill_of(*key), EVENTS[key])
            for key in [
                ("writer", "persistent.stage.tensors_written"),
                ("first_writer", "persistent.stage.published"),
                ("giver", "persistent.complete"),
                ("second_writer", "persistent.stage.host_states_written"),
            ]
        ],
        (kill_of("writer", "request:15/commit_success.txt", bucket=True), OLD),
        (kill_of("second_writer", "request:15/*/ocdbt.process_1x*/d/*", bucket=True), OLD),
        # Both markers are there, and the version that lists the step is not.
        (kill_of("writer", "request:host_state/log/*", bucket=True), NEW),
        # Between the data and the manifest of one of two writers.
        (kill_of("second_writer", "request:15/*/ocdbt.process_1x*/manifest.*", bucket=True), OLD),
    ]
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Crash every case that was asked for; then one life for each shape of job restores them."""
    names: list[str] = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    kills: list[Kill] = [KILLS[name][0] for name in names]
    with place_for_jobs() as (root, gcs):
        errors = crash_all(root, kills)
        crashed = [kill for kill in kills if kill.name not in errors]
        whole = {kill.name: is_complete(root, gcs, kill) for kill in crashed}
        found = recover_all(root, crashed)
        yield {name: errors.get(name) or (whole[name], found[name]) for name in names}


@pytest.mark.parametrize("name", KILLS)
def test_killed_in_a_persistent_save(outcomes: dict[str, Any], name: str) -> None:
    outcome = outcomes[name]
    if isinstance(outcome, AssertionError):
        raise outcome
    whole, seen = outcome
    kill, step = KILLS[name]
    assert whole == (step != OLD)
    check(seen, kill, step)
