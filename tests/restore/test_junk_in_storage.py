"""What others leave in the persistent directory hides no step, and is not removed."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from persistent_steps import fill
from world import World, logged, same, save_all

from emergency_ckpt.errors import Unrecoverable
from emergency_ckpt.tiers.persistent.steps.records import OFFERED_AT_ONCE
from emergency_ckpt.tiers.persistent.tier import PersistentTier

STORAGE: dict[str, Any] = {"save_every_n_steps": 1, "local_save_every_n_steps": 0}
REAL = 6


@pytest.fixture
def saved(world: World) -> World:
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 4, REAL)
    world.lose_ram()
    return world


def _empty(directory: Path, number: int) -> None:
    (directory / str(number)).mkdir()


def _strange(directory: Path, number: int) -> None:
    (directory / str(number) / "default").mkdir(parents=True)
    (directory / str(number) / "notes.txt").write_text("not a step")


def _marker(change: Callable[[dict[str, Any]], None]) -> Callable[[Path, int], None]:
    """Beside an empty folder, the marker of the real step with another content."""

    def make(directory: Path, number: int) -> None:
        _empty(directory, number)
        real = next(directory.glob("host_state/[1-9]/marker.json"))
        file = json.loads(real.read_bytes())
        change(file["marker"])
        file["marker"]["save"]["step"] = number
        documents = directory / "host_state" / str(number)
        documents.mkdir()
        # Of format 1, which has no digest to be wrong, and does not know its tensors.
        tensors = file["marker"].pop("tensors")
        assert tensors
        (documents / "marker.json").write_text(json.dumps({"format": 1, **file["marker"]}))

    return make


def _consistent(directory: Path, number: int) -> None:
    """A step whose files say that it is whole; what they speak of is not there."""
    _incarnation("ffffffffffff-0000")(directory, number)
    (directory / str(number) / "_CHECKPOINT_METADATA").write_text("{}")


def _incarnation(text: str) -> Callable[[Path, int], None]:
    return _marker(lambda marker: marker["save"].update(incarnation=text))


def _damaged(directory: Path, number: int) -> None:
    _empty(directory, number)
    documents = directory / "host_state" / str(number)
    documents.mkdir()
    (documents / "marker.json").write_bytes(b"\xff{")


JUNK: dict[str, Callable[[Path, int], None]] = {
    "empty": _empty,
    "strange": _strange,
    "damaged marker": _damaged,
    "future life": _incarnation("ffffffffffff-0000"),
    "negative life": _incarnation("-0198f2c4a1b0"),
    "huge life": _incarnation("f" * 100_000),
    "path": _incarnation("../../outside"),
    "life of nobody": _incarnation("0" * 12 + "-0000"),
}


def restored(world: World, step: int | None = None, **settings: Any) -> int | None:
    with world.open_both(**{**STORAGE, **settings}) as ckpt:
        found, state = ckpt.restore(step, state=world.state(0))
        if found is not None:
            assert same(state, world.state(found))
        return found


@pytest.mark.parametrize("kind", JUNK)
def test_restore_beside_20_of_any_junk_takes_the_real_step(saved: World, kind: str) -> None:
    for number in range(100, 120):
        JUNK[kind](saved.persistent, number)
    (saved.persistent / ("9" * 26)).mkdir()
    (saved.persistent / "host_state" / ("9" * 26)).mkdir()
    with saved.open_both(**STORAGE) as ckpt:
        assert ckpt.latest_step() == REAL
        assert ckpt.all_steps() == [4, REAL]
        assert ckpt.restore(state=saved.state(0))[0] == REAL
        save_all(ckpt, saved, 7)
        assert ckpt.all_steps() == [4, REAL, 7]
    saved.lose_ram()
    assert restored(saved) == 7


@pytest.mark.parametrize("count", [200, 2000])
def test_restore_beside_much_junk_takes_the_real_step(saved: World, count: int) -> None:
    for number in range(100, 100 + count):
        JUNK["empty" if number % 2 else "damaged marker"](saved.persistent, number)
    with logged() as lines:
        assert restored(saved) == REAL
    assert len([line for line in lines if "into which Orbax has written nothing" in line]) == 1
    assert len([line for line in lines if "cannot be read" in line]) < 40
    passed = [event for event in saved.events if event.name == "persistent.passed_over"]
    assert [event.fields["count"] for event in passed] == [count]


def test_restore_of_junk_alone_is_never_a_fresh_start(world: World) -> None:
    for number in range(20):
        _empty_in(world, number)
    with pytest.raises(Unrecoverable, match="Orbax has written nothing"):
        restored(world)


def _empty_in(world: World, number: int) -> None:
    world.persistent.mkdir(exist_ok=True)
    _empty(world.persistent, number)


def test_restore_after_16_consistent_forgeries_goes_on_to_older(saved: World) -> None:
    """They are whole by all that their markers say."""
    for number in range(100, 140):
        _consistent(saved.persistent, number)
    assert restored(saved) == REAL


def test_restore_beside_junk_prefers_storage_to_older_ram(world: World) -> None:
    with world.open_both() as ckpt:
        save_all(ckpt, world, 1, 2)
    with world.open_both(**STORAGE) as ckpt:
        ckpt.restore(state=world.state(0))
        save_all(ckpt, world, 3)
    for number in range(100, 140):
        _consistent(world.persistent, number)
    assert restored(world) == 3


def test_lives_after_a_marker_of_the_future_stay_in_order(saved: World) -> None:
    for number in range(100, 120):
        _incarnation("ffffffffffff-ffff")(saved.persistent, number)
        (saved.persistent / "host_state" / str(number) / "marker.json").write_bytes(
            _with_tensors(saved.persistent, number)
        )
    for step in (7, 8, 9):
        with saved.open_both(**STORAGE) as ckpt:
            assert ckpt.restore(state=saved.state(0))[0] == step - 1
            save_all(ckpt, saved, step)
        saved.lose_ram()
    assert restored(saved) == 9


def _with_tensors(directory: Path, number: int) -> bytes:
    """The marker of format 2, of tensors that are not there."""
    documents = directory / "host_state" / str(number) / "marker.json"
    marker = json.loads(documents.read_bytes())
    marker.pop("format")
    marker["tensors"] = {"metadata": "a" * 64, "manifest": "b" * 64}
    encoded = json.dumps(marker, separators=(",", ":"))
    digest = hashlib.sha256(encoded.encode()).hexdigest()
    return f'{{"format":2,"digest":"{digest}","marker":{encoded}}}'.encode()


def test_retention_beside_junk_neither_counts_nor_removes_it(saved: World) -> None:
    for number in range(100, 120):
        JUNK["empty" if number % 2 else "strange"](saved.persistent, number)
    beyond = saved.persistent / "host_state" / ("9" * 26)
    beyond.mkdir()
    with saved.open_both(**STORAGE, keep_last_n=2) as ckpt:
        ckpt.restore(state=saved.state(0))
        save_all(ckpt, saved, 7, 8)
    assert PersistentTier(str(saved.persistent)).whole_steps() == [7, 8]
    assert all((saved.persistent / str(number)).is_dir() for number in range(100, 120))
    assert beyond.is_dir()


def test_junk_under_a_plain_name_hides_no_prefixed_step(tmp_path: Path) -> None:
    fill(str(tmp_path / "other"), [7])
    plain = tmp_path / "plain"
    shutil.copytree(tmp_path / "other" / "7", plain / "run_0007")
    for name in ("7", "0007", "run_00007", *(f"run_{number}" for number in range(100, 140))):
        (plain / name).mkdir()
    tier = PersistentTier(str(plain))
    whole = [found.step for found in tier.steps() if not found.problem]
    assert whole == [7]
    assert tier.describe(7).leaves.keys() == {"w"}


@pytest.mark.parametrize("is_late", [False, True])
def test_newest_with_little_time_left_offers_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Steps of a second look are left out; those of the first are not."""
    newest = 2 + OFFERED_AT_ONCE
    tier = fill(str(tmp_path), [1, newest])
    for damaged in range(2, newest):
        _empty(tmp_path, damaged)
        marker = tmp_path / "host_state" / str(damaged) / "marker.json"
        marker.parent.mkdir()
        marker.write_text("{")
    begin_s = time.monotonic()
    clock = iter([begin_s])
    # Of this module alone: the calls to storage have their own deadlines.
    late = SimpleNamespace(monotonic=lambda: next(clock, begin_s + 1000 * is_late))
    monkeypatch.setattr("emergency_ckpt.tiers.persistent.steps.records.time", late)
    whole = [found.step for found in tier.found.newest(begin_s + 60) if not found.problem]
    assert whole == ([newest] if is_late else [1, newest])
