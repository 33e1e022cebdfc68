"""The model of the step log: replay takes sound traces and refuses each defect, and so does TLC."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from places import VERIFICATION

HERE = VERIFICATION / "model"
sys.path.insert(0, str(HERE))

import replay  # noqa: E402
import run  # noqa: E402

sys.path.remove(str(HERE))

ONE, TWO = "000000000001-aaaaaaaaaaaaaaaa", "000000000002-bbbbbbbbbbbbbbbb"
OTHER_ONE = "000000000001-cccccccccccccccc"
ROLLED_BACK = {
    "head": TWO,
    "start_step": 1,
    "ancestors": [{"incarnation": ONE, "last_step": 1}],
    "oldest_step": 1,
}
Event = dict[str, Any]


def version(
    number: int, incarnation: str, *steps: tuple[int, str, str], chain: Any = None
) -> Event:
    found = {"number": number, "incarnation": incarnation, "chain": chain, "steps": list(steps)}
    return {"kind": "version", **found}


def files(*saves: tuple[int, str]) -> Event:
    return {"kind": "files", "present": list(saves)}


def first_life() -> Iterator[Event]:
    """Yield two saves in storage, of which retention removes the older."""
    yield version(1, ONE)
    yield version(2, ONE, (1, ONE, "complete"))
    yield files((1, ONE))
    yield version(3, ONE, (1, ONE, "complete"), (2, ONE, "complete"))
    yield files((1, ONE), (2, ONE))


def rollback() -> Iterator[Event]:
    """Yield a rollback to step 1, and the save of step 2 anew: the hidden one goes first."""
    chain = ROLLED_BACK
    yield version(4, TWO, (1, ONE, "complete"), (2, ONE, "complete"), chain=chain)
    yield files((1, ONE), (2, ONE))
    yield version(5, TWO, (1, ONE, "complete"), (2, ONE, "hidden"), chain=chain)
    yield version(6, TWO, (1, ONE, "complete"), (2, ONE, "removing"), chain=chain)
    yield files((1, ONE))
    yield version(7, TWO, (1, ONE, "complete"), chain=chain)
    yield version(8, TWO, (1, ONE, "complete"), (2, TWO, "complete"), chain=chain)
    yield files((1, ONE), (2, TWO))


def refused(trace: list[Event]) -> str:
    """Return why the last event of ``trace`` is refused; those before it are not."""
    replay.replay(trace[:-1])
    with pytest.raises(replay.Refused) as caught:
        replay.replay(trace)
    assert caught.value.index == len(trace) - 1
    return str(caught.value)


def test_replay_takes_saves_a_removal_and_a_rollback() -> None:
    removal = [
        version(9, TWO, (1, ONE, "removing"), (2, TWO, "complete"), chain=ROLLED_BACK),
        files((2, TWO)),
        version(10, TWO, (2, TWO, "complete"), chain=ROLLED_BACK),
    ]
    names = replay.replay([*first_life(), *rollback(), *removal])
    assert set(names) == {
        *("Claim", "ListStep", "MarkHidden", "MarkRemoving", "Unlist", "DeleteFile")
    }


def test_replay_refuses_to_hide_what_counts() -> None:
    hidden = version(4, TWO, (1, ONE, "complete"), (2, ONE, "hidden"))
    assert "is on the chain" in refused([*first_life(), hidden])


def test_replay_refuses_a_hidden_step_that_counts_again() -> None:
    """A third life continues from it: what counts is what that saves."""
    three = "000000000003-dddddddddddddddd"
    link = {"incarnation": ONE, "last_step": 2}
    chain = {"head": three, "start_step": 2, "ancestors": [link], "oldest_step": 2}
    hidden = [*first_life(), *list(rollback())[:3]]
    back = version(6, three, (1, ONE, "complete"), (2, ONE, "complete"), chain=chain)
    assert "goes from 'hidden' to 'complete'" in refused([*hidden, back])


def test_replay_refuses_a_save_beside_a_hidden_one() -> None:
    """A number has one entry."""
    table = [(1, ONE, "complete"), (2, ONE, "hidden"), (2, TWO, "complete")]
    beside = version(6, TWO, *table, chain=ROLLED_BACK)
    assert "two steps of one number" in refused([*first_life(), *list(rollback())[:3], beside])


def test_replay_takes_what_a_claim_finds_unlisted() -> None:
    found = version(4, TWO, (1, ONE, "complete"), (2, ONE, "complete"), (3, ONE, "complete"))
    look = files((1, ONE), (2, ONE), (3, ONE))
    assert replay.replay([*first_life(), look, found])[-1] == "Claim"


def test_replay_refuses_a_version_written_twice() -> None:
    """Create without precondition: the table of one who has read an older version."""
    stale = version(3, TWO, (1, ONE, "complete"))
    assert "version 3 follows 3" in refused([*first_life(), stale])
    lost = version(4, ONE, (1, ONE, "complete"), (3, ONE, "complete"))
    assert "goes from 'complete' to ''" in refused([*first_life(), lost])


@pytest.mark.parametrize("late", [ONE, OTHER_ONE])
def test_replay_refuses_a_version_of_an_older_life(late: str) -> None:
    trace = [*first_life(), *rollback()]
    table = [*trace[-2]["steps"], (3, late, "complete")]
    assert "was on record" in refused([*trace, version(9, late, *table, chain=ROLLED_BACK)])


def test_replay_refuses_a_chain_that_goes_back() -> None:
    table = [(1, ONE, "complete"), (2, TWO, "complete")]
    assert "its chain is older" in refused([*first_life(), *rollback(), version(9, TWO, *table)])


def test_replay_refuses_a_marker_before_the_data() -> None:
    """A claim takes what has both markers and lacks a host state."""
    found = version(4, TWO, (1, ONE, "complete"), (2, ONE, "complete"), (3, ONE, "complete"))
    trace = [*first_life(), found, files((1, ONE), (2, ONE))]
    assert "behind what was removed: [(3" in refused(trace)


def test_replay_refuses_to_drop_a_step_that_is_there() -> None:
    dropped = version(4, TWO, (2, ONE, "complete"))
    assert "it drops (1" in refused([*first_life(), dropped])


def test_replay_refuses_a_removal_before_its_version() -> None:
    assert "behind what was removed" in refused([*first_life(), files((2, ONE))])


def test_replay_refuses_an_event_without_its_fields() -> None:
    assert "it has no present" in refused([{"kind": "files"}])
    assert refused([{"kind": "unheard of"}])


def test_actions_of_replay_are_those_of_the_model() -> None:
    text = run.MODULE.read_text()
    named = set(re.findall(r"\b([A-Z]\w+)(?:\(|\b)", text[text.index("\nNext ==") :]))
    assert {action.name for action in replay.ACTIONS} <= named
    assert {action.kind for action in replay.ACTIONS} == set(replay.KINDS)


def test_checks_name_constants_and_invariants_of_the_model() -> None:
    invariants = set(run.CONFIG.read_text().partition("INVARIANTS")[2].split())
    for check in run.CHECKS.values():
        run.configuration(check.constants)
        assert set(check.violated) <= invariants
    found = {name for check in run.CHECKS.values() for name in check.violated}
    assert found == invariants  # of none is it unknown that it can fail


@pytest.mark.parametrize("name", ["own-choice", "order-by-clock"])
def test_tlc_finds_a_defect(name: str) -> None:
    jar = run.find_jar()
    if jar is None or run.rejection_reason(jar):
        pytest.skip(run.rejection_reason(jar))
    check = run.CHECKS[name]
    assert run.run_tlc(jar, check.constants, workers=1, heap="1g").violated in check.violated


def test_tlc_finds_the_model_of_one_step_sound() -> None:
    jar = run.find_jar()
    if jar is None or run.rejection_reason(jar):
        pytest.skip(run.rejection_reason(jar))
    result = run.run_tlc(jar, {"Last": "1"}, workers=1, heap="1g")
    assert result.is_complete
    assert result.states > 1000
