"""Which names are those of steps."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.step_names import (
    folders_of,
    is_format,
    is_name_of,
    is_own_name,
    may_be_unknown_step,
    name_of,
    steps_by_kind,
)


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["7", "40", "host_state", "logs"], {7: ("7",), 40: ("40",)}),
        (["0007", "0040", "12345"], {7: ("0007",), 40: ("0040",), 12345: ("12345",)}),
        (["step_7", "step_0040"], {7: ("step_7",), 40: ("step_0040",)}),
        (["a_b_7"], {7: ("a_b_7",)}),
        (["step_7", "0007", "7", "007"], {7: ("7", "0007", "007", "step_7")}),
        (["7.orbax-checkpoint-tmp-123", "step_7.orbax-checkpoint-tmp-9", "7.aside"], {}),
        (["7a", "step7", "-7", "7.0", "\u0667", "9" * 20, "9" * 19, "9" * 26, "_7", ""], {}),
    ],
)
def test_folders_of_names_gives_each_step_its_names(
    names: list[str], steps: dict[int, tuple[str, ...]]
) -> None:
    assert folders_of(steps_by_kind(names)) == steps


@pytest.mark.parametrize("name", ["07", "9" * 20, "9" * 26, "\u0667", "7a", "-7", "", "a_7"])
def test_is_own_name_of_no_number_of_ours_is_false(name: str) -> None:
    assert is_own_name("7")
    assert is_own_name(str((1 << 63) - 1))
    assert not is_own_name(name)


def test_steps_by_kind_tells_prefixes_apart() -> None:
    assert set(steps_by_kind(["7", "0007", "a_7", "a_08", "b_7"])) == {
        "",
        "<000step>",
        "a_<step>",
        "b_<step>",
    }


def test_may_be_unknown_step_leaves_out_what_steps_left() -> None:
    known = ["7.orbax-checkpoint-tmp-1", "a_7.orbax-checkpoint-tmp-1", "7.aside"]
    assert not any(map(may_be_unknown_step, known))
    assert all(map(may_be_unknown_step, ["epoch-7", "last", "a.b"]))


@pytest.mark.parametrize(
    ("of_zero", "names"),
    [
        ("0", ("7", "1234")),
        ("000", ("007", "1234")),
        ("a_b_0", ("a_b_7", "a_b_1234")),
        ("run100_00", ("run100_07", "run100_1234")),
    ],
)
def test_name_of_a_format_is_a_name_of_its_step(of_zero: str, names: tuple[str, str]) -> None:
    assert is_format(of_zero)
    assert (name_of(7, of_zero), name_of(1234, of_zero)) == names
    assert is_name_of(7, names[0])
    assert not is_name_of(8, names[0])


@pytest.mark.parametrize(
    "name",
    ["", "1", "a", "a0", "step=0", "a_1", "_0", "../a_0", "a/b_0", ".a_0", "a b_0", "0" * 20],
)
def test_is_format_of_no_name_of_step_0_is_false(name: str) -> None:
    assert not is_format(name)
