"""The rule by which signs of the network end a wait, or tell a death."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.peer_state import SILENCE_S, Signs, decide

LONG_S = SILENCE_S

TABLE = [
    # closed, refused, silent_s, said, kind
    (False, False, None, "", "present"),
    (True, False, None, "", "present"),  # an idle connection, or a server that was started again
    (False, True, None, "", "absent"),  # a firewall may refuse too
    (True, True, None, "", "dead"),
    (False, False, 0.0, "", "present"),
    (False, False, LONG_S - 0.1, "", "present"),
    (False, False, LONG_S, "", "absent"),
    (True, False, 0.0, "", "absent"),
    (True, False, 10 * LONG_S, "", "absent"),  # a partition looks like this, however long
    (False, False, None, "process 3 found it", "dead"),
    (True, True, None, "process 3 found it", "dead"),
]


@pytest.mark.parametrize(("closed", "refused", "silent_s", "said", "kind"), TABLE)
def test_decide_by_the_signs(
    closed: bool, refused: bool, silent_s: float | None, said: str, kind: str
) -> None:
    state = decide(Signs(closed, refused, silent_s, said))
    assert state.kind == kind
    assert bool(state.reason) == (kind != "present")


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("silent_s", [0.0, LONG_S, 3600.0])
def test_silence_never_tells_a_death(closed: bool, silent_s: float) -> None:
    assert decide(Signs(closed, silent_s=silent_s)).kind != "dead"
