"""When a save is suspect, and which step is taken in its place."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.restore.inventory import (
    PersistentStep,
    RestoredSave,
    lives_from,
    newest_older,
    suspicion,
)
from emergency_ckpt.core.timeline import Ancestor, Timeline
from emergency_ckpt.types import SaveId

LIFE = "000000000003-5e9d5e9d5e9d5e9d"
SAVE = SaveId(40, LIFE, "run")
OTHER = SaveId(40, "000000000004-5e9d5e9d5e9d5e9d", "run")


def test_lives_are_those_of_the_record_that_knows_of_most() -> None:
    records = [RestoredSave(SAVE, 2), RestoredSave(OTHER, 9), RestoredSave(SAVE, 4)]
    assert lives_from(SAVE, records) == 4
    assert lives_from(SaveId(41, LIFE, "run"), records) == 0


def test_newest_older_step_is_one_that_may_be_restored() -> None:
    stored = [
        PersistentStep(10, 1, False, LIFE),
        PersistentStep(20, 1, False, LIFE),
        PersistentStep(30, 1, False, LIFE, problem="its marker is damaged"),
        PersistentStep(40, 1, False, LIFE),
    ]
    assert newest_older(stored, 40, None) == 20
    assert newest_older(stored, 10, None) is None
    head = "000000000005-5e9d5e9d5e9d5e9d"
    back = Timeline(head, 10, (Ancestor(LIFE, 10),), -1)
    assert newest_older(stored, 40, back) == 10  # 20 was rolled back


@pytest.mark.parametrize(
    ("reached", "older", "limit", "text"),
    [
        (40, None, None, "complete; it is restored again, as suspect_lives is not set"),
        (43, 30, 3, "the last came to step 43 or further; step 30 of storage is restored instead"),
        (40, None, 3, "complete; it is restored again: storage has no older step"),
    ],
)
def test_text_says_how_far_it_came_and_what_is_done(
    reached: int, older: int | None, limit: int | None, text: str
) -> None:
    said = suspicion(RestoredSave(SAVE, 3), reached, older, limit)
    assert said.startswith("3 lives in a row ended before a newer save than step 40 was complete")
    assert said.endswith(text)
