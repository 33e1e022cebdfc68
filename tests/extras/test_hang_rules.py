"""The decision that a job hangs, and which process the others wait for."""

from __future__ import annotations

import pytest

from emergency_ckpt.extras.hang import ProcessProgress as At
from emergency_ckpt.extras.hang import decide_hang

STILL_S = 70.0
TIMEOUT_S = 60.0


def at(step: int | None, **fields: object) -> At:
    return At(step, **{"still_s": STILL_S, **fields})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("progress", "behind", "words"),
    [
        ({0: at(7), 1: at(6), 2: at(7)}, (1,), "process 1 fell behind: at step 6 for 70.0 s"),
        (
            {0: at(7, place="a:1"), 1: at(7, place="a:2"), 2: at(7, place="a:1")},
            (1,),
            "process 1 at a:2, the others at a:1",
        ),
        (
            {0: at(7, place="a:1"), 1: at(7, place="a:2")},
            (0, 1),
            "process 0 at a:1 and process 1 at a:2",
        ),
        ({p: at(7, place=f"a:{p}") for p in range(3)}, (0, 1, 2), "all processes"),
        ({0: at(7), 1: at(7)}, (0, 1), "all processes stand at step 7"),
        (
            {0: at(7), 1: at(9, is_silent=True)},
            (1,),
            "process 1 sent nothing; last: step 9",
        ),
        ({0: at(7), 1: at(None, is_silent=True)}, (1,), "before its first step"),
        ({0: at(7), 1: at(3, has_left=True), 2: at(6)}, (2,), "process 2"),
        ({0: at(7, call="save", call_limit_s=1e6), 1: at(6)}, (1,), "process 1 fell behind"),
        ({0: at(7), 1: at(6, call="save", call_limit_s=STILL_S)}, (1,), "checkpointer's save"),
        ({p: at(int(p > 8)) for p in range(12)}, tuple(range(9)), "6, 7 and 1 more"),
    ],
)
def test_hang_is_found_and_names_those_behind(
    progress: dict[int, At], behind: tuple[int, ...], words: str
) -> None:
    decision = decide_hang(progress, TIMEOUT_S)
    assert decision.is_hang
    assert decision.behind == behind
    assert words in decision.reason


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        ({0: at(7), 1: at(None)}, "process 1 has not made its first step"),
        ({0: at(7), 1: at(6, still_s=59.0)}, "process 1 moved within 60 s"),
        (
            {0: at(7), 1: at(6, call="save", call_limit_s=71.0)},
            "process 1 is in the checkpointer's",
        ),
        ({0: at(7, has_left=True)}, "all processes have left"),
    ],
)
def test_hang_is_denied_while_a_wait_has_a_reason(progress: dict[int, At], words: str) -> None:
    decision = decide_hang(progress, TIMEOUT_S)
    assert not decision.is_hang
    assert decision.behind == ()
    assert words in decision.reason
