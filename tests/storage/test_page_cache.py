"""A save to a disk lets go of the pages that the save before it filled."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from persistent_steps import life, writer_of
from state_samples import mesh_of, on_host, sharded

from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.array_writes import release_pages
from emergency_ckpt.types import SaveId

_libc = ctypes.CDLL(None, use_errno=True)


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file:
        _libc.mmap.restype = ctypes.c_void_p
        _libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
        )  # fmt: skip
        place = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        _libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert _libc.mincore(place, size, pages) == 0
        _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        _libc.munmap(place, size)
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def save(tier: PersistentTier, step: int) -> None:
    state = {"w": sharded(np.full((1 << 20, 4), step, np.float32), mesh_of(2, 4), ("x", "y"))}
    tree, shards = on_host(state)
    name = SaveId(step=step, incarnation=life(1), run_id="run")
    tier.write_tensors(name, tree, shards, (0,))


def data_files(directory: Path, step: int) -> list[Path]:
    found = [f for f in (directory / str(step)).rglob("d/*") if f.stat().st_size >= mmap.PAGESIZE]
    assert sum(each.stat().st_size for each in found) >= 16 << 20
    return found


def test_next_save_takes_the_pages_of_the_one_before(tmp_path: Path) -> None:
    tier = PersistentTier(str(tmp_path / "run"))
    tier.create()
    save(tier, 1)
    first = data_files(tmp_path / "run", 1)
    assert all(cached_bytes(each) for each in first)
    kept = [each.read_bytes() for each in first]
    for each in first:
        release_pages(str(each.parent.parent))
    assert sum(map(cached_bytes, first)) == 0
    assert [each.read_bytes() for each in first] == kept  # and in the cache again
    save(tier, 2)
    assert sum(map(cached_bytes, first)) == 0
    assert all(cached_bytes(each) for each in data_files(tmp_path / "run", 2))
    assert [each.read_bytes() for each in first] == kept


def test_removed_step_does_not_hinder_the_next_save(tmp_path: Path) -> None:
    tier = PersistentTier(str(tmp_path / "run"))
    tier.create()
    save(tier, 1)
    writer_of(tier).remove([1], life(2))
    save(tier, 2)
    assert data_files(tmp_path / "run", 2)


@pytest.mark.parametrize("entry", ["a link", "a folder", "a pipe"])
def test_foreign_entries_are_left_alone(tmp_path: Path, entry: str) -> None:
    folder, target = tmp_path / "database" / "d", tmp_path / "target"
    folder.mkdir(parents=True)
    target.write_bytes(bytes(1 << 20))
    if entry == "a link":
        (folder / "x").symlink_to(target)
    elif entry == "a folder":
        (folder / "x").mkdir()
    else:
        os.mkfifo(folder / "x")
    with target.open("rb") as file:
        os.fsync(file.fileno())
    release_pages(str(folder.parent))
    assert cached_bytes(target) == 1 << 20
