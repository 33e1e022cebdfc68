"""The step log's rules: who may write, what a version makes of the one before, what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.step_log import (
    Entry,
    LogWriter,
    Table,
    begun,
    decide_claim,
    following,
    greatest_number,
    in_state,
    listing,
    problem_of,
    reserved,
    without,
)
from emergency_ckpt.core.timeline import Ancestor, Timeline, continued
from emergency_ckpt.types import SaveId


def life(number: int, nonce: str = "a") -> str:
    return f"{number:012d}-{nonce * 16}"


MINE = LogWriter("run", False, life(2))
DRAIN = MINE._replace(writer="drain-1")
MARKER = "0" * 64


def table(*steps: Entry, **fields: Any) -> Table:
    defaults: dict[str, Any] = {"run_id": "run", "from_dir": False, "incarnation": life(2)}
    return Table(number=1, steps=tuple(steps), **{**defaults, **fields})


def entry(step: int, number: int = 1, **fields: Any) -> Entry:
    return Entry(step, life(number), marker=MARKER, **fields)


def from_nothing(incarnation: str) -> Timeline:
    return continued(None, None, incarnation)


def by(writer: LogWriter) -> Table:
    """A version that ``writer`` wrote."""
    return begun(None, writer)


@pytest.mark.parametrize(
    ("there", "mine", "expected"),
    [
        (None, MINE, "write"),
        (MINE, MINE, "hold"),
        (LogWriter("run", False, life(1)), MINE, "write"),
        (LogWriter("run", False, life(1, "f")), MINE, "write"),
        (LogWriter("run", False, life(3)), MINE, "refuse"),
        (LogWriter("run", False, life(2, "b")), MINE, "refuse"),  # neither knew of the other
        (LogWriter("run", False, life(10)), MINE._replace(incarnation=life(9)), "refuse"),
        (LogWriter("other", False, life(1)), MINE, "refuse"),
        (LogWriter("other", True, life(1)), MINE, "refuse"),
        (LogWriter("other", False, life(1)), MINE._replace(from_dir=True), "refuse"),
        (LogWriter("moved", True, life(1)), MINE._replace(from_dir=True), "write"),
        (DRAIN, MINE, "write"),
        (MINE, DRAIN, "write"),
        (DRAIN._replace(writer="drain-2"), DRAIN, "write"),
        (DRAIN, DRAIN, "hold"),
        (LogWriter("run", False, life(3)), DRAIN, "refuse"),
    ],
)
def test_decide_claim_of_a_version_gives(
    there: LogWriter | None, mine: LogWriter, expected: str
) -> None:
    assert decide_claim(there and by(there), mine)[0] == expected


def test_decide_claim_of_a_drain_replaced_is_refused() -> None:
    """Of two drains of one life the later one writes; a job that lives goes before both."""
    second = by(DRAIN._replace(writer="drain-2"))
    assert decide_claim(second, DRAIN, held=True)[0] == "refuse"
    assert decide_claim(by(MINE), DRAIN, held=True)[0] == "refuse"
    assert decide_claim(second, MINE, held=True)[0] == "write"


@given(
    st.tuples(st.integers(1, 3), st.sampled_from("ab")),
    st.tuples(st.integers(1, 3), st.sampled_from("ab")),
)
def test_decide_claim_two_lives_never_take_turns(
    first: tuple[int, str], second: tuple[int, str]
) -> None:
    """Whoever may write after the other is not written after by it: else saves are lost."""
    one, two = (MINE._replace(incarnation=life(*each)) for each in (first, second))
    answers = {decide_claim(by(one), two)[0], decide_claim(by(two), one)[0]}
    expected = [{"hold"}] if one == two else [{"refuse"}, {"write", "refuse"}]
    assert answers in expected


def test_begun_keeps_chain_and_steps_under_the_next_number() -> None:
    chain = from_nothing(life(1))
    before = table(entry(1), entry(2), chain=chain, incarnation=life(1))
    after = begun(before, MINE)
    assert (after.number, after.incarnation, after.chain) == (2, life(2), chain)
    assert after.steps == before.steps
    assert (begun(None, DRAIN).number, begun(None, DRAIN).writer) == (1, "drain-1")


def test_listing_takes_the_place_of_what_has_its_number() -> None:
    old, new = entry(4, 1), entry(4, 2)
    found = listing(table(entry(2), old, entry(6)), new)
    assert found.steps == (entry(2), new, entry(6))
    assert (found.complete(4), found.of(4), found.of(3)) == (new, new, None)


def test_listing_of_a_step_that_is_there_replaces_its_entry() -> None:
    found = listing(table(entry(4)), entry(4, size_bytes=7))
    assert found.steps == (entry(4, size_bytes=7),)


def test_listed_step_off_the_chain_is_to_be_hidden() -> None:
    """As a step that was rolled back and lies there still, without an entry."""
    chain = continued(None, SaveId(2, life(1), "run"), life(2))
    found = listing(table(chain=chain), entry(4))
    assert (found.counting(), found.left()) == ([], [entry(4)])


def test_reserved_takes_the_number_and_changes_nothing_else() -> None:
    """Who may write goes on to; and a life that knows only of the log takes a greater number."""
    before = table(entry(1), chain=from_nothing(life(1)))
    after = reserved(before, life(7))
    assert after == msgspec.structs.replace(before, greatest=7)
    assert greatest_number(after) == 7
    assert decide_claim(after, MINE)[0] == "hold"
    assert begun(after, MINE).greatest == reserved(after, life(3)).greatest == 7


def test_following_excludes_what_is_off_the_chain() -> None:
    chain = continued(None, SaveId(2, life(1), "run"), life(2))
    removing, off = entry(5, 1, state="removing"), [entry(4, 1), entry(6, 1)]
    found = following(table(entry(2), *off, removing, entry(7, 2)), chain)
    assert found.chain == chain
    assert (found.counting(), found.left()) == ([entry(2), entry(7, 2)], [off[0], off[1]])
    hidden = listing(found, *in_state("hidden", found.left()))
    assert (hidden.counting(), hidden.left()) == (found.counting(), [])
    states = ["complete", "hidden", "removing", "hidden", "complete"]
    assert [each.state for each in hidden.steps] == states
    assert following(hidden, chain) == hidden


def test_following_of_an_older_chain_changes_nothing() -> None:
    newer, older = from_nothing(life(3)), from_nothing(life(2))
    before = table(entry(4, 3), chain=newer)
    assert following(before, older) == before
    assert following(before, None) == before


def test_hidden_step_stays_hidden_when_a_chain_continues_from_it() -> None:
    """A restore of that step serves it; what counts is what is saved after that."""
    hidden = entry(4, 1, state="hidden")
    chain = continued(None, SaveId(4, life(1), "run"), life(3))
    assert following(table(hidden), chain).steps == (hidden,)


def test_counting_leaves_out_what_the_chain_excludes() -> None:
    """Also of a table whose writer had hidden nothing."""
    chain = continued(None, SaveId(2, life(1), "run"), life(2))
    found = table(entry(2), entry(4), chain=chain)
    assert found.counting() == [entry(2)]
    assert "it was rolled back" in found.rejection_reason(entry(4))


def test_without_leaves_out_the_named_ones_alone() -> None:
    """Not what another life has saved under the number meanwhile."""
    before = table(entry(2), entry(4, 2))
    assert without(before, [entry(2, state="removing"), entry(4, 1)]).steps == (entry(4, 2),)
    assert without(before, [entry(9)]) == before


@pytest.mark.parametrize(
    ("found", "number"),
    [
        (None, 0),
        (table(), 2),
        (table(entry(1, 7)), 7),
        (table(chain=from_nothing(life(9))), 9),
        (table(Entry(1, "000000000008-orbax-00ff")), 8),
        (table(entry(1, 7), greatest=9), 9),
        (table(Entry(1, "018f00000000-a", marker=MARKER)), 2),  # no number
    ],
)
def test_greatest_number_is_of_all_that_the_log_names(found: Table | None, number: int) -> None:
    assert greatest_number(found) == number


CHAIN = Timeline(life(2), 4, (), 4)
HOSTILE = {
    "number 0": {"number": 0},
    "number out of bounds": {"number": 10**12},
    "greatest below 0": {"greatest": -1},
    "greatest out of bounds": {"greatest": 10**12},
    "run that is a path": {"run_id": "../run"},
    "run without a name": {"run_id": ""},
    "writer that is a path": {"writer": "a/b"},
    "writer too long": {"writer": "x" * 65},
    "no incarnation": {"incarnation": ""},
    "incarnation without a number": {"incarnation": "018f0000000a-a"},
    "incarnation 0": {"incarnation": life(0)},
    "incarnation of a forced save": {"incarnation": f"{life(2)}.000001"},
    "chain without a number": {"chain": from_nothing("life")},
    "chain that goes up": {"chain": Timeline(life(2), 4, (Ancestor(life(3), 4),), 4)},
    "steps unordered": {"steps": (entry(2), entry(1))},
    "step twice": {"steps": (entry(1), entry(1))},
    "two of one number": {"steps": (entry(1, 1, state="hidden"), entry(1, 2))},
    "step below 0": {"steps": (entry(-1),)},
    "step out of bounds": {"steps": (entry(2**64),)},
    "step of a thousand digits": {"steps": (entry(10**1000),)},
    "lives below 0": {"steps": (entry(1, lives=-1),)},
    "lives out of bounds": {"steps": (entry(1, lives=10**12),)},
    "processes below 0": {"steps": (entry(1, processes=-1),)},
    "processes out of bounds": {"steps": (entry(1, processes=2**31),)},
    "size below 0": {"steps": (entry(1, size_bytes=-1),)},
    "size out of bounds": {"steps": (entry(1, size_bytes=2**63),)},
    "size of a thousand digits": {"steps": (entry(1, size_bytes=10**1000),)},
    "no digest": {"steps": (Entry(1, life(1), marker="xyz"),)},
    "digest with a newline": {"steps": (Entry(1, life(1), marker=MARKER + "\n"),)},
    "no incarnation of a step": {"steps": (Entry(1, "", marker=MARKER),)},
    "incarnation that is a path": {"steps": (Entry(1, "../../1", marker=MARKER),)},
    "incarnation that is long": {"steps": (Entry(1, "a" * 10_000, marker=MARKER),)},
    "folder above": {"steps": (Entry(1, life(1), folder=".."),)},
    "folder outside": {"steps": (Entry(1, life(1), folder="../1"),)},
    "folder that is absolute": {"steps": (Entry(1, life(1), folder="/tmp/1"),)},
    "folder below another": {"steps": (Entry(1, life(1), folder="host_state/1"),)},
    "folder of another step": {"steps": (Entry(1, life(1), folder="2"),)},
    "folder of a name too long": {"steps": (Entry(1, life(1), folder="x" * 5000 + "_1"),)},
    "folder with a zero byte": {"steps": (Entry(1, life(1), folder="a\0_1"),)},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_problem_of_a_hostile_table_is_named(kind: str) -> None:
    """No path leads outside, and no reader is asked to choose between two steps."""
    hostile = msgspec.structs.replace(table(), **HOSTILE[kind])
    assert problem_of(hostile)


@pytest.mark.parametrize(
    "steps",
    [
        (),
        (entry(1), entry(2)),
        (entry(1, 1, state="hidden"), entry(2, 1, state="removing"), entry(3, 2)),
        (Entry(1, "000000000000-orbax-00", folder="state_1"),),
        (Entry(1, "000000000000-orbax-00", folder="000001"),),
        (Entry(1, f"{life(1)}.000001", marker=MARKER, metrics={"loss": [1, None]}),),
    ],
)
def test_problem_of_a_valid_table_is_none(steps: tuple[Entry, ...]) -> None:
    assert problem_of(table(*steps, chain=CHAIN)) == ""


ENTRIES = st.builds(
    entry,
    st.integers(0, 3),
    st.integers(1, 4),
    state=st.sampled_from(["complete", "complete", "hidden", "removing"]),
)
CHAINS = st.builds(
    lambda step, parent, more: continued(None, SaveId(step, life(parent), "run"), life(more)),
    st.integers(0, 3),
    st.integers(1, 2),
    st.integers(3, 4),
)


@given(st.lists(st.one_of(ENTRIES, CHAINS), max_size=12))
def test_versions_of_any_changes_are_valid_and_lose_no_step(
    changes: list[Entry | Timeline],
) -> None:
    found, steps = table(), set[int]()
    for number, change in enumerate(changes):
        found = begun(found, MINE)
        if isinstance(change, Timeline):
            found = following(found, change)
        else:
            found = listing(found, change)
            steps.add(change.step)
            if change.state == "complete" and not found.rejection_reason(change):
                assert found.complete(change.step) == change
        assert found.number == number + 2
        assert problem_of(found) == ""
        assert {each.step for each in found.steps} == steps
        counting = [each.step for each in found.counting()]
        assert counting == sorted(set(counting))
