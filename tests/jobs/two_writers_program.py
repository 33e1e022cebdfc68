"""A second life saves while the first one stands still in a save, and wakes up.

``outcomes`` says what came of it in a directory or bucket; ``test_two_writers.py`` judges.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from bucket_histories import error_of
from persistent_steps import POINTS, complete_steps, life, save_over, value_of, writer_of

from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.log import KEPT

STEP, OTHER = 4, 6
"""What the older life saves, and from where on the newer one does, unless that is the same."""


def same_step(directory: str) -> None:
    save_over(PersistentTier(directory), STEP, 10 * STEP, life(2))


def other_step(directory: str) -> None:
    save_over(PersistentTier(directory), OTHER, OTHER, life(2))


def many_steps(directory: str) -> None:
    """So that the version after the one that the older life has read is removed again."""
    tier = PersistentTier(directory)
    writer = writer_of(tier)
    for step in range(OTHER, OTHER + KEPT):
        save_over(tier, step, step, life(2), writer=writer)


def other_run(directory: str) -> None:
    """As a user tells it to, who takes the first life for dead."""
    tier = PersistentTier(directory)
    writer = writer_of(tier, "other", take_over=True)
    save_over(tier, OTHER, OTHER, life(2), writer=writer)


def twin(directory: str) -> None:
    """A life with the number of the first, that knew nothing of it: as one without its log."""
    save_over(PersistentTier(directory), OTHER, OTHER, life(1, "f"))


ACTS: dict[str, Callable[[str], None]] = {
    each.__name__: each for each in (same_step, other_step, many_steps, other_run, twin)
}


def outcome(directory: str, point: str, act: str) -> dict[str, Any]:
    """Of a save of step 4 that stands still at ``point`` until ``act`` is done."""
    tier = PersistentTier(directory)
    writer = writer_of(tier)
    save_over(tier, 2, 2, life(1), writer=writer)
    errors = {"newer": ""}

    def at(name: str) -> None:
        if name == point:
            errors["newer"] = error_of(lambda: ACTS[act](directory))

    errors["older"] = error_of(lambda: save_over(tier, STEP, STEP, life(1), writer=writer, at=at))
    found = {"errors": errors, **look(directory)}
    errors["next"] = error_of(lambda: save_over(tier, 5, 5, life(1), writer=writer))
    run = "other" if act == "other_run" else "run"
    writer_of(PersistentTier(directory), run).begin(life(3))
    return {**found, "then": look(directory)}


def look(directory: str) -> dict[str, Any]:
    """The value of each step that counts, and the steps that plain Orbax has."""
    tier = PersistentTier(directory)
    with ocp.CheckpointManager(directory) as manager:
        plain = list(manager.all_steps())
    values = {step: value_of(tier, step) for step in complete_steps(tier)}
    return {"ours": sorted(values.items()), "plain": sorted(plain)}


def outcomes(directory: str) -> dict[str, Any]:
    return {
        f"{point} {act}": outcome(f"{directory}/{point}-{act}", point, act)
        for point in POINTS
        for act in ACTS
    }


if __name__ == "__main__":
    print(json.dumps(outcomes(sys.argv[1])))
