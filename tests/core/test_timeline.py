"""Which saves a timeline has."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.limits import MAX_INCARNATION_NUMBER, MAX_LIVES
from emergency_ckpt.core.timeline import (
    Ancestor,
    Timeline,
    continued,
    is_on_way,
    is_plain,
    is_same_save,
    new_incarnation,
    newest,
    newest_step,
    number_of,
    plain_incarnation,
    problem_of,
)
from emergency_ckpt.errors import RestoreFailed
from emergency_ckpt.types import SaveId


def life(number: int, nonce: int = 0) -> str:
    return new_incarnation(number - 1, f"{nonce:016x}")


A, B, C, D = map(life, range(1, 5))


def from_nothing(incarnation: str) -> Timeline:
    return continued(None, None, incarnation)


def test_new_incarnation_comes_after_all_that_are_known() -> None:
    assert new_incarnation(0, "5e" * 8) == "000000000001-5e5e5e5e5e5e5e5e"
    names = [life(number) for number in (1, 2, 9, 10, 11, 100, 12_345, MAX_INCARNATION_NUMBER)]
    assert names == sorted(names)
    assert [number_of(name) for name in names] == [1, 2, 9, 10, 11, 100, 12_345, 10**12 - 1]
    assert number_of(f"{life(7)}.000003") == 7


@pytest.mark.parametrize(
    "name", ["", "x", "7-", "0198f2c4a1b0-5e9d", "\uff11" * 12 + "-5e", "life-1"]
)
def test_number_of_another_name_is_none(name: str) -> None:
    assert number_of(name) == 0


def test_new_incarnation_after_the_last_number_says_so() -> None:
    with pytest.raises(RestoreFailed, match="no greater number"):
        life(MAX_INCARNATION_NUMBER + 1)
    with pytest.raises(RestoreFailed, match="no greater number"):
        new_incarnation(10**30, "0" * 16)


def test_plain_incarnation_sorts_between_two_lives() -> None:
    plain = plain_incarnation(2, "5e" * 8)
    assert is_plain(plain)
    assert number_of(plain) == 2
    assert life(2, 2**64 - 1) < plain < life(3)


def save(step: int, life: str) -> SaveId:
    return SaveId(step, life, "run")


def has(timeline: Timeline, step: int, life: str) -> bool:
    return not timeline.rejection_reason(step, life)


def test_objection_to_what_was_left_behind_names_who_did() -> None:
    timeline = continued(None, save(5, A), B)
    assert has(timeline, 5, A)
    assert has(timeline, 900, B)
    assert has(timeline, 900, f"{B}.000002")
    assert (
        timeline.rejection_reason(6, A)
        == f"it was rolled back: incarnation {B} continued from step 5"
    )


def test_objection_to_none_of_a_later_or_unknown_life() -> None:
    timeline = continued(None, save(5, B), C)
    assert has(timeline, 1, D)
    assert has(timeline, 99, "")
    assert has(timeline, 4, A)  # before all that is known
    assert not has(timeline, 6, A)


def test_continued_from_a_demand_of_a_life_keeps_the_life() -> None:
    timeline = continued(continued(None, save(5, A), B), save(8, f"{B}.000001"), C)
    assert has(timeline, 8, B)
    assert has(timeline, 7, f"{B}.000002")
    assert not has(timeline, 9, B)


def test_is_on_way_of_own_life_and_those_before_it_alone() -> None:
    timeline = continued(None, save(5, B), C)
    for stored, expected in [
        (save(9, f"{C}.000001"), True),
        (save(5, f"{B}.000001"), True),
        (save(6, B), False),  # rolled back
        (save(5, D), False),  # of nobody that this life knows of
        (save(5, ""), False),
    ]:
        assert is_on_way(stored, C, timeline) == expected
    assert is_on_way(save(1, D), D, timeline)
    assert not is_on_way(save(5, B), D, timeline)  # D began without a restore


def test_continued_for_many_lives_stays_bounded() -> None:
    timeline = None
    lives = [life(number + 1) for number in range(3 * MAX_LIVES)]
    for step, (before, after) in enumerate(itertools.pairwise(lives)):
        timeline = continued(timeline, save(step, before), after)
    assert timeline is not None
    assert len(timeline.ancestors) == MAX_LIVES
    assert has(timeline, 3, lives[3])  # taken together with others
    assert not has(timeline, 3 * MAX_LIVES, lives[3])


def test_newest_of_differing_records_is_that_of_the_latest_life() -> None:
    first = continued(None, save(5, A), B)
    second = continued(None, save(3, A), C)
    assert newest(first, None, second) == newest(second, first) == second
    assert newest(None, None) is None
    tenth = continued(None, save(1, A), life(10))
    assert newest(continued(None, save(1, A), life(9)), tenth) == tenth


@pytest.mark.parametrize("further", [6, 7])
def test_newest_of_two_lives_with_one_number_came_further(further: int) -> None:
    twins = [continued(None, save(5, A), life(2, nonce)) for nonce in (6, 7)]
    complete = [save(9, life(2, further)), save(8, life(2, 6)), save(8, life(2, 7)), save(20, B)]
    assert newest(*twins, complete=complete) == twins[further - 6]
    assert newest(*reversed(twins), complete=complete) == twins[further - 6]
    assert newest(*twins) == twins[1], "the greater name"
    third = continued(None, save(5, A), life(3))
    assert newest(*twins, third, complete=complete) == third


def test_timeline_from_nothing_has_its_own_life_alone() -> None:
    timeline = from_nothing(f"{C}.000001")
    assert has(timeline, 1, C)
    assert has(timeline, 1, D)
    assert has(timeline, 1, plain_incarnation(3, "5e"))
    for left in (A, B, plain_incarnation(2, "5e"), "old name"):
        assert timeline.leaves_behind(left)
        reason = timeline.rejection_reason(1, left)
        assert reason == f"it was left behind: {C} saved without a restore"
    after = continued(timeline, save(5, C), D)
    assert after.oldest_step == -1
    assert has(after, 5, C)
    assert not after.leaves_behind(C)
    assert "rolled back" in after.rejection_reason(6, C)
    assert after.leaves_behind(B)
    assert not has(after, 1, B)


def test_continued_from_a_save_left_behind_has_its_past() -> None:
    left = continued(from_nothing(B), save(5, B), C)
    timeline = continued(left, save(100, A), D)
    assert has(timeline, 100, A)
    assert has(timeline, 99, A)
    assert has(timeline, 50, "a life before it")
    assert not has(timeline, 5, B)
    assert not timeline.leaves_behind(A)


def test_newest_step_is_of_the_timeline_alone() -> None:
    saves = [save(100, A), save(5, B), save(3, B)]
    assert newest_step(saves, None) == 100
    assert newest_step(saves, from_nothing(B)) == 5
    assert newest_step([], from_nothing(B)) == -1


@pytest.mark.parametrize(
    ("timeline", "is_good"),
    [
        (Timeline(C, 5, (Ancestor(B, 5), Ancestor(A, 3)), 3), True),
        (Timeline(C, 5, (Ancestor(plain_incarnation(2, "5e"), 5), Ancestor(B, 3)), 3), True),
        (from_nothing(C), True),
        (Timeline(C, 5, (Ancestor(A, 5), Ancestor(B, 3)), 3), False),
        (Timeline(C, 5, (Ancestor(C, 5),), 3), False),
        (Timeline(B, 5, (Ancestor(C, 5),), 3), False),
        (Timeline("a life", 5, (), 3), False),
        (Timeline(life(999), 5, tuple(Ancestor(life(n), 5) for n in range(65, 0, -1)), 3), False),
    ],
)
def test_problem_of_a_record_from_outside(timeline: Timeline, *, is_good: bool) -> None:
    assert (problem_of(timeline) == "") is is_good


@pytest.mark.dear
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.data())
def test_objection_agrees_with_the_tree_of_lives(lengths: list[int], data: st.DataObject) -> None:
    """Each life saves at every step behind its start; the next begins from any save on the line.

    Or from nothing. Plain Orbax may write a step beside or behind those, or before all lives.
    Rivals of a life, which have its number, are on no line; nothing is known of a later life.
    """
    timeline: Timeline | None = None
    line = {(step, plain_incarnation(0, "5e")) for step in range(3)} | {(3, A), (4, A)}
    if data.draw(st.booleans()):
        timeline = continued(None, save(2, plain_incarnation(0, "5e")), A)
    line.add((5, plain_incarnation(1, "5e")))
    every, rivals, number = set(line), set[tuple[int, str]](), 1
    for length in lengths:
        number += data.draw(st.integers(1, 3))
        begins_from_nothing = data.draw(st.integers(0, 9)) == 0 or not line
        parent = (-1, "") if begins_from_nothing else data.draw(st.sampled_from(sorted(line)))
        name = life(number, 1)
        if begins_from_nothing:
            timeline, ancestry = continued(timeline, None, name), set[tuple[int, str]]()
        else:
            timeline = continued(timeline, save(*parent), name)
            ancestry = {each for each in line if each[0] <= parent[0]}
        made = {(parent[0] + ahead, name) for ahead in range(1, length + 1)}
        if data.draw(st.booleans()):
            ahead = data.draw(st.integers(1, length + 1))
            made.add((parent[0] + ahead, plain_incarnation(number, f"{number:x}")))
        line = ancestry | made
        last = parent[0] + length
        rivals = {(step, life(number, nonce)) for step in range(last + 1) for nonce in (0, 2)}
        every |= made | rivals
    assert timeline is not None
    assert problem_of(timeline) == ""
    assert {each for each in every if has(timeline, *each)} == line
    assert all("has the same number" in timeline.rejection_reason(*rival) for rival in rivals)
    for later in (life(number, 1), life(number + 1), life(number + 7)):
        assert has(timeline, 10**6, later)


@pytest.mark.parametrize("step", [0, 5, 10])
def test_continued_from_a_rolled_back_save_brings_its_life_back(step: int) -> None:
    rolled_back = continued(None, save(5, A), B)
    timeline = continued(rolled_back, save(10, A), C)
    assert has(timeline, step, A)
    assert not has(timeline, 6, B)


def test_same_files_of_plain_orbax_are_one_save() -> None:
    """Whenever they were seen first; other saves of equal numbers are not."""
    assert is_same_save(plain_incarnation(1, "ab"), plain_incarnation(7, "ab"))
    assert not is_same_save(plain_incarnation(1, "ab"), plain_incarnation(1, "ac"))
    assert is_same_save(A, A)
    assert not is_same_save(A, B)
    assert not is_same_save(A, plain_incarnation(1, "ab"))
