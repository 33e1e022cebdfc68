"""A read of storage that is far behind the others is asked for once more; the first answer wins."""

from __future__ import annotations

import time
from typing import Any

import pytest
import tensorstore
from programs import printed_beside_bucket

from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.storage.hedged_reads import HedgedReads, Read, Request
from emergency_ckpt.work_progress import WorkProgress

MIB = 1 << 20


class Asked:
    """Requests that a test answers: a read that is behind, after another that was quick."""

    def __init__(self, deadline_s: float = 60.0) -> None:
        self.told: list[tuple[str, int]] = []
        self.reads = HedgedReads(
            "gs://bucket/3/state",
            WorkProgress.until(time.monotonic() + deadline_s),
            lambda leaf, nbytes, _: self.told.append((leaf, nbytes)),
        )
        self.first, self._first = tensorstore.Promise.new()
        self.second, self._second = tensorstore.Promise.new()
        quick = self.reads.ask("quick", MIB, _answered(1), _never_asked)
        assert self.reads.result(quick) == 1
        self.read = self.reads.ask("slow", MIB, Request(self._first), lambda: Request(self._second))

    def until_second(self) -> Read:
        """Wait with the read until it is asked for once more."""
        while not self.told:
            time.sleep(0.05)
            self.reads.ask_again()
        return self.read


def _answered(value: object) -> Request:
    promise, future = tensorstore.Promise.new()
    promise.set_result(value)
    return Request(future)


def _never_asked() -> Request:
    raise AssertionError("a read that is not behind is asked for once")


@pytest.mark.parametrize("winner", ["first", "second"])
def test_first_answer_wins(winner: str) -> None:
    asked = Asked()
    read = asked.until_second()
    loser = asked._second if winner == "first" else asked._first
    getattr(asked, winner).set_result(winner)
    assert asked.reads.result(read) == winner
    assert loser.cancelled(), "what it brings lands nowhere"
    assert asked.told == [("slow", MIB)]


def test_answer_before_the_second_request_is_taken() -> None:
    asked = Asked()
    asked.first.set_result(5)
    assert asked.reads.result(asked.read) == 5
    assert asked.told == []


@pytest.mark.parametrize("failing", ["first", "second"])
def test_error_of_one_request_waits_for_the_other(failing: str) -> None:
    asked = Asked()
    read = asked.until_second()
    getattr(asked, failing).set_exception(ValueError("UNAVAILABLE"))
    getattr(asked, "second" if failing == "first" else "first").set_result(7)
    assert asked.reads.result(read) == 7


def test_errors_of_both_requests_are_an_error() -> None:
    asked = Asked()
    read = asked.until_second()
    asked.first.set_exception(ValueError("UNAVAILABLE: first"))
    asked.second.set_exception(ValueError("UNAVAILABLE: second"))
    with pytest.raises(ValueError, match="UNAVAILABLE"):
        asked.reads.result(read)


@pytest.mark.parametrize(("first", "second"), [("damaged", "right"), ("right", "damaged")])
def test_wrong_bytes_of_one_request_wait_for_the_other(first: str, second: str) -> None:
    asked = Asked()
    read = asked.until_second()
    asked.first.set_result(first)
    asked.second.set_result(second)
    assert asked.reads.result(read, lambda value: value == "right") == "right"


def test_wrong_bytes_of_both_are_returned_for_the_caller_to_name() -> None:
    asked = Asked()
    read = asked.until_second()
    asked.first.set_result("damaged")
    asked.second.set_result("damaged")
    assert asked.reads.result(read, lambda value: value == "right") == "damaged"


def test_both_requests_that_stall_end_at_the_deadline() -> None:
    asked = Asked(deadline_s=3.0)
    with pytest.raises(DeadlineExceeded, match="storage did not deliver in time"):
        asked.reads.result(asked.read)
    assert asked.told
    assert asked._first.cancelled()
    assert asked._second.cancelled()


def test_second_request_is_of_a_store_opened_anew() -> None:
    opening, opened = tensorstore.Promise.new()
    data, read = tensorstore.Promise.new()
    request = Request(opened, lambda store: read if store == "store" else None)
    assert not request.done()
    opening.set_result("store")
    assert not request.done()
    data.set_result(9)
    assert request.done()
    assert request.result() == 9


def test_store_that_cannot_be_opened_is_the_error() -> None:
    opening, opened = tensorstore.Promise.new()
    request = Request(opened, lambda store: store)
    opening.set_exception(ValueError("NOT_FOUND"))
    assert request.done()
    with pytest.raises(ValueError, match="NOT_FOUND"):
        request.result()


@pytest.fixture(scope="module")
def found() -> Any:
    return printed_beside_bucket("hedged_reads_program.py", timeout_s=250)


@pytest.mark.parametrize("case", ["stalled_data", "stalled_node", "slow_data"])
def test_stalled_object_does_not_decide(found: Any, case: str) -> None:
    """One request, for a chunk or two, is held until the end, or comes at a low rate."""
    assert found[case]["same"]
    assert found[case]["hit"] == 1, "the fault was there"
    assert found[case]["hedged"] >= 1
    assert found[case]["hedged_bytes"] <= 3 * found["box_bytes"]


def test_undisturbed_reads_are_asked_for_once(found: Any) -> None:
    assert found["undisturbed"] == {"same": True, "hit": 0, "hedged": 0, "hedged_bytes": 0}


def test_reads_that_are_slow_alike_are_asked_for_once(found: Any) -> None:
    assert found["slow_alike"]["same"]
    assert found["slow_alike"]["hedged"] == 0


def test_object_that_stalls_for_all_ends_at_the_deadline(found: Any) -> None:
    assert found["all_stall"]["error"] == "PersistentTierError"
    assert found["all_stall"]["hedged"] >= 1
