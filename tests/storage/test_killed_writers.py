"""What a process leaves in a file system that was killed right before a file got its name."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from persistent_steps import (
    KEPT,
    LOG_FOLDER,
    complete_steps,
    life,
    save_over,
    value_of,
    write,
    writer_of,
)

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.state.host_state import document_name
from emergency_ckpt.storage import PersistentTier, StorageDirectory, probe_storage
from emergency_ckpt.storage.directory import written_for
from emergency_ckpt.storage.marker import CHECKSUMS_NAME, HOST_STATE, MARKER_NAME

LONG_S = 60.0


class BeforeTheName:
    """Calls ``act`` with each temporary file, while it is whole and has not got its name yet."""

    def __init__(self, patch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
        for call in (os.link, os.replace):

            def acted(source: Any, target: Any, call: Callable[..., None] = call) -> None:
                act(Path(source))
                call(source, target)

            patch.setattr(os, call.__name__, acted)


class Kills:
    """Inside, writers leave their temporary files, as if each had also been killed before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.left: dict[Path, bytes] = {}

    def __enter__(self) -> Kills:
        BeforeTheName(self._patch, lambda path: self.left.update({path: path.read_bytes()}))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        for path, data in self.left.items():
            path.write_bytes(data)


def begin_life(directory: Path, number: int) -> None:
    """Put one version on record, as the claim of a life."""
    tier = PersistentTier(str(directory))
    tier.create()
    writer_of(tier).hold(life(number))


def test_temporary_files_of_the_log_go_with_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the version may stay, the writer may be alive."""
    with Kills(monkeypatch) as kills:
        begin_life(tmp_path, 1)
    assert len(kills.left) == 2  # of the version, and of the record of its number
    folder = tmp_path / LOG_FOLDER
    others = [folder / name for name in ("000000000001.json.tmp", "x.000000000001.json.tmp")]
    for path in others:
        path.write_bytes(b"of somebody")
    for number in range(2, KEPT + 1):
        begin_life(tmp_path, number)
        assert all(path.exists() for path in kills.left)
    begin_life(tmp_path, KEPT + 1)
    assert sorted(folder.glob("*.tmp")) == others
    assert len(list(folder.glob("*.json"))) == KEPT


def test_temporary_file_of_a_probe_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = StorageDirectory(str(tmp_path), LONG_S)
    with Kills(monkeypatch) as kills:
        probe_storage(storage, life(1), time.monotonic() + LONG_S)
    assert kills.left
    probe_storage(storage, life(2), time.monotonic() + LONG_S)
    assert list((tmp_path / HOST_STATE).iterdir()) == []


def test_temporary_files_beside_a_marker_go_at_the_next_claim(tmp_path: Path) -> None:
    """The writer was killed after the link to the marker, and before it removed the other name.

    A file that no writer of this package names so stays.
    """
    tier = PersistentTier(str(tmp_path))
    tier.create()
    writer_of(tier).begin(life(1))
    write(tier, 3, 7, life(1))
    folder = tmp_path / HOST_STATE / "3"
    (folder / "notes.tmp").write_bytes(b"of somebody")
    names = {path.name for path in folder.iterdir()}
    for number, name in enumerate((MARKER_NAME, CHECKSUMS_NAME)):
        (folder / f"{number:016x}.{name}.tmp").hardlink_to(folder / name)
    writer_of(tier).begin(life(2))
    assert {path.name for path in folder.iterdir()} == names
    assert complete_steps(tier) == [3]
    assert value_of(tier, 3) == 7


def create(storage: StorageDirectory) -> None:
    assert storage.put_first("file", b"bytes")


def replace(storage: StorageDirectory) -> None:
    storage.put("file", b"bytes")


@pytest.mark.parametrize("write", [create, replace])
def test_writer_whose_temporary_file_was_removed_writes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[StorageDirectory], None]
) -> None:
    """A life removes the file of a writer that stalled for long, and is alive after all."""
    removals = [Path.unlink]
    BeforeTheName(monkeypatch, lambda path: removals.pop()(path) if removals else None)
    write(StorageDirectory(str(tmp_path), LONG_S))
    assert not removals
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"bytes"


@pytest.mark.parametrize("write", [create, replace])
def test_folder_that_is_gone_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[StorageDirectory], None]
) -> None:
    directory = tmp_path / "dir"
    directory.mkdir()
    BeforeTheName(monkeypatch, lambda path: shutil.rmtree(path.parent))
    with pytest.raises(PersistentTierError, match="FileNotFoundError"):
        write(StorageDirectory(str(directory), LONG_S))
    assert not directory.exists()


def test_files_are_synced_before_the_version_that_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of what is synced; TensorStore syncs the arrays itself."""
    tier = PersistentTier(str(tmp_path))
    tier.create()
    writer_of(tier).hold(life(1))
    synced, fsync = list[str](), os.fsync

    def noted(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced.append(written_for(path.name) or str(path.relative_to(tmp_path)))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    save_over(tier, 4, 7, life(1))
    versions = [n for n, name in enumerate(synced) if name.startswith("00000")]
    before = synced[: versions[-1]]
    assert {document_name(0, 1), CHECKSUMS_NAME, MARKER_NAME} < set(before)
    assert before.index(f"{HOST_STATE}/4") < before.index(".") < before.index(MARKER_NAME)
