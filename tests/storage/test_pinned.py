"""What a folder's name stands for by now is not what it stood for when the folder was opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from etils import epath

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage.pinned import Pinned


def make(path: Path, text: str) -> None:
    (path / "below").mkdir(parents=True)
    (path / "below" / "file").write_text(text)


def test_folder_that_took_the_name_is_neither_moved_nor_cleared(tmp_path: Path) -> None:
    make(tmp_path / "20", "old")
    pinned = Pinned(epath.Path(tmp_path), ["20", "absent"])
    (tmp_path / "20").rename(tmp_path / "elsewhere")
    make(tmp_path / "20", "new")
    pinned.move("20", "aside")
    pinned.clear("20")
    pinned.clear("absent")
    assert (tmp_path / "20" / "below" / "file").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["20", "elsewhere"]


def test_folder_that_takes_the_name_in_a_move_gets_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "20", "old")
    pinned = Pinned(epath.Path(tmp_path), ["20"])
    rename = os.rename
    moves: list[str] = []

    def rename_after_another(old: object, new: object) -> None:
        if not moves:
            rename(tmp_path / "20", tmp_path / "elsewhere")
            make(tmp_path / "20", "new")
        moves.append(str(new))
        rename(str(old), str(new))

    monkeypatch.setattr(os, "rename", rename_after_another)
    with pytest.raises(PersistentTierError, match="taken its place meanwhile"):
        pinned.move("20", "aside")
    assert (tmp_path / "20" / "below" / "file").read_text() == "new"
    assert len(moves) == 2


def test_folder_is_cleared_where_it_was_moved(tmp_path: Path) -> None:
    make(tmp_path / "20", "old")
    (tmp_path / "20" / "link").symlink_to(tmp_path / "20" / "below")
    pinned = Pinned(epath.Path(tmp_path), ["20"])
    pinned.move("20", "aside")
    pinned.move("20", "aside")
    assert sorted(os.listdir(tmp_path)) == ["aside"]
    pinned.clear("20", at="aside")
    pinned.clear("20", at="aside")
    assert os.listdir(tmp_path) == []


def test_link_is_removed_and_nothing_behind_it(tmp_path: Path) -> None:
    make(tmp_path / "kept", "kept")
    (tmp_path / "20").symlink_to(tmp_path / "kept")
    Pinned(epath.Path(tmp_path), ["20"]).clear("20")
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "below" / "file").exists()
