"""The names of a step's items, as ``save`` checks them."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.limits import MAX_ITEMS
from emergency_ckpt.core.save.save_rules import check_items
from emergency_ckpt.core.step_names import leaves_by_item
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.types import OrbaxStep

BAD_NAMES = ("", ".", "..", ".hidden", "a/b", "/a", "a\0", "a\n", "\ud800", "a" * 256)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_item_that_is_no_folder_of_the_step_is_refused(name: str) -> None:
    with pytest.raises(InvalidState, match="names that no item can have"):
        check_items(OrbaxStep(items=(name,)), {})


@pytest.mark.parametrize(
    ("orbax", "state"),
    [
        (OrbaxStep(items=("a", "b")), {"a": 1}),
        (OrbaxStep(items=("a", "b")), [1, 2]),
        (OrbaxStep(items=("a", "b", "b")), {"a": 1, "b": 2}),
        (OrbaxStep(items=("metrics",), metrics={"loss": 1}), {}),
        (OrbaxStep(items=tuple(map(str, range(MAX_ITEMS + 1)))), {}),
    ],
)
def test_items_that_cannot_be_stored_are_refused(orbax: OrbaxStep, state: object) -> None:
    with pytest.raises(InvalidState, match="save items"):
        check_items(orbax, state)


def test_items_that_can_be_stored_are_accepted() -> None:
    check_items(OrbaxStep(), [1])
    check_items(OrbaxStep(items=("metrics",)), [1])
    check_items(OrbaxStep(items=("a b", "ü")), {"ü": 1, "a b": 2})
    check_items(OrbaxStep(items=(), metrics={}), {"none": 0})


def test_leaves_by_item_cuts_off_the_names_of_several() -> None:
    leaves = {"a": 1, "b/c/d": 2, "bb/c": 3}
    assert leaves_by_item(["a"], leaves) == {"a": leaves}
    assert leaves_by_item(["a", "b"], leaves) == {"a": {"": 1}, "b": {"c/d": 2}}
    assert leaves_by_item([], leaves) == {}
