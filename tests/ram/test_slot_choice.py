"""The choice of a slot, as a pure function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.ram.slot_choice import (
    SLOTS_AT_REST,
    SlotState,
    choose_slot,
    slots_allowed,
    slots_for,
    surplus_slots,
)
from emergency_ckpt.types import SaveId


def save(step: int, incarnation: str = "a") -> SaveId:
    return SaveId(step, incarnation, "run")


def slot(
    number: int,
    step: int | None,
    *,
    in_use: bool = False,
    incomplete: bool = False,
    excluded: bool = False,
) -> SlotState:
    held = None if step is None else save(step)
    return SlotState(number, held, in_use, incomplete, excluded)


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
    "not the protected": ([slot(0, 1), slot(1, 2)], [1], 1),
    "all protected": ([slot(0, 1), slot(1, 2)], [1, 2], "busy"),
    "protected and being written": ([slot(0, 1), slot(1, None, in_use=True)], [1], "busy"),
    "protected and read": ([slot(0, 1), slot(1, 2, in_use=True)], [1], "busy"),
    "pinned beside one that is kept": ([slot(0, 1, in_use=True), slot(1, 2)], [2], "busy"),
    "pinned is the protected": ([slot(0, 2, in_use=True), slot(1, 1)], [2], 1),
    "pinned, kept and old": ([slot(0, 1, in_use=True), slot(1, 3), slot(2, 2)], [3], 2),
    "both hold the restored save": ([slot(0, 1), slot(1, 1)], [1], "make"),
    "a third is free again": ([slot(0, None), slot(1, 5), slot(2, 4)], [5], 0),
}


@pytest.mark.parametrize(("slots", "protected", "expected"), CASES.values(), ids=CASES)
def test_cases(slots: list[SlotState], protected: list[int], expected: object) -> None:
    choice = choose_slot(slots, {save(step) for step in protected})
    found = "make" if choice.make_one else choice.number
    assert ("busy" if found is None else found) == expected
    assert bool(choice.reason) == (expected == "busy")


slot_lists = st.lists(
    st.builds(
        SlotState,
        number=st.integers(0, 9),
        save=st.none() | st.builds(save, st.integers(0, 4), st.sampled_from("ab")),
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
    assert not (choice.make_one and choice.number is not None)
    assert choose_slot(slots[::-1], protected, allow_extra=allow_extra).number == choice.number
    if choice.number is not None:
        chosen = next(state for state in slots if state.number == choice.number)
        assert not chosen.in_use
        assert chosen.save not in protected
    if choice.make_one:
        most = slots_allowed(slots, protected)
        # A restore may have one more, and two more than at rest where that is more.
        assert len(slots) < (max(most + 1, SLOTS_AT_REST + 2) if allow_extra else most)


@given(slot_lists, saves)
def test_writer_succeeds_when_nothing_is_in_use_or_in_doubt(
    slots: list[SlotState], saves: frozenset[SaveId]
) -> None:
    idle = [SlotState(s.number, s.save, False) for s in slots]
    one = frozenset(list(saves)[:1])
    choice = choose_slot(idle, one)
    busy = choice.number is None and not choice.make_one
    assert not busy


@given(slot_lists, saves, st.none() | st.builds(save, st.integers(0, 4)))
def test_surplus_takes_nothing_that_a_restore_could_need(
    slots: list[SlotState], protected: frozenset[SaveId], complete: SaveId | None
) -> None:
    dropped = surplus_slots(slots, protected, complete)
    assert len(slots) - len(dropped) >= min(len(slots), SLOTS_AT_REST)
    assert len(dropped) <= max(len(slots) - slots_allowed(slots, protected), 0)
    for state in slots:
        if state.number in dropped:
            assert not state.in_use
            assert state.save not in protected
            assert state.save is None or (complete is not None and state.save < complete)


def test_more_slots_at_rest_keep_more_steps() -> None:
    """Three steps to keep: the fourth slot is made before one is given up, then the oldest goes."""
    held = [slot(0, 1), slot(1, 2), slot(2, 3)]
    assert choose_slot(held, {save(3)}, needed=4).make_one
    held.append(slot(3, 4))
    assert choose_slot(held, {save(4)}, needed=4).number == 0
    assert surplus_slots(held, {save(4)}, save(4), at_rest=4) == ()
    assert surplus_slots(held, {save(4)}, save(4)) == (0, 1)


def test_writer_of_storage_has_a_slot_more_or_does_without() -> None:
    assert [slots_for(1, writes_storage=each) for each in (False, True)] == [2, 3]
    assert slots_for(4, writes_storage=True) == 6
    both = [slot(0, 1), slot(1, 2)]
    assert choose_slot(both, {save(2)}, needed=2, at_rest=3).number == 0, "there may be no room"
    pinned = [slot(0, 1, in_use=True), slot(1, 2)]
    assert choose_slot(pinned, {save(2)}, needed=2, at_rest=3).make_one


def test_restore_has_a_slot_more_than_a_save() -> None:
    both = [slot(0, 1), slot(1, 2)]
    assert choose_slot(both, {save(1), save(2)}, allow_extra=True).make_one
    three = [*both, slot(2, 3)]  # of a life that saved to storage
    assert choose_slot(three, {save(1), save(2), save(3)}, allow_extra=True).make_one
    four = [*three, slot(3, 4)]
    choice = choose_slot(four, {save(1), save(2), save(3), save(4)}, allow_extra=True)
    assert (choice.number, choice.make_one) == (None, False)
