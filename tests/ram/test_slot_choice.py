"""The choice of a slot, as a pure function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.ram.slot_choice import (
    MAX_EXTRA_SLOTS,
    SLOTS_AT_REST,
    SlotState,
    choose_slot,
    choose_storage_source,
    slots_allowed,
    surplus_slots,
)
from emergency_ckpt.types import SaveId

MAX_SLOTS = SLOTS_AT_REST + MAX_EXTRA_SLOTS


def save(step: int, incarnation: str = "a") -> SaveId:
    return SaveId(step, incarnation, "run")


def slot(
    number: int,
    step: int | None,
    *,
    lent: bool = False,
    in_use: bool = False,
    incomplete: bool = False,
    excluded: bool = False,
) -> SlotState:
    held = None if step is None else save(step)
    return SlotState(number, held, lent, in_use, incomplete, excluded)


CASES = {
    # slots, protected steps, expected number or "make" or "busy"
    "none yet": ([], [], "make"),
    "one free": ([slot(0, None)], [], 0),
    "one published: another is made first": ([slot(0, 1)], [], "make"),
    "unpublished before old": ([slot(0, 1), slot(1, None)], [], 1),
    "oldest": ([slot(0, 2), slot(1, 1)], [], 1),
    "incomplete before older": ([slot(0, 1), slot(1, 2, incomplete=True)], [], 1),
    "incomplete and read": ([slot(0, 1), slot(1, 2, incomplete=True, in_use=True)], [], 0),
    "left behind before older": ([slot(0, 1), slot(1, 100, excluded=True)], [], 1),
    "left behind before incomplete": (
        [slot(0, 1, incomplete=True), slot(1, 100, excluded=True)],
        [],
        1,
    ),
    "unpublished before left behind": ([slot(0, 100, excluded=True), slot(1, None)], [], 1),
    "left behind and read": ([slot(0, 1), slot(1, 100, excluded=True, in_use=True)], [], 0),
    "lent and unpublished beside old": ([slot(0, None, lent=True), slot(1, 1)], [], "make"),
    "not the protected": ([slot(0, 1), slot(1, 2)], [1], 1),
    "all protected": ([slot(0, 1), slot(1, 2)], [1, 2], "busy"),
    "protected and being written": ([slot(0, 1), slot(1, None, in_use=True)], [1], "busy"),
    "protected and read": ([slot(0, 1), slot(1, 2, in_use=True)], [1], "busy"),
    "lent": ([slot(0, 1, lent=True), slot(1, 2)], [2], "make"),
    "lent is the protected": ([slot(0, 2, lent=True), slot(1, 1)], [2], 1),
    "lent and unpublished": ([slot(0, None, lent=True), slot(1, 2)], [2], "make"),
    "both lent": ([slot(0, 1, lent=True), slot(1, 1, lent=True)], [1], "make"),
    "two lent, two made, both kept": (
        [slot(0, 1, lent=True), slot(1, 1, lent=True), slot(2, 2), slot(3, 3)],
        [2, 3],
        "busy",
    ),
    "both hold the restored save": ([slot(0, 1), slot(1, 1)], [1], "make"),
    "a third is free again": ([slot(0, None), slot(1, 5), slot(2, 4)], [5], 0),
    "lent, written and kept": (
        [slot(0, 1, lent=True), slot(1, 2), slot(2, None, in_use=True)],
        [2],
        "busy",
    ),
}


@pytest.mark.parametrize(("slots", "protected", "expected"), CASES.values(), ids=CASES)
def test_cases(slots: list[SlotState], protected: list[int], expected: object) -> None:
    choice = choose_slot(slots, {save(step) for step in protected}, allow_extra=False)
    found = "make" if choice.make_one else choice.number
    assert ("busy" if found is None else found) == expected
    assert choice.reason


slot_lists = st.lists(
    st.builds(
        SlotState,
        number=st.integers(0, 9),
        save=st.none() | st.builds(save, st.integers(0, 4), st.sampled_from("ab")),
        lent=st.booleans(),
        in_use=st.booleans(),
        incomplete=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda state: state.number,
)
saves = st.frozensets(st.builds(save, st.integers(0, 4), st.sampled_from("ab")), max_size=3)


@given(slot_lists, saves, st.booleans())
def test_what_must_be_kept_is_never_chosen(
    slots: list[SlotState], protected: frozenset[SaveId], allow_extra: bool
) -> None:
    choice = choose_slot(slots, protected, allow_extra=allow_extra)
    if choice.make_one and choice.number is not None:
        assert any(state.lent and state.save is None for state in slots)
    assert choose_slot(slots[::-1], protected, allow_extra=allow_extra).number == choice.number
    if choice.number is not None:
        chosen = next(state for state in slots if state.number == choice.number)
        assert not chosen.lent
        assert not chosen.in_use
        assert chosen.save not in protected
    if choice.make_one:
        assert len(slots) < MAX_SLOTS


@given(slot_lists, saves)
def test_writer_succeeds_when_nothing_is_in_use_or_in_doubt(
    slots: list[SlotState], saves: frozenset[SaveId]
) -> None:
    idle = [SlotState(s.number, s.save, s.lent, False) for s in slots]
    one = frozenset(list(saves)[:1])
    choice = choose_slot(idle, one, allow_extra=False)
    busy = choice.number is None and not choice.make_one
    # With one protected save, only slots lent or duplicated beyond the bound stand in the way.
    assert not busy or len(idle) >= MAX_SLOTS


@given(slot_lists, saves, st.none() | st.builds(save, st.integers(0, 4)))
def test_surplus_takes_nothing_that_a_restore_could_need(
    slots: list[SlotState], protected: frozenset[SaveId], complete: SaveId | None
) -> None:
    dropped = surplus_slots(slots, protected, complete)
    assert len(slots) - len(dropped) >= min(len(slots), SLOTS_AT_REST)
    assert len(dropped) <= max(len(slots) - slots_allowed(slots, protected), 0)
    for state in slots:
        if state.number in dropped:
            assert not state.lent
            assert not state.in_use
            assert state.save not in protected
            assert state.save is None or (complete is not None and state.save < complete)


def test_more_slots_at_rest_keep_more_steps() -> None:
    """Three steps to keep: the fourth slot is made before one is given up, then the oldest goes."""
    held = [slot(0, 1), slot(1, 2), slot(2, 3)]
    assert choose_slot(held, {save(3)}, allow_extra=False, at_rest=4).make_one
    held.append(slot(3, 4))
    assert choose_slot(held, {save(4)}, allow_extra=False, at_rest=4).number == 0
    assert surplus_slots(held, {save(4)}, save(4), at_rest=4) == ()
    assert surplus_slots(held, {save(4)}, save(4)) == (0, 1)
    lent = [SlotState(s.number, s.save, True, False) for s in held]
    assert slots_allowed(lent, {save(4)}, at_rest=4) == 4 + MAX_EXTRA_SLOTS


@given(slot_lists, st.booleans(), st.integers(2, 4))
def test_slot_stays_lent_to_storage_only_beside_enough_others(
    slots: list[SlotState], has_room: bool, at_rest: int
) -> None:
    source = choose_storage_source(slots, has_room, at_rest)
    makes_one = source == "make_one"
    left = sum(not state.lent for state in slots) + makes_one
    assert source == "copy" or left >= at_rest, "saves would have no slot while storage hangs"
    assert not makes_one or has_room
    assert len(slots) + makes_one <= max(len(slots), at_rest + MAX_EXTRA_SLOTS)
