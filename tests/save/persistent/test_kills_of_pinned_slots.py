"""SIGKILL in each phase of a persistent save that writes from a slot, and the lives after it.

Each life has the RAM and the storage that the one before left, with a slot that storage still had.
"""

from __future__ import annotations

import json
from typing import Any

from pinned_kills_program import PERSISTENT_EVERY
from places import JOBS
from programs import printed
from world import World

AHEAD = PERSISTENT_EVERY - 1
BEFORE, AFTER = False, True
POINTS: dict[tuple[str, int], bool] = {
    ("save.stage.invalidated", 0): BEFORE,
    ("save.stage.copied", 0): BEFORE,
    ("save.stage.published", 0): BEFORE,
    ("persistent.stage.captured", AHEAD): BEFORE,
    ("persistent.stage.host_states_written", AHEAD): BEFORE,
    ("commit", AHEAD): BEFORE,
    ("persistent.stage.tensors_written", AHEAD): BEFORE,
    ("persistent.stage.published", AHEAD): AFTER,
    ("persistent.complete", AHEAD): AFTER,
}
"""Event of the kill, and how many local saves come before it; whether storage has the step then."""


def test_kills_of_lives_with_a_pinned_slot_lose_no_step(world: World) -> None:
    root = world.ramdisk.parent
    told = printed(JOBS / "pinned_kills_program.py", root, json.dumps(list(POINTS)), timeout_s=250)
    *lives, last = json.loads(told.splitlines()[-1])
    newest: int = 0  # that RAM must have at the least
    for life, ((point, ahead), has_step), seen in zip(
        range(1, len(lives) + 1), POINTS.items(), lives, strict=True
    ):
        assert seen["status"] == -9, point
        begun = seen["begun"]["step"] or 0
        assert begun in (newest, newest + 1), point
        check(seen["begun"], life - 1)
        whole = -(-(begun + 1) // PERSISTENT_EVERY) * PERSISTENT_EVERY
        victim = whole + PERSISTENT_EVERY
        newest = victim + ahead if ahead else victim - 1
        assert seen["stored"]["step"] == (victim if has_step else whole), point
        check(seen["stored"], life)
    assert last["begun"]["step"] in (newest, newest + 1)
    check(last["begun"], len(lives))


def check(seen: dict[str, Any], life: int) -> None:
    """What was restored is one step of one life, tensors and host state."""
    step = seen["step"]
    if step is not None:
        assert (seen["values"], seen["position"]) == ([1000 * life + step], step)
