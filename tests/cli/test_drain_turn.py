"""The one server that drains, chosen on each host by itself."""

from __future__ import annotations

import itertools

import pytest

from emergency_ckpt.tools.draining.last import candidates_of, turn_at_the_end

HOSTS = ("10.0.0.1:7412", "10.0.0.2:7412", "10.0.0.3:7412", "10.0.0.4:7412")


def turns(alive: set[str]) -> dict[str, str]:
    """The turn of each server that is left, when all of ``HOSTS`` began the end together."""
    return {
        own: turn_at_the_end(
            own, candidates := candidates_of(own, set(HOSTS) - {own}), alive & set(candidates)
        )
        for own in sorted(alive)
    }


def test_turn_is_of_the_first_while_the_others_serve() -> None:
    assert list(turns(set(HOSTS)).values()) == ["drain", "wait", "wait", "wait"]


def test_turn_passes_to_the_second_when_the_first_left() -> None:
    assert list(turns(set(HOSTS[1:])).values()) == ["drain", "wait", "wait"]


def test_turn_of_the_rest_is_to_leave_behind_both() -> None:
    assert list(turns(set(HOSTS[2:])).values()) == ["leave", "leave"]


def test_turn_of_a_lone_server_is_to_drain() -> None:
    assert turn_at_the_end(HOSTS[3], candidates_of(HOSTS[3], ()), ()) == "drain"


@pytest.mark.parametrize("count", range(1, len(HOSTS) + 1))
def test_turns_have_one_drain_and_no_endless_wait(count: int) -> None:
    for alive in map(set, itertools.combinations(HOSTS, count)):
        found = list(turns(alive).values())
        assert found.count("drain") <= 1
        assert "drain" in found or set(found) == {"leave"}
