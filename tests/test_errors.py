"""The text of an error says the sides that it has, and no others."""

from __future__ import annotations

import pytest

from emergency_ckpt.errors import CheckpointError


@pytest.mark.parametrize(
    ("sides", "text"),
    [
        ({}, "read file: damaged; look"),
        ({"actual": 0}, "read file: damaged (got 0); look"),
        ({"expected": "a"}, "read file: damaged (expected a); look"),
        ({"expected": 1, "actual": 2}, "read file: damaged (expected 1, got 2); look"),
    ],
)
def test_error_text_has_the_sides_that_are_given(sides: dict[str, object], text: str) -> None:
    assert str(CheckpointError("read", "file", "damaged", hint="look", **sides)) == text
