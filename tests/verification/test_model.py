"""The model of the step log: replay takes sound traces and refuses each defect, and so does TLC."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
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


PLAIN = "000000000000-orbax-00ff"
"""What a first save adopts."""


def foreign(number: int) -> str:
    return f"{number:012d}-orbax-00ff"


def first_save(plain: str = PLAIN) -> list[Event]:
    """A first save of a directory in which another program has saved step 1."""
    return [version(1, ONE), version(2, ONE, (1, plain, "complete"))]


def test_replay_takes_an_adoption_by_the_first_save() -> None:
    save = version(3, ONE, (1, PLAIN, "complete"), (2, ONE, "complete"))
    trace = [*first_save(), files((1, PLAIN)), save, files((1, PLAIN), (2, ONE))]
    assert replay.replay(trace) == ["Claim", "Claim", "DeleteFile", "ListStep", "DeleteFile"]


def test_replay_refuses_an_adopted_step_as_new_as_its_life() -> None:
    """Its own chain would let the step count, though a restore of an older one began the life."""
    assert "not older than the life" in refused(first_save(foreign(1)))


def test_replay_refuses_an_adopted_step_that_is_not_whole() -> None:
    assert "behind what was removed: [(1" in refused([*first_save(), files()])


@pytest.mark.parametrize("life", [ONE, TWO])
def test_replay_refuses_an_adoption_beside_entries_by_a_save(life: str) -> None:
    table = [(1, ONE, "complete"), (2, ONE, "complete"), (3, PLAIN, "complete")]
    assert "beside a log with entries" in refused([*first_life(), version(4, life, *table)])


def test_replay_takes_what_a_person_adopts() -> None:
    """Also in the place of a listed step, which another program has written again."""
    table = [(1, ONE, "complete"), (2, foreign(1), "complete"), (3, foreign(2), "complete")]
    assert replay.replay([*first_life(), version(4, ONE, *table)])[-1] == "Adopt"


def test_replay_refuses_a_person_who_adopts_in_an_empty_log() -> None:
    adopted = version(2, ONE, (1, foreign(1), "complete"))
    assert "the log has no entry" in refused([version(1, ONE), adopted])


def test_replay_refuses_a_person_who_adopts_with_a_claim() -> None:
    table = [(1, ONE, "complete"), (2, ONE, "complete"), (3, foreign(2), "complete")]
    assert "Adopt: it claims" in refused([*first_life(), version(4, TWO, *table)])


def test_replay_refuses_a_person_who_drops_what_counts() -> None:
    table = [(2, ONE, "complete"), (3, foreign(1), "complete")]
    assert "Adopt: (1, " in refused([*first_life(), version(4, ONE, *table)])


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


def found_jar() -> Path:
    """Return TLC's jar; skip the test without one, or without Java."""
    jar = run.find_jar()
    if jar is None or run.rejection_reason(jar):
        pytest.skip(run.rejection_reason(jar))
    return jar


@pytest.mark.parametrize("name", ["own-choice", "order-by-clock", "adopts-as-own"])
def test_tlc_finds_a_defect(name: str) -> None:
    check = run.CHECKS[name]
    result = run.run_tlc(found_jar(), check.constants, workers=1, heap="1g")
    assert result.violated in check.violated


def test_tlc_finds_the_model_of_one_step_sound() -> None:
    result = run.run_tlc(found_jar(), {"Last": "1"}, workers=1, heap="1g")
    assert result.is_complete
    assert result.states > 1000


def test_tlc_walks_along_random_behaviours_of_three_lives() -> None:
    check = run.CHECKS["three-lives"]
    result = run.run_tlc(found_jar(), check.constants, behaviours=30, workers=1, heap="1g")
    assert (result.violated, result.is_complete) == ("", True)
    assert result.states > 30


def test_tlc_finds_a_defect_along_random_behaviours() -> None:
    constants = {**run.CHECKS["three-lives"].constants, "OwnChoice": "TRUE"}
    result = run.run_tlc(found_jar(), constants, behaviours=1000, workers=1, heap="1g")
    assert result.violated == "OneStepIsRestored"
