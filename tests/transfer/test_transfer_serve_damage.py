"""One damaged process directory on a served ramdisk: the others are served, and nothing leaks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from served_tiers import later, open_tier, save_shards
from transfer_support import RUN_ID

from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk


def link_to_nothing(place: Path, name: str) -> None:
    (place / name).unlink(missing_ok=True)
    (place / name).symlink_to("/nowhere")


def link_to_itself(place: Path, name: str) -> None:
    (place / name).unlink(missing_ok=True)
    (place / name).symlink_to(name)


def folder(place: Path, name: str) -> None:
    (place / name).unlink(missing_ok=True)
    (place / name).mkdir()


def pipe(place: Path, name: str) -> None:
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)


def nothing(place: Path, name: str) -> None:
    (place / name).unlink(missing_ok=True)


DAMAGES = [link_to_nothing, link_to_itself, folder, pipe, nothing]
NAMES = ["reader.lock", "slot_00.manifest.json", "slot_00.bin", "ledger.json", "host_state"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_reader_of_damaged_directory_serves_the_others(
    ramdisk: Path,
    damage: Callable[[Path, str], None],
    name: str,
) -> None:
    first, second = open_tier(ramdisk, process_index=0), open_tier(ramdisk, process_index=1)
    save_shards(first, later(1), [b"lost"])
    digest = save_shards(second, later(1), [b"served"])
    first.close()
    second.close()
    place = ramdisk / RUN_ID / "process_00000"
    if (place / name).is_dir():
        shutil.rmtree(place / name)
    damage(place, name)
    reader = ReadOnlyRamdisk(ramdisk, RUN_ID)
    try:
        assert digest in [held.digest for held in reader.inventory().tensors]
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            assert digest in [held.digest for held in reader.inventory().tensors]
            assert reader.contents_bytes(digest) is not None
            assert reader.host_state_bytes(later(1), 0, 2) is None
        assert len(os.listdir("/proc/self/fd")) == descriptors
    finally:
        reader.close()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["directory", "document"])
def test_reader_of_damaged_host_states_serves_the_others(
    ramdisk: Path,
    damage: Callable[[Path, str], None],
    name: str,
) -> None:
    tier = open_tier(ramdisk, process_index=0)
    digest = save_shards(tier, later(1), [b"served"])
    tier.close()
    save_name = f"{later(1).incarnation}-1"
    place = ramdisk / RUN_ID / "process_00000" / "host_state"
    if name == "directory":
        place.mkdir(exist_ok=True)
        damage(place, save_name)
    else:
        place = place / save_name
        place.mkdir(parents=True, exist_ok=True)
        damage(place, "process_00000_of_00002.json")
    reader = ReadOnlyRamdisk(ramdisk, RUN_ID)
    try:
        descriptors = None
        for _ in range(5):
            assert [held.digest for held in reader.inventory().tensors] == [digest]
            assert reader.host_state_bytes(later(1), 0, 2) is None
            descriptors = descriptors or len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) == descriptors
    finally:
        reader.close()
