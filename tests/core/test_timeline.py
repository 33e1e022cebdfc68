"""Which saves a timeline has."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.limits import MAX_LIVES
from emergency_ckpt.core.timeline import Timeline, continued, is_on_way, newest
from emergency_ckpt.types import SaveId

A, B, C, D = (f"{number:012x}-life" for number in range(1, 5))


def save(step: int, life: str) -> SaveId:
    return SaveId(step, life, "run")


def has(timeline: Timeline, step: int, life: str) -> bool:
    return not timeline.objection(step, life)


def test_objection_to_what_was_left_behind_names_who_did() -> None:
    timeline = continued(None, save(5, A), B)
    assert has(timeline, 5, A)
    assert has(timeline, 900, B)
    assert timeline.objection(6, A) == f"it was rolled back: incarnation {B} continued from step 5"


def test_objection_to_an_abandoned_branch_whatever_its_step() -> None:
    """B went on from A's 5, and then C from A's 10."""
    timeline = continued(continued(None, save(5, A), B), save(10, A), C)
    assert has(timeline, 10, A)
    assert not has(timeline, 11, A)
    assert not has(timeline, 6, B)
    assert has(timeline, 11, C)


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
    lives = [f"{number:012x}-life" for number in range(3 * MAX_LIVES)]
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


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.data())
def test_objection_agrees_with_the_tree_of_lives(lengths: list[int], data: st.DataObject) -> None:
    """Each life saves at every step behind its start; the next begins from any save on the line."""
    timeline: Timeline | None = None
    line = {(step, "0") for step in range(5)}
    every, life = set(line), "0"
    for number, length in enumerate(lengths, start=1):
        parent = data.draw(st.sampled_from(sorted(line)))
        life = f"{number:03d}"
        timeline = continued(timeline, save(*parent), life)
        ancestry = {each for each in line if each[0] <= parent[0]}
        made = {(parent[0] + ahead, life) for ahead in range(1, length + 1)}
        line = ancestry | made
        every |= made
    assert timeline is not None
    assert {each for each in every if has(timeline, *each)} == line


@pytest.mark.parametrize("step", [0, 5, 10])
def test_continued_from_a_rolled_back_save_brings_its_life_back(step: int) -> None:
    rolled_back = continued(None, save(5, A), B)
    timeline = continued(rolled_back, save(10, A), C)
    assert has(timeline, step, A)
    assert not has(timeline, 6, B)
