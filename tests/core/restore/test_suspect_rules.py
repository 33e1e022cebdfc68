"""When a save is suspect, and what is told of it."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.restore.inventory import RestoredSave, lives_from, suspicion
from emergency_ckpt.types import SaveId

LIFE = "000000000003-5e9d5e9d5e9d5e9d"
SAVE = SaveId(40, LIFE, "run")
OTHER = SaveId(40, "000000000004-5e9d5e9d5e9d5e9d", "run")


def test_lives_are_those_of_the_record_that_knows_of_most() -> None:
    records = [RestoredSave(SAVE, 2), RestoredSave(OTHER, 9), RestoredSave(SAVE, 4)]
    assert lives_from(SAVE, records) == 4
    assert lives_from(SaveId(41, LIFE, "run"), records) == 0


@pytest.mark.parametrize(
    ("reached", "text"),
    [(40, "complete; it is restored again"), (43, ", the last came to step 43 or further; it is")],
)
def test_text_says_how_far_it_came_and_what_is_done(reached: int, text: str) -> None:
    said = suspicion(RestoredSave(SAVE, 3), reached)
    assert said.startswith("3 lives in a row ended before a newer save than step 40 was complete")
    assert text in said
    assert said.endswith("restore(step=...) goes back further")
