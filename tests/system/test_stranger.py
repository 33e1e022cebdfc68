"""Somebody without the secret writes to JAX's coordination service while a job restores and saves.

Each attack ends in an error that names the key, on the process that reads it; the others have a
typed error too, no process has another step, and the job restores the newest step afterwards.
"""

from __future__ import annotations

import pytest
from job_results import Results, results_of
from running_jobs import of

KEYS = {"plan": "restore/0/answer/0.told/0", "verdict": "restore/0/0/status.told"}


results = results_of("stranger_job.py", hosts=1)


@pytest.mark.parametrize("what", KEYS)
@pytest.mark.parametrize("how", ["written", "replayed"])
def test_restore_steered_by_a_stranger_is_an_error(results: Results, what: str, how: str) -> None:
    seen = of(results, f"{what}_{how}")
    assert [s["older"]["step"] for s in seen] == [5, 5], "the stranger has something to replay"
    error = seen[1]["attacked"]
    assert error.get("error") == "ForgedValue", error
    assert f"{KEYS[what]}: it has no mark of this start of the job" in error["text"]
    # Where it had all that it needs, the leader may have gone on.
    assert seen[0]["attacked"].get("step") in (None, 10), seen[0]
    assert [(s["after"]["step"], s["after"]["differences"]) for s in seen] == [(10, [])] * 2


@pytest.mark.parametrize("what", KEYS)
def test_restore_without_a_deleted_key_is_an_error(results: Results, what: str) -> None:
    seen = of(results, f"{what}_deleted")
    error = seen[1]["attacked"]
    assert error.get("error") in ("DeadlineExceeded", "PeerLeft"), error
    assert KEYS[what] in error["text"]
    assert seen[0]["attacked"].get("step") in (None, 10), seen[0]
    assert [(s["after"]["step"], s["after"]["differences"]) for s in seen] == [(10, [])] * 2


@pytest.mark.parametrize("how", ["written", "moved"])
def test_vote_with_a_strangers_ballot_is_an_error(results: Results, how: str) -> None:
    leader, _ = of(results, f"ballot_{how}")
    assert leader["complete"] == [5]
    (error,) = leader["errors"]
    assert error.startswith("SaveFailed: save step 10 to the local tier: in doubt: list vote/")
    assert "/10/ballot/1: it has no mark of this start of the job" in error


def test_vote_without_a_deleted_ballot_is_incomplete(results: Results) -> None:
    for seen in of(results, "ballot_deleted"):
        assert seen["complete"] == [5]
        (error,) = seen["errors"]
        assert error.startswith("SaveFailed: save step 10 to the local tier: incomplete: ")


def test_vote_with_a_deleted_decision_is_complete_for_all(results: Results) -> None:
    for seen in of(results, "decision_deleted"):
        assert (seen["complete"], seen["errors"]) == ([5, 10, 15], [])


def test_made_up_secret_is_nowhere_to_be_read(results: Results) -> None:
    for seen in of(results, "known_by_reading"):
        assert seen["keys"], "a stranger can read the keys"
        assert (seen["of_the_exchange"], seen["read"]) == (0, False)
