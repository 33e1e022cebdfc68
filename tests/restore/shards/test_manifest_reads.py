"""Which manifests a plan must wait for: those of saves that would go before what it found."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan
from emergency_ckpt.restore.holders import passed_over_unread
from emergency_ckpt.types import SaveId

UNREAD = {
    f"{step}{life}": SaveId(step, life, "run")
    for step, life in [(4, "b"), (8, "a"), (8, "b"), (8, "c"), (12, "b")]
}


def in_ram(step: int, life: str) -> RestorePlan:
    return RestorePlan(step, SaveId(step, life, "run"), {})


STORED = RestorePlan(8, None, {})


@pytest.mark.parametrize(
    ("answer", "requested", "loaded", "expected", "asked"),
    [
        (in_ram(8, "b"), None, (), ["8c", "12b"], []),
        (in_ram(4, "b"), 4, (), [], []),
        (in_ram(8, "c"), 8, (), [], ["8a", "8b"]),
        (in_ram(12, "b"), None, (), [], []),
        (STORED, None, (), ["8c", "12b"], ["8a", "8b"]),
        (STORED, None, (8,), ["8a", "8b", "8c", "12b"], []),
        (NoPlan("unrecoverable"), None, (), list(UNREAD), []),
        (NoPlan("nothing"), None, (), list(UNREAD), []),
        (NoPlan("step_not_found", step=8), 8, (), ["8a", "8b", "8c"], []),
        (NoPlan("state_mismatch", step=8), None, (), ["12b"], ["8a", "8b", "8c"]),
        (NoPlan("foreign", step=8), None, (), ["12b"], ["8a", "8b", "8c"]),
    ],
)
def test_unread_manifests_of_newer_saves_are_waited_for(
    answer: RestorePlan | NoPlan,
    requested: int | None,
    loaded: tuple[int, ...],
    expected: list[str],
    asked: list[str],
) -> None:
    """``asked``: those that are not waited for, but asked for, beside ``expected``."""
    waited_for, read = (
        passed_over_unread(
            answer,
            UNREAD.items(),
            requested,
            stored={8: "b"},
            loaded_steps=loaded,
            is_patient=is_patient,
        )
        for is_patient in (True, False)
    )
    assert waited_for == expected
    assert sorted(read) == sorted([*expected, *asked])
