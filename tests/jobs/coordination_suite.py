"""What every ``Coordinator`` must do. Each check is run by all processes of a job at once.

A check gets a coordinator whose keys nobody else uses; it fails by an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from memory_coordination import meet

from emergency_ckpt.cluster import Cell, Coordinator, Round
from emergency_ckpt.cluster.round import agree
from emergency_ckpt.errors import CoordinationError, DeadlineExceeded

SOON_S = 0.2
LONG_S = 60.0
Check = Callable[[Coordinator], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def _leads(coordinator: Coordinator) -> bool:
    return coordinator.process_index == 0


@check
def process_index_is_one_of_the_count(coordinator: Coordinator) -> None:
    assert 0 <= coordinator.process_index < coordinator.process_count
    coordinator.put(f"here/{coordinator.process_index}", b"")
    meet(coordinator, "all", LONG_S)
    assert set(coordinator.list("here")) == {str(p) for p in range(coordinator.process_count)}


@check
def a_value_is_read_by_all_as_it_was_put(coordinator: Coordinator) -> None:
    value = bytes(range(256)) * 300
    if _leads(coordinator):
        coordinator.put("value", value)
        coordinator.put("nothing", b"")
    assert coordinator.get("value", LONG_S) == value
    assert coordinator.get("nothing", LONG_S) == b""


@check
def a_key_is_set_once(coordinator: Coordinator) -> None:
    key = f"own/{coordinator.process_index}"
    coordinator.put(key, b"first")
    with pytest.raises(CoordinationError, match="own"):
        coordinator.put(key, b"second")
    assert coordinator.get(key, LONG_S) == b"first"


@check
def of_many_who_put_one_key_one_wins(coordinator: Coordinator) -> None:
    me = str(coordinator.process_index)
    try:
        coordinator.put("decision", me.encode())
        coordinator.put(f"winner/{me}", b"")
    except CoordinationError:
        pass
    meet(coordinator, "voted", LONG_S)
    (winner,) = coordinator.list("winner")
    assert coordinator.get("decision", LONG_S).decode() == winner


@check
def get_waits_for_a_key_but_not_for_ever(coordinator: Coordinator) -> None:
    with pytest.raises(DeadlineExceeded, match="never") as caught:
        coordinator.get("never", SOON_S)
    assert caught.value.retryable
    if coordinator.process_index == coordinator.process_count - 1:
        coordinator.put("late", b"here")
    assert coordinator.get("late", LONG_S) == b"here"


@check
def list_gives_what_lies_below_and_nothing_beside(coordinator: Coordinator) -> None:
    if _leads(coordinator):
        for key in ("tree", "tree/a", "tree/b/c", "trees/d", "other"):
            coordinator.put(key, key.encode())
    meet(coordinator, "put", LONG_S)
    assert dict(coordinator.list("tree")) == {"a": b"tree/a", "b/c": b"tree/b/c"}
    assert dict(coordinator.list("tree/b")) == {"c": b"tree/b/c"}
    assert dict(coordinator.list("absent")) == {}


@check
def delete_forgets_a_key_and_all_below_it(coordinator: Coordinator) -> None:
    if _leads(coordinator):
        for key in ("tree", "tree/a", "tree/b/c", "trees/d"):
            coordinator.put(key, b"")
        coordinator.delete("tree")
        coordinator.delete("absent")
    meet(coordinator, "deleted", LONG_S)
    assert dict(coordinator.list("tree")) == {}
    assert dict(coordinator.list("trees")) == {"d": b""}
    for gone in ("tree", "tree/a"):
        with pytest.raises(DeadlineExceeded):
            coordinator.get(gone, SOON_S)
    meet(coordinator, "seen", LONG_S)
    if _leads(coordinator):
        coordinator.put("tree/a", b"anew")
    assert coordinator.get("tree/a", LONG_S) == b"anew"


@check
def find_gives_what_is_set_now_and_waits_for_nobody(coordinator: Coordinator) -> None:
    assert coordinator.find("absent") is None
    own = f"own/{coordinator.process_index}"
    coordinator.put(own, b"")
    assert coordinator.find(own) == b""
    coordinator.delete(own)
    assert coordinator.find(own) is None


@check
def replace_sets_a_key_again(coordinator: Coordinator) -> None:
    own = f"own/{coordinator.process_index}"
    for value in (b"first", b"second"):
        coordinator.replace(own, value)
        assert coordinator.get(own, LONG_S) == value


@check
def round_gives_all_the_leaders_answer(coordinator: Coordinator) -> None:
    held = Round(coordinator, "round", LONG_S, prompt=True)
    value = f"of {coordinator.process_index}".encode()
    told = held.hold(value, held.when_all(lambda said: b"+".join(said.values())))
    assert told == b"+".join(f"of {p}".encode() for p in range(coordinator.process_count))


@check
def round_gives_each_group_its_own_answer(coordinator: Coordinator) -> None:
    held = Round(coordinator, "each", LONG_S, prompt=True, grouped=True)
    rule = held.when_all(lambda said: lambda processes: f"for {[*processes]}".encode())
    assert str(coordinator.process_index) in held.hold(b"", rule).decode()


@check
def round_tells_all_the_leaders_error(coordinator: Coordinator) -> None:
    def damaged(said: Mapping[int, bytes]) -> bytes:
        raise CoordinationError("read", "the values", f"{len(said)} are damaged")

    held = Round(coordinator, "damaged", LONG_S, prompt=True)
    with pytest.raises(CoordinationError, match="are damaged"):
        held.hold(b"", held.when_all(damaged))


@check
def cell_keeps_the_first_value(coordinator: Coordinator) -> None:
    own = f"of {coordinator.process_index}".encode()
    cell = Cell(coordinator, "cell")
    counts = cell.settle(own)
    assert cell.find() == counts == cell.settle(b"too late")


@check
def round_names_who_is_missing(coordinator: Coordinator) -> None:
    last = coordinator.process_count - 1
    if last == 0:
        return
    # Together, and with time to spare: who comes after the deadline is missing as well.
    meet(coordinator, "ready", LONG_S)
    if coordinator.process_index != last:
        held = Round(coordinator, "incomplete", 2.0, prompt=True)
        with pytest.raises(DeadlineExceeded, match=f"missing: process {last}; look") as caught:
            held.hold(b"", held.when_all(lambda _: b""))
        assert caught.value.missing == (f"process {last}",)
    meet(coordinator, "over", LONG_S)


@check
def agree_gives_all_the_same_errors(coordinator: Coordinator) -> None:
    assert agree(coordinator, "well", "", LONG_S) == ""
    me, count = coordinator.process_index, coordinator.process_count
    last = count - 1
    error = "disk full" if me == last else ""
    assert agree(coordinator, "one", error, LONG_S) == f"process {last}: disk full"
    every = agree(coordinator, "every", f"no {me}", LONG_S)
    assert every == "; ".join(f"process {p}: no {p}" for p in range(min(count, 4)))


@check
def agree_is_bounded(coordinator: Coordinator) -> None:
    text = agree(coordinator, "long", "x" * 1_000_000, LONG_S)
    assert 1000 <= len(text) < 5000
