"""The oracle of the soak: what must come back, of lives and of what was found whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from soak_lane import Expected
from soak_looks import DirectoryStore, Save, look_at_ram, look_at_storage, sha
from soak_oracle import (
    Life,
    bounds,
    doubt_lives_from_nothing,
    is_on_way,
    is_refusal,
    possible_heads,
    problems_of,
    result_of,
)
from soak_truth import LEAVES, box_text, digest, leaf, position

# Life 0 came to 9; life 1 went on from 4 and bound; life 2 went on from life 1's 6 and was killed.
LIVES = {
    0: Life(0, None, 2, "yes"),
    1: Life(1, Save(4, 0), 2, "yes"),
    2: Life(2, Save(6, 1), 2, "maybe"),
}


def what_is_seen(process: int, step: int, life: int, **other: Any) -> dict[str, Any]:
    boxes = {
        name: {box_text(tuple((0, n) for n in each.shape)): leaf(name, step, life).tobytes()}
        for name, each in LEAVES.items()
    }
    seen = {
        "process": process,
        "step": step,
        "life": life,
        "digest": digest(boxes),
        "boxes": {name: list(each) for name, each in boxes.items()},
        "data": position(step, life, process),
    }
    return {**seen, **other}


@pytest.mark.parametrize(
    ("head", "save", "expected"),
    [
        (1, Save(4, 0), True),
        (1, Save(5, 0), False),
        (1, Save(99, 1), True),
        (2, Save(7, 1), False),
        (2, Save(6, 1), True),
        (2, Save(4, 0), True),
        (2, Save(5, 0), False),
        (1, Save(7, 2), True),
        (0, Save(9, 0), True),
    ],
)
def test_save_is_on_the_way_of_its_lives(head: int, save: Save, expected: bool) -> None:
    assert is_on_way(LIVES, head, save) == expected


def test_heads_are_the_last_sure_life_and_those_in_doubt() -> None:
    assert possible_heads(LIVES) == [2, 1]
    assert possible_heads({0: Life(0, None, 2), 1: Life(1, None, 2)}) == [0]
    assert possible_heads({}) == []


def test_life_from_nothing_leaves_older_lives_behind() -> None:
    lives = {**LIVES, 3: Life(3, None, 2, "yes", is_from_nothing=True)}
    found = {Save(8, 1), Save(2, 3)}
    assert bounds(lives, found) == (2, frozenset({Save(2, 3)}))
    lives[3].binds = "maybe"
    assert bounds(lives, found) == (2, frozenset(found))


def test_life_from_nothing_without_trace_binds_no_more() -> None:
    # Life 4 came from life 3's step 2, and life 3 from nothing. A trace of either is proof of both.
    lives = {
        **LIVES,
        3: Life(3, None, 2, "yes", is_from_nothing=True),
        4: Life(4, Save(2, 3), 2, "yes"),
    }
    doubt_lives_from_nothing(lives, {Save(6, 1), Save(3, 4)})
    assert [life.binds for life in lives.values()] == ["yes", "yes", "maybe", "yes", "yes"]
    doubt_lives_from_nothing(lives, {Save(6, 1)})
    assert [life.binds for life in lives.values()] == ["yes", "yes", "maybe", "maybe", "maybe"]
    assert bounds(lives, {Save(6, 1)}).allowed == {Save(6, 1)}


def test_life_that_found_neither_tier_binds_perhaps() -> None:
    seen, blind = Life(3, None, 2), Life(4, None, 2, is_blind=True)
    for life in (seen, blind):
        life.has_saved(1)
    assert (seen.binds, blind.binds) == ("maybe", "maybe")
    for life in (seen, blind):
        life.has_saved(2)
    assert (seen.binds, blind.binds) == ("yes", "maybe")
    found = {Save(4, 2), Save(9, 4)}
    assert bounds({**LIVES, 4: blind}, found) == (4, frozenset(found))


def test_right_restore_has_no_problem() -> None:
    seen = [what_is_seen(process, 6, 1) for process in (0, 1)]
    assert problems_of(seen, LIVES, 6) == []
    assert result_of([]) == "recovered"


@pytest.mark.parametrize(
    ("seen", "least", "result"),
    [
        ([what_is_seen(0, 6, 1), what_is_seen(1, 4, 0)], None, "different steps"),
        ([what_is_seen(0, 6, 1, digest="0")], None, "wrong bytes"),
        ([what_is_seen(0, 6, 7)], None, "wrong bytes"),
        ([what_is_seen(0, 6, 1, data=[0, 5, 1, 0])], None, "wrong iterator"),
        ([what_is_seen(0, 9, 0)], None, "rolled back"),
        ([what_is_seen(0, 4, 0)], 6, "older"),
        ([{"process": 0, "step": None}], 6, "older"),
        ([{"process": 0, "step": None}, what_is_seen(1, 6, 1)], None, "different steps"),
        ([what_is_seen(0, 4, 0), what_is_seen(1, 6, 1, digest="0")], 6, "wrong bytes"),
    ],
)
def test_wrong_restore_is_named(seen: list[Any], least: int | None, result: str) -> None:
    assert result_of(problems_of(seen, LIVES, least)) == result


def test_only_errors_of_a_loss_say_that_nothing_is_left() -> None:
    assert is_refusal(["Unrecoverable: restore run: x", "RestoreFailed: y"])
    assert not is_refusal([])
    assert not is_refusal(["ConfigError: configure: x"])
    assert not is_refusal(["Unrecoverable: x", "TypeError: y"])


def test_iterator_of_a_job_of_another_size_is_known() -> None:
    lives = {**LIVES, 3: Life(3, Save(6, 1), 4)}
    seen = [what_is_seen(process, 6, 1, data=position(6, 1, process % 2)) for process in range(4)]
    assert problems_of(seen, lives, 6) == []


def sealed(kind: str, value: object) -> bytes:
    """A file of storage with its digest."""
    body = json.dumps(value, separators=(",", ":"))
    return f'{{"format":1,"digest":"{sha(body.encode())}","{kind}":{body}}}'.encode()


def stored(root: Path, step: int) -> None:
    """Put into a directory the files by which a step of one process is whole."""
    save = {"step": step, "incarnation": "1-1", "run_id": "run"}
    document = {"schema_version": 1, "save": save, "owner": 0, "count": 1}
    state = json.dumps({**document, "digest": sha(b"null"), "payload": None}, separators=(",", ":"))
    checksums = b'{"format":1,"boxes":[]}'
    marker = {
        "save": save,
        "digests": [sha(state.encode())],
        "empty": [True],
        "leaves": [],
        "checksums": sha(checksums),
        "tensors": {"metadata": sha(b"{}"), "manifest": sha(b"x")},
        "items": ["state"],
    }
    files = {
        f"{step}/_CHECKPOINT_METADATA": b"{}",
        f"{step}/state/manifest.ocdbt": b"x",
        f"host_state/{step}/marker.json": sealed("marker", marker),
        f"host_state/{step}/checksums.json": checksums,
        f"host_state/{step}/process_00000_of_00001.json": state.encode(),
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


@pytest.mark.parametrize(
    ("steps", "lost", "found", "known"),
    [
        ((4, 8), (), {Save(4, 0), Save(8, 0)}, True),
        ((4, 8), ("host_state/8/",), {Save(4, 0)}, True),
        ((8,), ("host_state/8/",), set(), True),
        ((8,), ("8/_CHECKPOINT_METADATA",), set(), True),
        ((8,), ("8/_CHECKPOINT_METADATA", "host_state/8/"), set(), False),
        ((8,), ("8/",), set(), True),
    ],
)
def test_stored_step_of_which_files_are_lost_is_what_is_left(
    tmp_path: Path,
    steps: tuple[int, ...],
    lost: tuple[str, ...],
    found: set[Save],
    known: bool,
) -> None:
    for step in steps:
        stored(tmp_path, step)
    store = DirectoryStore(tmp_path)
    for name in store.names():
        if name.startswith(lost):
            store.remove(name)
    assert look_at_storage(store, {"1-1": 0}, set()) == (found, known)


def test_refusal_is_right_only_where_no_step_is_whole() -> None:
    errors = ["Unrecoverable: restore run: no complete step is left"]
    assert Expected(None, None, True, False).is_right_refusal(errors)
    assert not Expected(4, None, True, False).is_right_refusal(errors)
    assert not Expected(None, None, True, False).is_right_refusal([])


@pytest.mark.parametrize("knew", [True, False])
def test_damaged_ledger_is_of_a_known_step_if_it_named_one(tmp_path: Path, knew: bool) -> None:
    place = tmp_path / "run" / "process_00000"
    place.mkdir(parents=True)
    (place / "ledger.json").write_bytes(b"{}")
    found = look_at_ram({0: tmp_path}, "run", {}, set(), {place} if knew else set())
    assert found.known == knew
