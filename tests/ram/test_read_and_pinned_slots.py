"""Slots that are pinned, read, verified or quarantined while saves go on."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from damage import flip
from tiers_support import (
    LAYOUT,
    LEAVES,
    SHARDS,
    W_SHARD,
    assert_whole,
    complete_save,
    document,
    fill,
    held_steps,
    open_tier,
    pinned_save,
    save_id,
    shard_bytes,
    shard_here,
    slot_files,
    write_save,
)

from emergency_ckpt import _native
from emergency_ckpt.core.shard_layout import lay_out
from emergency_ckpt.errors import (
    NotHeld,
    SlotBusy,
)
from emergency_ckpt.ram import LocalTier, build_contents

PLACE = LAYOUT.shards[W_SHARD]


def test_pinned_slot_is_not_written_and_saves_go_on_beside_it(tier: LocalTier) -> None:
    tier.plan_saves(0, writes_storage=True)
    tier.reserve(LAYOUT.size_bytes)
    assert len(slot_files(tier)) == 3
    _, pin = pinned_save(tier, 1)
    assert tier.may_stay_pinned()
    for step in range(2, 7):
        complete_save(tier, step)
    assert 1 in held_steps(tier)
    assert pin.view(PLACE.offset, PLACE.nbytes).tobytes() == shard_bytes(1)[W_SHARD]
    _, second = pinned_save(tier, 7)
    assert not tier.may_stay_pinned(), "one slot is left, and a save needs two"
    second.end()
    pin.end()
    for step in range(8, 11):
        complete_save(tier, step)
    assert held_steps(tier) == [8, 9, 10]
    assert len(slot_files(tier)) == 3


@pytest.mark.dear
def test_slot_is_pinned_until_the_last_of_many_views_is_gone(tier: LocalTier) -> None:
    tier.plan_saves(0, writes_storage=True)
    _, pin = pinned_save(tier, 1)
    views = [pin.view(placed.offset, placed.nbytes) for placed in LAYOUT.shards]
    assert [view.tobytes() for view in views] == shard_bytes(1)
    assert not any(view.flags.writeable for view in views)
    assert all(view.ctypes.data % 64 == 0 for view in views if view.nbytes)
    part = views[W_SHARD][8:]
    del views, pin
    gc.collect()
    for step in range(2, 6):
        complete_save(tier, step)
    assert 1 in held_steps(tier)
    assert part.tobytes() == shard_bytes(1)[W_SHARD][8:]
    del part
    gc.collect()
    for step in range(6, 9):
        complete_save(tier, step)
    assert held_steps(tier) == [6, 7, 8]


def test_pinned_memory_is_safe_beside_the_next_tier(ramdisk: Path, tier: LocalTier) -> None:
    """A write that was given up may read for longer than its checkpointer lives."""
    _, pin = pinned_save(tier, 1)
    view = pin.view(PLACE.offset, PLACE.nbytes)
    tier.close()
    again = open_tier(ramdisk)
    assert again.path == tier.path
    assert held_steps(again) == [1]
    again.protect([])
    for step in range(2, 6):
        complete_save(again, step)
    assert view.nbytes == len(view.tobytes())


def test_views_may_die_in_any_collection_of_any_thread(tier: LocalTier) -> None:
    """Views in reference cycles end in whatever thread collects, with whatever lock it holds."""
    tier.plan_saves(0, writes_storage=True)
    tier.reserve(LAYOUT.size_bytes)
    with tier.begin_write(save_id(1), LAYOUT.size_bytes) as writer:
        writer.stage(fill(writer, save_id(1)))
        pins = [writer.pin() for _ in range(3000)]
        writer.publish()
    tier.note_complete(save_id(1))

    def drop() -> None:
        while pins:
            try:
                cycle: list[object] = [pins.pop().view(PLACE.offset, PLACE.nbytes)]
            except IndexError:  # another thread took the last one
                return
            cycle.append(cycle)

    threshold = gc.get_threshold()
    gc.set_threshold(5)
    threads = [threading.Thread(target=drop, daemon=True) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for step in range(2, 100):
            write_save(tier, step)  # step 1 stays the complete one
            tier.held()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    for step in range(100, 103):
        complete_save(tier, step)
    assert held_steps(tier) == [100, 101, 102]


def test_slot_that_a_peer_reads_is_not_reused(tier: LocalTier) -> None:
    first = write_save(tier, 1)
    second = write_save(tier, 2)
    tier.protect([save_id(2)])
    with tier.mapping_for(first) as (mapping, contents):
        with pytest.raises(SlotBusy, match="being written or read"):
            tier.begin_write(save_id(3), LAYOUT.size_bytes)
        entry = contents.shards[W_SHARD]
        assert mapping.view(entry.offset, entry.nbytes, None).tobytes() == shard_bytes(1)[W_SHARD]
    write_save(tier, 3)
    with pytest.raises(NotHeld), tier.mapping_for(first):
        pass
    assert tier.contents(first) is None
    assert tier.contents_bytes(first) is None
    assert_whole(tier, second, 2)


def test_slot_that_a_restore_reads_is_not_reused(tier: LocalTier) -> None:
    first, second = write_save(tier, 1), write_save(tier, 2)
    tier.protect([save_id(2)])
    with tier.reading(first) as view:
        data = view(W_SHARD)
        assert not data.flags.writeable
        assert data.ctypes.data % 64 == 0
        with pytest.raises(SlotBusy, match="being written or read"):
            tier.begin_write(save_id(3), LAYOUT.size_bytes)
        assert data.tobytes() == shard_bytes(1)[W_SHARD]
    write_save(tier, 3)
    with pytest.raises(NotHeld), tier.reading(first):
        pass
    assert_whole(tier, second, 2)


def test_verify_names_the_shards_that_changed(ramdisk: Path, tier: LocalTier) -> None:
    digest = write_save(tier, 1)
    contents = tier.contents(digest)
    assert contents is not None
    flip(tier.path / "slot_0.bin", contents.shards[5].offset + 7)
    bad = tier.verify(digest, range(6))
    assert [shard for shard, _ in bad] == [5]
    assert bad[0][1] != contents.shards[5].crc32c
    tier.quarantine(digest, 5, "CRC32C differs")
    assert tier.damaged() == {digest: (5,)}
    with pytest.raises(NotHeld, match="quarantined"):
        shard_here(tier, digest, 5)
    assert shard_here(tier, digest, W_SHARD) == shard_bytes(1)[W_SHARD]
    with pytest.raises(NotHeld, match="no such shard"):
        shard_here(tier, digest, 6)
    assert held_steps(tier) == [1]
    tier.quarantine(digest, None, "no more")
    assert held_steps(tier) == []
    assert len(list((tier.path / "quarantine").iterdir())) == 2
    with pytest.raises(NotHeld, match="no such shard"):
        tier.verify(write_save(tier, 2), [6])


def test_quarantine_records_are_bounded(tier: LocalTier) -> None:
    for number in range(150):
        tier.quarantine(f"{number:064x}", None, "x" * 5000)
    records = list((tier.path / "quarantine").iterdir())
    assert len(records) == 64
    assert max(path.stat().st_size for path in records) < 2000


def test_slot_written_anew_has_no_damage_of_its_former_save(tier: LocalTier) -> None:
    old = write_save(tier, 1)
    tier.quarantine(old, 0, "damaged")
    tier.quarantine(old, None, "no more")
    new = write_save(tier, 2)
    assert [path.name for path in tier.path.glob("slot_?.bin")] == ["slot_0.bin"]
    assert new not in tier.damaged()
    assert tier.verify(new, [0]) == []
    assert shard_here(tier, new, 0) == shard_bytes(2)[0]


def test_mended_copy_of_one_digest_is_the_one_that_is_read(tier: LocalTier) -> None:
    digest = write_save(tier, 1)
    tier.quarantine(digest, 0, "damaged")
    assert write_save(tier, 1) == digest
    assert digest not in tier.damaged()
    assert tier.verify(digest, [0]) == []
    assert shard_here(tier, digest, 0) == shard_bytes(1)[0]


def damage(tier: LocalTier, digest: str, slot: int, shard: int) -> None:
    contents = tier.contents(digest)
    assert contents is not None
    flip(tier.path / f"slot_{slot}.bin", contents.shards[shard].offset)


def manifests(tier: LocalTier) -> set[str]:
    return {path.name for path in tier.path.glob("slot_*.manifest.json")}


def write_again(tier: LocalTier, step: int) -> str:
    """Publish a save once more, beside what is there, as a restore does."""
    tier.protect([save_id(step)])
    with tier.begin_write(save_id(step), LAYOUT.size_bytes, restores=True) as writer:
        digest = writer.stage(fill(writer, save_id(step)))
        writer.publish()
    return digest


def test_mended_copy_is_the_one_that_the_next_life_finds(ramdisk: Path, tier: LocalTier) -> None:
    digest = write_save(tier, 1)
    damage(tier, digest, 0, W_SHARD)
    assert [shard for shard, _ in tier.verify(digest, range(6))] == [W_SHARD]
    tier.quarantine(digest, W_SHARD, "CRC32C differs")
    assert write_again(tier, 1) == digest
    assert manifests(tier) == {"slot_1.manifest.json"}
    tier.close()
    again = open_tier(ramdisk)
    assert_whole(again, digest, 1)


def test_crash_before_the_damaged_slot_is_dropped_costs_nothing(ramdisk: Path) -> None:
    tier = open_tier(ramdisk)
    digest = write_save(tier, 1)
    damage(tier, digest, 0, W_SHARD)
    manifest = tier.path / "slot_0.manifest.json"
    shutil.copy2(manifest, ramdisk / "kept")
    tier.verify(digest, range(6))
    write_again(tier, 1)
    tier.close()
    shutil.copy2(ramdisk / "kept", manifest)  # as if it had ended between the two
    again = open_tier(ramdisk)
    assert_whole(again, digest, 1)
    assert manifests(again) == {"slot_1.manifest.json"}


def with_two_copies(ramdisk: Path) -> tuple[LocalTier, str]:
    """Return a tier with a save in its own directory, damaged, and in one that it adopted."""
    orphan, tier = open_tier(ramdisk, process_index=1), open_tier(ramdisk)
    digest = write_save(orphan, 1)
    orphan.close()
    assert write_save(tier, 1) == digest
    tier.adopt_orphans()
    damage(tier, digest, 0, W_SHARD)
    return tier, digest


def test_damage_of_one_copy_leaves_another_of_its_digest(ramdisk: Path) -> None:
    tier, digest = with_two_copies(ramdisk)
    assert tier.verify(digest, range(6)) == []
    assert_whole(tier, digest, 1)


def test_each_shard_is_read_from_the_copy_in_which_it_is_sound(ramdisk: Path) -> None:
    tier, digest = with_two_copies(ramdisk)
    orphan = next(ramdisk.rglob("process_00001*/slot_0.bin"))
    contents = tier.contents(digest)
    assert contents is not None
    flip(orphan, contents.shards[0].offset)
    for shard in (W_SHARD, 0):  # each is asked of the copy with fewer damaged shards
        assert tier.verify(digest, [shard]) == []
    assert_whole(tier, digest, 1)


def test_peer_reads_the_sound_one_of_two_copies(ramdisk: Path) -> None:
    """It asks for a digest, and nobody here has read either copy before."""
    tier, digest = with_two_copies(ramdisk)
    with tier.mapping_for(digest) as (mapping, contents):
        for entry in contents.shards:
            assert _native.crc32c(mapping.view(entry.offset, entry.nbytes, None)) == entry.crc32c


def cut(path: Path) -> None:
    """Make a file one byte shorter, so that a read of the slot does not end the tests by SIGBUS."""
    os.truncate(path, path.stat().st_size - 1)


def test_cut_copy_leaves_another_of_its_digest(ramdisk: Path) -> None:
    """The cut one has other bytes, which nobody compares any more."""
    tier, digest = with_two_copies(ramdisk)
    cut(tier.path / "slot_0.bin")
    assert_whole(tier, digest, 1)
    with tier.mapping_for(digest) as (mapping, contents):
        for entry in contents.shards:
            assert _native.crc32c(mapping.view(entry.offset, entry.nbytes, None)) == entry.crc32c


def test_cut_copy_without_damage_does_not_hide_that_of_another(ramdisk: Path) -> None:
    tier, digest = with_two_copies(ramdisk)
    tier.verify(digest, range(6))
    cut(next(ramdisk.rglob("process_00001*/slot_0.bin")))
    assert tier.damaged() == {digest: (W_SHARD,)}


def test_slot_that_was_cut_is_not_read(tier: LocalTier) -> None:
    digest = write_save(tier, 1)
    assert tier.verify(digest, range(6)) == []
    cut(tier.path / "slot_0.bin")
    for give in (tier.reading, tier.mapping_for):
        with pytest.raises(NotHeld, match="somebody cut"), give(digest):
            pass


def write_part(tier: LocalTier, step: int) -> str:
    """Publish two of the shards of a save, beside what is there."""
    some, data = lay_out(LEAVES, SHARDS[:2]), shard_bytes(step)
    tier.protect([save_id(step)])
    with tier.begin_write(save_id(step), some.size_bytes, restores=True) as writer:
        copies = [(data[W_SHARD + n], placed.offset) for n, placed in enumerate(some.shards)]
        crcs = writer.copy(copies)
        digest = writer.stage(build_contents(save_id(step), LEAVES, some, crcs))
        writer.publish()
    return digest


def test_slot_with_more_than_a_later_one_is_found_again(ramdisk: Path, tier: LocalTier) -> None:
    whole, part = write_save(tier, 1), write_part(tier, 1)
    tier.close()
    again = open_tier(ramdisk)
    assert {held.digest for held in again.held()[0]} == {whole, part}
    assert_whole(again, whole, 1)


def test_slot_with_less_than_a_later_one_is_not_found_again(ramdisk: Path, tier: LocalTier) -> None:
    part, whole = write_part(tier, 1), write_again(tier, 1)
    assert {held.digest for held in tier.held()[0]} == {whole, part}, "a peer may read it yet"
    tier.close()
    again = open_tier(ramdisk)
    assert {held.digest for held in again.held()[0]} == {whole}
    assert_whole(again, whole, 1)


def test_keep_only_leaves_other_saves(tier: LocalTier) -> None:
    part, whole, other = write_part(tier, 1), write_again(tier, 1), write_save(tier, 2)
    tier.keep_only(save_id(1), "0" * 64)
    assert {held.digest for held in tier.held()[0]} == {part, whole, other}
    tier.keep_only(save_id(1), whole)
    assert {held.digest for held in tier.held()[0]} == {whole, other}


def test_document_from_a_peer_leaves_a_write_its_slot(
    tier: LocalTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the slot of the write grows, and the slot's file was cut just before."""
    complete_save(tier, 1)
    tier.begin_write(save_id(2), 1).abort()  # a small slot, which is free
    (small,) = set(tier.path.glob("slot_*.bin")) - {slot_with(tier, 1)}
    grows, go_on, reserve = threading.Event(), threading.Event(), os.posix_fallocate

    def reserve_slowly(fd: int, offset: int, nbytes: int) -> None:
        grows.set()
        assert go_on.wait(60)
        reserve(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", reserve_slowly)
    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(tier.begin_write, save_id(2), LAYOUT.size_bytes)
        assert grows.wait(60)
        os.truncate(small, 0)
        tier.publish_host_state(save_id(1), 0, 4, document(1))
        go_on.set()
        with write.result(60) as writer:
            writer.stage(fill(writer, save_id(2)))
            writer.publish()
    assert held_steps(tier) == [1, 2]
    assert small.stat().st_size >= LAYOUT.size_bytes


def slot_with(tier: LocalTier, step: int) -> Path:
    """Return the file of the slot that has a step."""
    manifests = tier.path.glob("slot_*.manifest.json")
    (name,) = [path.name for path in manifests if f'"step":{step}' in path.read_text()]
    return tier.path / name.replace(".manifest.json", ".bin")
