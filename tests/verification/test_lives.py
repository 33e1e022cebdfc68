"""The order of lives that the simulation judges by: who went on from what, and knew of whom."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from places import VERIFICATION

sys.path.insert(0, str(VERIFICATION / "simulation"))
from judge import are_of_taken_numbers
from lives import Lives, Tags
from oracle import logged_lives

sys.path.pop(0)


@pytest.fixture
def lives() -> Lives:
    """Life 2 went on from step 4 of life 1; life 3 began from nothing; life 4 knew of no other."""
    found = Lives(Tags({"b": 1, "a": 2, "d": 3, "c": 4}))
    found.begin(1, [])
    found.go_on(1, None, asked=True)
    found.begin(2, ["b"])
    found.go_on(2, (1, 4), asked=True)
    found.begin(3, ["a"])
    found.go_on(3, None, asked=False)
    found.begin(4, [])
    found.go_on(4, None, asked=True)
    return found


def test_path_of_a_life_has_what_it_went_on_from(lives: Lives) -> None:
    assert lives.is_on_way("a", ("b", 4))
    assert lives.is_on_way("a", ("b", 5)) is False
    assert lives.is_on_way("a", ("a.000001", 9))
    assert lives.is_on_way("b", ("a", 9)), "a life that came later counts"


def test_step_that_a_later_life_saves_anew_is_its_makers(lives: Lives) -> None:
    assert lives.maker_of(("a.000001", 4)) == (1, 4)
    assert lives.maker_of(("a", 5)) == (2, 5)
    assert lives.maker_of(("b", 4)) == (1, 4)


def test_path_of_a_life_from_nothing_has_nothing_before(lives: Lives) -> None:
    assert lives.is_on_way("d", ("b", 1)) is False, "known of by way of life 2"
    assert lives.is_on_way("d", ("a", 9)) is False


def test_path_of_lives_apart_is_not_known(lives: Lives) -> None:
    assert lives.is_on_way("c", ("a", 1)) is None
    assert not lives.knows(4, 2)
    assert lives.knows(3, 1)


def test_save_apart_counts_while_the_other_life_is_out_of_reach(lives: Lives) -> None:
    lives.binding = {"a", "c"}
    assert lives.counts(("a", 7), {"a"})
    assert not lives.counts(("a", 7), {"a", "c"})
    assert not lives.counts(("b", 5), {"b"})


def test_rollback_is_by_the_newest_record_that_is_left(lives: Lives) -> None:
    assert lives.is_rolled_back(("b", 5), {"a", "b"})
    assert not lives.is_rolled_back(("b", 5), {"b"})
    assert not lives.is_rolled_back(("b", 5), {"a", "c"}), "neither is newer"


def test_save_that_one_of_two_lives_apart_went_on_from(lives: Lives) -> None:
    lives.begin(5, ["b"])  # after life 1, without a restore; life 2 went on from step 4 of it
    lives.go_on(5, None, asked=False)
    assert lives.went_on_apart(("b", 4), 5, {"a"})
    assert not lives.went_on_apart(("b", 5), 5, {"a"}), "life 2 rolled it back too"
    assert not lives.went_on_apart(("b", 4), 3, {"a"}), "life 3 knew of life 2"
    assert not lives.went_on_apart(("b", 4), 5, set())


def test_step_has_the_state_of_the_life_that_made_it() -> None:
    """That step comes to storage by a name of the later life, where it ends well."""
    tags = Tags({"a": 1, "b": 2, "c": 3})
    tags.parents.update({2: (1, 4), 3: (2, 4)})
    assert [tags.source((life, 4)) for life in ("a", "b.000001", "c.000001")] == [1, 1, 1]
    assert [tags.source((life, 5)) for life in ("a", "b", "c.000001")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("before", "is_excused"),
    [([], True), ([("000000000002-a", 4)], True), ([("000000000002-a", 3)], False)],
)
def test_refusal_of_a_number_that_was_taken_later_is_right(
    before: list[tuple[str, int]], is_excused: bool
) -> None:
    text = "save /x/storage/3: the step of 000000000002-a there has the same number, and counts; s"
    refusal = RuntimeError(f"save step 3 to the persistent tier: {text}")
    assert are_of_taken_numbers([refusal], before) is is_excused
    assert not are_of_taken_numbers([refusal, RuntimeError("no room")], before)


@pytest.mark.parametrize("number", [1, 2])
def test_judge_reads_the_log_of_each_format(tmp_path: Path, number: int) -> None:
    golden = Path(__file__).parents[1] / "golden" / f"log_version_v{number}.json"
    version = tmp_path / "host_state" / "log" / "000000000014.json"
    version.parent.mkdir(parents=True)
    version.write_bytes(golden.read_bytes())
    assert "000000000007-5e9d5e9d5e9d5e9d" in logged_lives(tmp_path)
    version.write_bytes(golden.read_bytes().replace(b"demo", b"dema"))
    assert logged_lives(tmp_path) == set()
