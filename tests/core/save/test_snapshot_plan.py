"""What is copied on devices, from where and in what order shards come, and how much at a time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.save.snapshot_plan import (
    Piece,
    choose_sources,
    plan_device_copies,
    transfer_order,
)

PIECES = st.lists(
    st.builds(
        Piece,
        leaf=st.integers(0, 6),
        device=st.integers(0, 3),
        nbytes=st.integers(0, 100),
    ),
    max_size=20,
)


def needs_of(pieces: list[Piece], leaf: int) -> dict[int, int]:
    devices = {piece.device for piece in pieces if piece.leaf == leaf}
    return {
        device: sum(p.nbytes for p in pieces if (p.leaf, p.device) == (leaf, device))
        for device in devices
    }


@given(PIECES, st.integers(0, 300))
def test_copies_stay_within_the_budget_and_nothing_more_fits(
    pieces: list[Piece], limit: int
) -> None:
    plan = plan_device_copies(pieces, limit)
    used = dict.fromkeys(range(4), 0)
    for piece in pieces:
        if piece.leaf in plan.leaves:
            used[piece.device] += piece.nbytes
    assert {d: used[d] for d in plan.device_bytes} == dict(plan.device_bytes)
    assert all(used[d] == 0 for d in used.keys() - plan.device_bytes.keys())
    assert max(used.values()) <= limit
    for leaf in {piece.leaf for piece in pieces} - plan.leaves:
        needs = needs_of(pieces, leaf)
        assert any(used[device] + nbytes > limit for device, nbytes in needs.items())


@pytest.mark.dear
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(50, 200))
def test_on_one_device_at_least_half_of_best_choice_is_copied(sizes: list[int], limit: int) -> None:
    pieces = [Piece(leaf, 0, nbytes) for leaf, nbytes in enumerate(sizes)]
    copied = sum(plan_device_copies(pieces, limit).device_bytes.values())
    sums = [
        sum(subset)
        for count in range(len(sizes) + 1)
        for subset in itertools.combinations(sizes, count)
    ]
    assert 2 * copied >= max(total for total in sums if total <= limit)


@pytest.mark.parametrize(
    ("limit", "leaves"),
    [
        pytest.param(0, set(), id="no_budget"),
        pytest.param(39, {2}, id="too_little_for_the_largest"),
        pytest.param(40, {0}, id="just_the_largest"),
        pytest.param(55, {0, 2}, id="the_largest_and_what_else_fits"),
        pytest.param(75, {0, 1, 2}, id="all"),
    ],
)
def test_budget_is_spent_on_large_leaves_first(limit: int, leaves: set[int]) -> None:
    pieces = [Piece(0, 0, 40), Piece(0, 1, 40), Piece(1, 0, 20), Piece(2, 0, 15)]
    if limit == 39:
        pieces = [Piece(0, 0, 40), Piece(0, 1, 1), Piece(2, 1, 30)]
    assert plan_device_copies(pieces, limit).leaves == leaves


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 3), min_size=1).map(sorted), st.integers(0, 100)),
        max_size=15,
    )
)
def test_shards_come_from_devices_that_hold_them(shards: list[tuple[list[int], int]]) -> None:
    chosen = choose_sources([held for held, _ in shards], [nbytes for _, nbytes in shards])
    assert all(device in held for device, (held, _) in zip(chosen, shards, strict=True))


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 4))
def test_shards_that_all_devices_hold_are_spread_evenly(sizes: list[int], devices: int) -> None:
    chosen = choose_sources([range(devices)] * len(sizes), sizes)
    load = [sum(n for d, n in zip(chosen, sizes, strict=True) if d == k) for k in range(devices)]
    assert max(load) - min(load) <= max(sizes, default=0)


def test_what_only_one_device_holds_is_taken_into_account_first() -> None:
    assert choose_sources([[0, 1], [0]], [10, 50]) == (1, 0)


@given(PIECES, st.sets(st.integers(0, 6)))
def test_each_transfer_starts_once_and_what_is_waited_for_first(
    pieces: list[Piece], copied: set[int]
) -> None:
    order = transfer_order(pieces, copied)
    assert sorted(order) == list(range(len(pieces)))
    of_copies = [pieces[index].leaf in copied for index in order]
    assert of_copies == sorted(of_copies)


def test_devices_take_turns() -> None:
    pieces = [Piece(i, device, 10) for i, device in enumerate([0, 0, 0, 1, 1, 1])]
    assert transfer_order(pieces, ()) == (0, 3, 1, 4, 2, 5)
    # A device with larger shards sends fewer of them meanwhile.
    pieces = [Piece(0, 0, 10), Piece(1, 0, 10), Piece(2, 1, 20), Piece(3, 1, 20)]
    assert transfer_order(pieces, ()) == (0, 2, 1, 3)
