"""Which run may save in a directory."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.run_claim import RunRecord, decide_claim

MINE = RunRecord("run", False, "0002-b")


@pytest.mark.parametrize(
    ("there", "known", "expected"),
    [
        (None, (), "write"),
        (MINE, (), "hold"),
        (RunRecord("run", False, "0001-a"), (), "write"),
        (RunRecord("run", False, "0003-c"), (), "refuse"),
        (RunRecord("run", False, "0003-c"), ("0003-c",), "write"),
        (RunRecord("other", False, "0001-a"), (), "refuse"),
        (RunRecord("other", True, "0002-b"), ("0002-b",), "refuse"),
    ],
)
def test_decide_claim_of_records_gives(
    there: RunRecord | None, known: tuple[str, ...], expected: str
) -> None:
    assert decide_claim(there, MINE, known)[0] == expected


def test_decide_claim_in_a_moved_directory_goes_on() -> None:
    there, mine = RunRecord("dir-1", True, "0001-a"), RunRecord("moved-2", True, "0002-b")
    assert decide_claim(there, mine)[0] == "write"


def test_decide_claim_of_one_that_lost_it_refuses_any_other() -> None:
    there = RunRecord("run", False, "0001-a")
    assert decide_claim(there, MINE, {"0001-a"}, held=True)[0] == "refuse"
    assert decide_claim(MINE, MINE, held=True)[0] == "hold"
    assert decide_claim(None, MINE, held=True)[0] == "write"
