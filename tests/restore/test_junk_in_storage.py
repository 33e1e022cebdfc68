"""What others leave in the persistent directory hides no step, and is not removed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import storage_fails
from forgery import write_sealed
from looks import eckpt
from persistent_steps import INSPECTED_AT_ONCE, complete_steps, fill
from world import STORAGE, World, finish, logged, restored, save, save_all

from emergency_ckpt.errors import ForeignStep, SaveFailed, Unrecoverable
from emergency_ckpt.storage import PersistentTier

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
    (directory / str(number) / "state").mkdir(parents=True)
    (directory / str(number) / "notes.txt").write_text("not a step")


def _described(item: str) -> Callable[[Path, int], None]:
    """Orbax's description of arrays, and none of the arrays."""

    def make(directory: Path, number: int) -> None:
        folder = directory / str(number) / item
        folder.mkdir(parents=True)
        real = next(directory.glob("[1-9]/*/_METADATA"))
        (folder / "_METADATA").write_bytes(real.read_bytes())

    return make


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
        encoded = json.dumps(file["marker"], separators=(",", ":"))
        digest = hashlib.sha256(encoded.encode()).hexdigest()
        text = f'{{"format":1,"digest":"{digest}","marker":{encoded}}}'
        (documents / "marker.json").write_text(text)

    return make


def _consistent(directory: Path, number: int) -> None:
    """A step whose files say that it is whole; what they speak of is not there."""
    _incarnation("ffffffffffff-0000")(directory, number)
    metadata = {"item_handlers": {}, "init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}
    (directory / str(number) / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))


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
    "arrays described": _described("state"),
    "arrays described, no item": _described(""),
    "damaged marker": _damaged,
    "future life": _incarnation("ffffffffffff-0000"),
    "negative life": _incarnation("-0198f2c4a1b0"),
    "huge life": _incarnation("f" * 100_000),
    "path": _incarnation("../../outside"),
    "life of nobody": _incarnation("0" * 12 + "-0000"),
}


@pytest.mark.dear
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


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.dear)])
def test_restore_beside_much_junk_takes_the_real_step(saved: World, count: int) -> None:
    for number in range(100, 100 + count):
        JUNK["empty" if number % 2 else "damaged marker"](saved.persistent, number)
    with logged() as lines:
        assert restored(saved) == REAL
    assert len([line for line in lines if "cannot be used" in line]) < 40
    notes = [e.fields["text"] for e in saved.events if e.name == "restore.note"]
    rejected = [e for e in saved.events if e.name == "restore.rejected"]
    assert len([text for text in notes if "Orbax has written nothing" in text]) == count // 2
    newest = [number for number in range(99 + count, 99, -1) if number % 2 == 0]
    assert [e.fields["step"] for e in rejected] == newest[:32]  # so many are told one by one


def test_restore_of_junk_alone_is_never_a_fresh_start(world: World) -> None:
    for number in range(20):
        _empty_in(world, number)
    with pytest.raises(Unrecoverable, match="Orbax has written nothing"):
        restored(world)


def _empty_in(world: World, number: int) -> None:
    world.persistent.mkdir(exist_ok=True)
    _empty(world.persistent, number)


def test_consistent_forgery_beside_a_log_ends_a_restore_by_name(saved: World) -> None:
    """It is whole by all that its marker says, and has the tensors of another."""
    for number in range(100, 140):
        _consistent(saved.persistent, number)
    with pytest.raises(ForeignStep, match="step 139"):
        restored(saved)


def test_restore_after_16_consistent_forgeries_goes_on_to_older(saved: World) -> None:
    """Without a log they are steps, of which none can be read."""
    shutil.rmtree(saved.persistent / "host_state" / "log")
    for number in range(100, 140):
        _consistent(saved.persistent, number)
    assert restored(saved) == REAL


@pytest.mark.dear
def test_restore_beside_junk_prefers_storage_to_older_ram(world: World) -> None:
    with world.open_both() as ckpt:
        save_all(ckpt, world, 1, 2)
    with world.open_both(**STORAGE) as ckpt:
        ckpt.restore(state=world.state(0))
        save_all(ckpt, world, 3)
    shutil.rmtree(world.persistent / "host_state" / "log")
    for number in range(100, 140):
        _consistent(world.persistent, number)
    assert restored(world) == 3


@pytest.mark.dear
def test_lives_after_a_marker_of_the_future_stay_in_order(saved: World) -> None:
    future = _incarnation("999999999999-ffff")
    for number in range(100, 120):
        future(saved.persistent, number)
    # The arrays of this one are there, and only the description of them is damaged.
    future(saved.persistent, 120)
    shutil.copytree(saved.persistent / "6", saved.persistent / "120", dirs_exist_ok=True)
    (saved.persistent / "120" / "_CHECKPOINT_METADATA").write_text("{}")
    for step in (7, 8, 9):
        with saved.open_both(**STORAGE) as ckpt:
            assert ckpt.restore(state=saved.state(0))[0] == step - 1
            save_all(ckpt, saved, step)
        saved.lose_ram()
    assert restored(saved) == 9


def test_retention_beside_junk_neither_counts_nor_removes_it(saved: World) -> None:
    for number in range(100, 120):
        JUNK["empty" if number % 2 else "strange"](saved.persistent, number)
    beyond = saved.persistent / "host_state" / ("9" * 26)
    beyond.mkdir()
    with saved.open_both(**STORAGE, keep_last_n=2) as ckpt:
        ckpt.restore(state=saved.state(0))
        save_all(ckpt, saved, 7, 8)
    assert complete_steps(str(saved.persistent)) == [7, 8]
    assert all((saved.persistent / str(number)).is_dir() for number in range(100, 120))
    assert beyond.is_dir()


def _samples(directory: Path, number: int) -> Path:
    """What a loop keeps beside its steps, by their numbers."""
    path = directory / str(number) / "eval" / "samples.txt"
    path.parent.mkdir(parents=True)
    path.write_text("samples")
    return path


def _file(directory: Path, number: int) -> Path:
    path = directory / str(number)
    path.write_text("samples")
    return path


@pytest.mark.parametrize("write", [_samples, _file])
def test_save_in_the_place_of_others_files_keeps_them(
    saved: World, write: Callable[[Path, int], Path]
) -> None:
    path = write(saved.persistent, 7)
    with saved.open_both(**STORAGE) as ckpt:
        ckpt.restore(state=saved.state(0))
        assert save(ckpt, saved, 7)
        with pytest.raises(SaveFailed, match=r"this package did not write.*move"):
            finish(ckpt)
        assert path.read_text() == "samples"
        (saved.persistent / "7").rename(saved.persistent / "samples")
        assert save(ckpt, saved, 7, force=True)
        save_all(ckpt, saved, 8)
    assert complete_steps(str(saved.persistent)) == [4, REAL, 7, 8]


@pytest.mark.parametrize("write", [_samples, _file])
def test_clean_up_after_a_failed_save_keeps_others_files(
    saved: World, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, int], Path]
) -> None:
    """They came while that save was under way; the next save, of this life or the next, clears."""
    for step in (7, 9):
        with saved.open_both(**STORAGE) as ckpt:
            ckpt.restore(state=saved.state(0))
            with monkeypatch.context() as patch:
                storage_fails(patch, "write_tensors")
                assert save(ckpt, saved, step)
                with pytest.raises(SaveFailed):
                    finish(ckpt)
            path = write(saved.persistent, step)
            if step == 7:
                save_all(ckpt, saved, 8)
        saved.lose_ram()
    with saved.open_both(**STORAGE) as ckpt:
        ckpt.restore(state=saved.state(0))
        save_all(ckpt, saved, 10)
    assert path.read_text() == "samples"
    assert sorted(each.name for each in saved.persistent.glob("[0-9]*")) == sorted(
        ["4", "6", "7", "8", "9", "10"]
    )
    assert not (saved.persistent / "host_state" / "9").exists()


def _orbax_under_way(directory: Path, number: int) -> Path:
    """What a save of plain Orbax has written before its commit."""
    folder = directory / f"{number}.orbax-checkpoint-tmp-1700000000000000"
    folder.mkdir()
    (folder / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs":1}')
    return folder


def _orbax_before_metadata(directory: Path, number: int) -> Path:
    """A step of an Orbax that wrote no such file yet."""
    folder = directory / str(number)
    ignore = shutil.ignore_patterns("_CHECKPOINT_METADATA")
    shutil.copytree(directory / str(REAL), folder, ignore=ignore)
    return folder


@pytest.mark.parametrize("write", [_orbax_under_way, _orbax_before_metadata])
@pytest.mark.parametrize("is_same_life", [True, False], ids=["same life", "next life"])
def test_clean_up_after_a_failed_save_keeps_saves_of_others(
    saved: World,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, int], Path],
    is_same_life: bool,
) -> None:
    with contextlib.ExitStack() as lives:
        ckpt = lives.enter_context(saved.open_both(**STORAGE))
        ckpt.restore(state=saved.state(0))
        with monkeypatch.context() as patch:
            storage_fails(patch, "write_tensors")
            assert save(ckpt, saved, 7)
            with pytest.raises(SaveFailed):
                finish(ckpt)
        folder = write(saved.persistent, 7)
        files = sorted(folder.rglob("*"))
        if not is_same_life:
            lives.close()
            saved.lose_ram()
            ckpt = lives.enter_context(saved.open_both(**STORAGE))
            ckpt.restore(step=REAL, state=saved.state(0))
        save_all(ckpt, saved, 8)
    assert sorted(folder.rglob("*")) == files
    assert not (saved.persistent / "host_state" / "7").exists()


def test_save_in_the_place_of_an_empty_folder_takes_it(saved: World) -> None:
    _empty(saved.persistent, 7)
    with saved.open_both(**STORAGE) as ckpt:
        ckpt.restore(state=saved.state(0))
        save_all(ckpt, saved, 7)
    assert complete_steps(str(saved.persistent)) == [4, REAL, 7]


def test_junk_under_a_plain_name_hides_no_prefixed_step(tmp_path: Path) -> None:
    fill(str(tmp_path / "other"), [7])
    plain = tmp_path / "plain"
    shutil.copytree(tmp_path / "other" / "7", plain / "run_0007")
    for name in ("7", "0007", "run_00007", *(f"run_{number}" for number in range(100, 140))):
        (plain / name).mkdir()
    tier = PersistentTier(str(plain))
    assert complete_steps(tier) == [7]
    assert tier.describe(tier.find(7)).leaves.keys() == {"w"}


@pytest.mark.parametrize("kind", ["empty", "damaged marker"])
def test_much_junk_between_two_steps_hides_neither(tmp_path: Path, kind: str) -> None:
    """The log names both; the listing alone costs no look."""
    tier = fill(str(tmp_path), [1, 300])
    for number in range(2, 2 + 2 * INSPECTED_AT_ONCE):
        JUNK[kind](tmp_path, number)
    view = tier.found.view(time.monotonic() + 60)
    assert [each.step for each in view.steps if each.is_seen] == [1, 300]
    assert complete_steps(tier) == [1, 300]


_NO_METADATA = (b'{"format":1}', b"\xff{", b"")


@pytest.mark.parametrize("junk", _NO_METADATA)
@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "without a marker"])
def test_step_whose_metadata_are_junk_is_nobody_elses(
    saved: World, junk: bytes, is_marked: bool
) -> None:
    """It is rolled back, and later removed, as any other: its folder stays under no number."""
    (saved.persistent / str(REAL) / "_CHECKPOINT_METADATA").write_bytes(junk)
    if not is_marked:
        shutil.rmtree(saved.persistent / "host_state" / str(REAL))
    with saved.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=saved.state(0), host_state={})[0] == 4
        save_all(ckpt, saved, 5)
    assert not (saved.persistent / str(REAL)).exists()
    saved.lose_ram()
    with saved.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=saved.state(0), host_state={})[0] == 5
        save_all(ckpt, saved, REAL, 7)
    saved.lose_ram()
    assert restored(saved) == 7
    assert sorted(each.name for each in saved.persistent.glob("[0-9]*")) == ["4", "5", "6", "7"]


@pytest.mark.parametrize("junk", _NO_METADATA)
def test_step_whose_metadata_are_junk_goes_with_older_ones(saved: World, junk: bytes) -> None:
    (saved.persistent / "4" / "_CHECKPOINT_METADATA").write_bytes(junk)
    with saved.open_both(**STORAGE, keep_last_n=2) as ckpt:
        assert ckpt.restore(state=saved.state(0))[0] == REAL
        save_all(ckpt, saved, 8, 10)
    assert sorted(each.name for each in saved.persistent.glob("[0-9]*")) == ["10", "8"]
    saved.lose_ram()
    assert restored(saved) == 10


def test_save_beside_a_commit_time_beyond_all_numbers_succeeds(world: World) -> None:
    """Another program wrote that step and its time, before the first save of the run."""
    _described_by(world.persistent, 5, 10**309)
    listed = eckpt("ls", "--dir", world.persistent)
    assert (listed.returncode, listed.stderr) == (0, ""), listed
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 6)
    world.lose_ram()
    assert restored(world) == 6


def _described_by(directory: Path, number: int, commit_ns: int) -> None:
    """A step of plain Orbax with one item, committed at ``commit_ns``."""
    folder = directory / str(number)
    (folder / "default").mkdir(parents=True)
    (folder / "default" / "_METADATA").write_text("{}")
    metadata = {"item_handlers": {"default": "x"}, "commit_timestamp_nsecs": commit_ns}
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))


_STRANGE_LEAVES: dict[str, dict[str, Any]] = {
    "unknown dtype": {"dtype": "float31"},
    "dimension below 0": {"global_shape": [8, -4]},
    "dimension of a thousand digits": {"global_shape": [8, 10**1000]},
    "more bytes than any file has": {"global_shape": [1 << 40, 1 << 40]},
}


@pytest.mark.parametrize("kind", _STRANGE_LEAVES)
def test_marker_of_a_strange_leaf_is_named_by_each_look(saved: World, kind: str) -> None:
    """All else of the marker is right, and the tensors are those that it names."""
    shutil.copytree(saved.persistent / str(REAL), saved.persistent / "100")
    documents = saved.persistent / "host_state"
    shutil.copytree(documents / str(REAL), documents / "100")
    marker = json.loads((documents / "100" / "marker.json").read_bytes())["marker"]
    marker["save"]["step"] = 100
    write_sealed(documents / "100" / "marker.json", "marker", marker)
    place = ("--dir", saved.persistent)
    assert eckpt("ls", "100", *place).returncode == 0
    (leaf,) = (leaf for leaf in marker["leaves"] if leaf["path"] == "w")
    leaf.update(_STRANGE_LEAVES[kind])
    write_sealed(documents / "100" / "marker.json", "marker", marker)
    for words in (["ls", "100"], ["ls", "100", "--json"], ["ls"], ["ls", "--json"]):
        done = eckpt(*words, *place)
        assert (done.returncode, "marker.json" in done.stdout) == (1, True), done
    assert restored(saved) == REAL
