"""Storage answers after a write was given up: what it then does must not show as a step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils.epath import backend
from persistent_steps import KEPT, LOG_FOLDER, life, writer_of
from state_samples import mesh_of, on_host, sharded

from emergency_ckpt.core.step_log import Table
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.array_writes import (
    ArrayWrites,
    new_context,
    published_database_spec,
)
from emergency_ckpt.storage.item import NUMPY_ARRAY, ItemArray, NamedArray, loaded_part
from emergency_ckpt.types import SaveId
from emergency_ckpt.work_progress import WorkProgress

TIMEOUT_S = 2.0
LONG_S = 60.0


def write_tensors(tier: PersistentTier, step: int) -> None:
    state = {"w": sharded(np.full((8, 4), step, np.float32), mesh_of(2, 4), ("x", "y"))}
    tree, shards = on_host(state)
    save = SaveId(step=step, incarnation=life(1), run_id="run")
    tier.write_tensors(save, tree, shards, (0,))


def stall(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], place: str = "/4.orbax"
) -> threading.Event:
    """Calls of these ``names`` for paths with ``place``, step 4's, wait for the event."""
    answers = threading.Event()

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if place in str(path):
                answers.wait(LONG_S)
            return call(self, path, *args, **kwargs)

        return wait_and_call

    kind = type(backend.os_backend)
    for name in names:
        monkeypatch.setattr(kind, name, slow(getattr(kind, name)))
    return answers


@pytest.mark.parametrize("names", [("mkdir", "makedirs"), ("rename", "replace")])
def test_write_that_was_given_up_does_not_come_through_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    tier = PersistentTier(str(tmp_path / "run"))
    tier.create()
    write_tensors(tier, 2)
    answers = stall(monkeypatch, names)
    with pytest.raises(PersistentTierError, match="no answer in time"):
        write_tensors(PersistentTier(tier.directory, timeout_s=TIMEOUT_S), 4)
    (given_up,) = given_up_calls()
    answers.set()
    given_up.join(LONG_S)
    assert not given_up.is_alive()
    assert os.listdir(tier.directory) == ["2"]
    write_tensors(tier, 4)
    assert sorted(os.listdir(tier.directory)) == ["2", "4"]


def test_given_up_write_leaves_the_step_of_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That step came into the place before the write did."""
    tier = PersistentTier(str(tmp_path / "run"))
    tier.create()
    answers = stall(monkeypatch, ("rename", "replace"))
    with pytest.raises(PersistentTierError, match="no answer in time"):
        write_tensors(PersistentTier(tier.directory, timeout_s=TIMEOUT_S), 4)
    theirs = tmp_path / "run" / "4" / "_CHECKPOINT_METADATA"
    theirs.parent.mkdir()
    theirs.write_text('{"init_timestamp_nsecs":1}')
    (given_up,) = given_up_calls()
    answers.set()
    given_up.join(LONG_S)
    assert os.listdir(tier.directory) == ["4"]
    assert os.listdir(theirs.parent) == [theirs.name]


def given_up_calls() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("eckpt-storage")]


def test_step_is_not_saved_again_while_a_removal_of_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the arrays of the new save away."""
    tier = PersistentTier(str(tmp_path / "run"))
    hasty = PersistentTier(tier.directory, timeout_s=0.5)
    tier.create()
    write_tensors(tier, 4)
    answers = stall(monkeypatch, ("rename", "replace"), "/run/4")
    with pytest.raises(PersistentTierError, match="no answer in time"):
        writer_of(hasty).remove([4], life(2))
    (given_up,) = given_up_calls()
    with pytest.raises(PersistentTierError, match="has timed out and not ended"):
        write_tensors(hasty, 4)
    with pytest.raises(PersistentTierError, match="has timed out and not ended"):
        hasty.write_document(4, 0, 1, b"{}")
    write_tensors(tier, 2)  # another step does not mind
    answers.set()
    write_tensors(tier, 4)  # waits for it
    assert not given_up.is_alive()
    assert sorted(os.listdir(tier.directory)) == ["2", "4", "host_state"]


def test_leftovers_wait_for_a_marker_that_may_still_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make a step count whose arrays were removed meanwhile."""
    tier = PersistentTier(str(tmp_path / "run"))
    tier.storage.create_folder("host_state")
    tier.write_document(4, 0, 1, b"{}")
    save = SaveId(step=4, incarnation=life(1), run_id="run")
    answers, link = threading.Event(), os.link

    def slow_link(source: Any, path: Any) -> None:
        if "/host_state/4/marker" in str(path):
            answers.wait(LONG_S)
        link(source, path)

    monkeypatch.setattr(os, "link", slow_link)
    with pytest.raises(PersistentTierError, match="no answer in time"):
        PersistentTier(tier.directory, timeout_s=0.5).finish(save, {0: ("0" * 64, True)}, [], {})
    (given_up,) = given_up_calls()
    writer = writer_of(tier)
    writer.begin(life(2))
    assert "4" in os.listdir(Path(tier.directory) / "host_state")
    answers.set()
    given_up.join(LONG_S)
    writer.begin(life(2))
    assert os.listdir(Path(tier.directory) / "host_state") == ["log"]


@pytest.mark.parametrize(
    ("name", "place"),
    [("replace", f".{KEPT + 1:012d}.json.tmp"), ("remove", f"/{LOG_FOLDER}/{1:012d}")],
)
def test_start_waits_for_its_version_of_the_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    """The start has its number, and neither the hint nor an old version keeps it longer."""
    tier = PersistentTier(str(tmp_path / "run"))
    log = tier.found.log
    for number in range(1, KEPT + 1):
        assert log.append(Table(number, "run", False, life(1)))
    writer = writer_of(tier)
    writer.find()
    before = log_files(tier)
    answers = stall(monkeypatch, (name,), place)
    writer.enter(life(2), time.monotonic() + 2 * TIMEOUT_S)
    entered, given_up = log_files(tier), given_up_calls()
    answers.set()
    for call in given_up:
        call.join(LONG_S)
    table = log.read().table
    assert table is not None
    assert (table.number, table.greatest) == (KEPT + 1, 2)
    what_stalled = "newest" if name == "replace" else f"{1:012d}.json"
    assert entered[what_stalled] == before[what_stalled]
    assert log_files(tier).get(what_stalled) != before[what_stalled]


def log_files(tier: PersistentTier) -> dict[str, bytes]:
    folder = Path(tier.directory) / LOG_FOLDER
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_cancelled_save_begins_no_commit(tmp_path: Path) -> None:
    """Its files would appear in a later save of the step."""
    values = np.arange(8, dtype=np.float32)
    part = loaded_part(((0, 8),), values)
    array = ItemArray((8,), "float32", NUMPY_ARRAY, (8,), (8,), None, None, (part,))
    writes = ArrayWrites(
        attempt="0",
        creates=True,
        at_once_bytes=1 << 20,
        progress=WorkProgress.until(time.monotonic() + 60),
    )
    database = writes.open(published_database_spec(str(tmp_path)), new_context())
    writes.cancel()
    with pytest.raises(PersistentTierError, match="was cancelled"):
        writes.write_into(database, [NamedArray("w", array)])
    assert not list(tmp_path.rglob("*"))
