"""The local tier keeps saves whole, in slots that it reuses."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from pathlib import Path

import pytest
from tiers_support import (
    LAYOUT,
    LEAVES,
    RUN_ID,
    W_SHARD,
    assert_whole,
    complete_save,
    document,
    files_of,
    fill,
    held_steps,
    open_tier,
    save_id,
    shard_bytes,
    slot_files,
    write_save,
)

from emergency_ckpt.core.shard_layout import lay_out
from emergency_ckpt.errors import (
    ConfigError,
    CorruptData,
    LocalTierError,
    NotHeld,
    RamdiskFull,
    SlotBusy,
)
from emergency_ckpt.ram import LocalTier, build_contents
from emergency_ckpt.types import SaveId

TWO_SLOTS = {"slot_0.bin", "slot_1.bin"}


def test_two_slots_alternate_for_ever(tier: LocalTier) -> None:
    tier.reserve(LAYOUT.size_bytes)
    for step in range(1, 8):
        digest = complete_save(tier, step)
        assert slot_files(tier) == TWO_SLOTS
        assert step in held_steps(tier)
    assert held_steps(tier) == [6, 7]
    assert_whole(tier, digest, 7)


def test_complete_save_is_never_overwritten(tier: LocalTier) -> None:
    kept = complete_save(tier, 1)
    for step in range(2, 6):  # none of these becomes complete
        write_save(tier, step)
        assert held_steps(tier) == [1, step]
    assert_whole(tier, kept, 1)


def test_saves_in_doubt_leave_no_slot(tier: LocalTier) -> None:
    complete_save(tier, 1)
    write_save(tier, 2)
    tier.protect([save_id(1), save_id(2)])
    with pytest.raises(SlotBusy, match="holds step 1, which must be kept"):
        tier.begin_write(save_id(3), LAYOUT.size_bytes)
    with tier.begin_write(save_id(3), LAYOUT.size_bytes, restores=True):
        assert held_steps(tier) == [1, 2]
    tier.protect([save_id(2)])
    tier.note_complete(save_id(2))
    write_save(tier, 3)
    assert slot_files(tier) < {"slot_0.bin", "slot_1.bin", "slot_2.bin"}


def test_finite_save_is_on_record_while_a_slot_holds_it(ramdisk: Path) -> None:
    tier = open_tier(ramdisk, slots=3)
    write_save(tier, 1)
    tier.note_complete(save_id(1), is_finite=True)
    assert tier.finite == save_id(1)
    for step in (2, 3, 4):
        complete_save(tier, step)
    assert held_steps(tier) == [2, 3, 4]
    assert tier.finite is None


def test_old_manifest_is_gone_before_a_byte_is_written(tier: LocalTier) -> None:
    write_save(tier, 1)
    write_save(tier, 2)
    tier.protect([save_id(2)])
    with tier.begin_write(save_id(3), LAYOUT.size_bytes) as writer:
        assert held_steps(tier) == [2]
        assert len([name for name in files_of(tier) if "manifest" in name]) == 1
        fill(writer, save_id(3))
    assert held_steps(tier) == [2]


def test_second_writer_finds_no_slot(tier: LocalTier) -> None:
    complete_save(tier, 1)
    writer = tier.begin_write(save_id(2), LAYOUT.size_bytes)
    with pytest.raises(SlotBusy, match="being written"):
        tier.begin_write(save_id(3), LAYOUT.size_bytes)
    writer.abort()


def test_what_is_not_published_does_not_count(ramdisk: Path, tier: LocalTier) -> None:
    writer = tier.begin_write(save_id(1), LAYOUT.size_bytes)
    writer.stage(fill(writer, save_id(1)))
    assert held_steps(tier) == []
    writer.abort()
    writer.abort()
    with pytest.raises(LocalTierError, match="published or aborted"):
        writer.publish()
    assert not any(name.startswith(".tmp") for name in files_of(tier))


def test_stage_refuses_what_is_not_this_save(tier: LocalTier) -> None:
    with tier.begin_write(save_id(1), LAYOUT.size_bytes) as writer:
        contents = fill(writer, save_id(1))
        with pytest.raises(CorruptData, match="another save"):
            writer.stage(build_contents(save_id(2), LEAVES, LAYOUT, [0] * len(LAYOUT.shards)))
        huge = lay_out(LEAVES, [(LAYOUT.shards[0].shard, LAYOUT.shards[0].nbytes)])
        moved = build_contents(save_id(1), LEAVES, huge, [0])
        far = type(moved.shards[0])(**{**_fields(moved.shards[0]), "offset": 1 << 20})
        with pytest.raises(CorruptData, match="do not fit"):
            writer.stage(type(moved)(save=moved.save, leaves=moved.leaves, shards=(far,)))
        writer.stage(contents)
        with pytest.raises(LocalTierError, match="staged already"):
            writer.copy([(b"", 0)])
        writer.publish()
    assert held_steps(tier) == [1]


def _fields(entry: object) -> dict[str, object]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}  # type: ignore[attr-defined]


def test_save_of_another_run_is_refused(tier: LocalTier) -> None:
    with pytest.raises(LocalTierError, match="another run"):
        tier.begin_write(save_id(1, run_id="other"), 0)


def test_saves_survive_the_next_life(ramdisk: Path, tier: LocalTier) -> None:
    first, second = complete_save(tier, 1), complete_save(tier, 2)
    inodes = {(tier.path / name).stat().st_ino for name in TWO_SLOTS}
    tier.close()
    tier.close()
    again = open_tier(ramdisk)
    assert again.path == tier.path
    assert held_steps(again) == [1, 2]
    assert again.held()[2] == save_id(2)
    assert_whole(again, first, 1)
    assert_whole(again, second, 2)
    gc.collect()
    again.protect([save_id(2)])
    complete_save(again, 3)
    assert {(tier.path / name).stat().st_ino for name in TWO_SLOTS} == inodes
    assert again.quarantined == ()


def test_every_save_found_is_protected_until_restore_has_decided(ramdisk: Path) -> None:
    tier = open_tier(ramdisk)
    complete_save(tier, 1)
    write_save(tier, 2)
    tier.close()
    again = open_tier(ramdisk)
    with pytest.raises(SlotBusy):
        again.begin_write(save_id(2, "019b"), LAYOUT.size_bytes)
    again.protect([save_id(2)])
    again.begin_write(save_id(3, "019b"), LAYOUT.size_bytes).abort()
    assert held_steps(again) == [2]


def test_empty_state_has_slots_too(tier: LocalTier) -> None:
    tier.reserve(0)
    assert slot_files(tier) == TWO_SLOTS
    save = save_id(1)
    writer = tier.begin_write(save, 0)
    assert writer.copy([]) == []
    digest = writer.stage(build_contents(save, LEAVES, lay_out(LEAVES, []), []))
    writer.publish()
    assert tier.verify(digest, []) == []
    with tier.mapping_for(digest) as (_, contents):
        assert contents.shards == ()


def test_reserve_is_idempotent_grows_and_keeps_what_is_published(tier: LocalTier) -> None:
    tier.reserve(10_000)
    digest = write_save(tier, 1)
    tier.reserve(10_000)
    tier.reserve(100_000)
    sizes = {path.name: path.stat().st_size for path in tier.path.glob("slot_?.bin")}
    assert sizes == dict.fromkeys(TWO_SLOTS, 102_400)
    assert all(p.stat().st_blocks * 512 >= 102_400 for p in tier.path.glob("slot_?.bin"))
    assert_whole(tier, digest, 1)
    tier.reserve(1)
    assert {p.stat().st_size for p in tier.path.glob("slot_?.bin")} == {102_400}


def test_free_slot_that_earlier_life_left_too_large_is_made_anew(ramdisk: Path) -> None:
    tier = open_tier(ramdisk)
    tier.reserve(1 << 20)
    digest = complete_save(tier, 1)
    tier.close()
    again = open_tier(ramdisk)
    again.reserve(LAYOUT.size_bytes)
    sizes = sorted(path.stat().st_size for path in again.path.glob("slot_?.bin"))
    assert sizes == [12288, 1 << 20]
    assert_whole(again, digest, 1)


def test_slot_that_is_too_small_grows_when_it_is_written(tier: LocalTier) -> None:
    tier.reserve(1)
    digest = write_save(tier, 1)
    assert_whole(tier, digest, 1)


def test_prefault_changes_no_byte(tier: LocalTier) -> None:
    tier.reserve(1 << 20)
    digest = write_save(tier, 1)
    tier.prefault_in_background()
    tier.prefault_in_background()
    second = write_save(tier, 2)
    tier.close()  # joins
    again = open_tier(tier.path.parent.parent)
    assert_whole(again, digest, 1)
    assert_whole(again, second, 2)


def test_invalidate_newer_takes_out_what_must_not_look_newer(tier: LocalTier) -> None:
    write_save(tier, 35)
    write_save(tier, 40)
    tier.publish_host_state(save_id(35), 0, 4, document(35))
    tier.publish_host_state(save_id(40), 0, 4, document(40))
    tier.invalidate_newer(save_id(35))
    tensors, host_states, _ = tier.held()
    assert [held.save.step for held in tensors] == [35]
    assert [held.save.step for held in host_states] == [35]
    tier.invalidate_newer(save_id(35, "000000000002-second"))
    assert tier.held()[:2] == ((), ())


def test_restore_takes_back_what_was_known_to_be_complete(ramdisk: Path, tier: LocalTier) -> None:
    complete_save(tier, 40)

    def known_after(than: SaveId) -> SaveId | None:
        nonlocal tier
        tier.invalidate_newer(than)
        known = tier.held()[2]
        tier.close()
        tier = open_tier(ramdisk)
        assert tier.held()[2] == known
        return known

    assert known_after(save_id(45)) == save_id(40)
    assert known_after(save_id(40)) == save_id(40)
    assert known_after(save_id(40, "000000000002-second")) == save_id(40, "000000000002-second")
    assert known_after(save_id(35)) == save_id(35)
    assert known_after(SaveId(30, "", RUN_ID)) is None  # of the persistent tier


def test_note_complete_prunes_host_states_of_older_saves(tier: LocalTier) -> None:
    for step in (1, 2, 3):
        tier.publish_host_state(save_id(step), 0, 4, document(step))
    tier.note_complete(save_id(2))
    assert [held.save.step for held in tier.held()[1]] == [2, 3]


def test_host_states_stay_as_long_as_their_tensors(tier: LocalTier) -> None:
    for step in (1, 2):
        write_save(tier, step)
        tier.publish_host_state(save_id(step), 0, 4, document(step))
        tier.note_complete(save_id(step))
    assert [held.save.step for held in tier.held()[1]] == [1, 2]
    write_save(tier, 3)  # into the slot of step 1
    tier.publish_host_state(save_id(3), 0, 4, document(3))
    tier.note_complete(save_id(3))
    assert [held.save.step for held in tier.held()[1]] == [2, 3]


@pytest.mark.parametrize("run_id", ["", ".hidden", "a/b", "..", "x" * 129, "a b", "a\n"])
def test_run_id_is_a_plain_name(ramdisk: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        open_tier(ramdisk, run_id=run_id)


def test_what_is_not_a_directory_is_an_error(ramdisk: Path) -> None:
    (ramdisk / "file").write_text("")
    with pytest.raises(LocalTierError, match="file"):
        open_tier(ramdisk / "file")


def test_readers_and_pushes_go_on_while_a_save_is_written(tier: LocalTier) -> None:
    """Threads of a server read and push while another saves: nothing torn, nothing lost."""
    failures: list[BaseException] = []
    done = threading.Event()

    def serve() -> None:
        try:
            while not done.is_set():
                for held in tier.held()[0]:
                    try:
                        assert tier.verify(held.digest, range(6)) == []
                        with tier.mapping_for(held.digest) as (mapping, contents):
                            entry = contents.shards[W_SHARD]
                            view = mapping.view(entry.offset, entry.nbytes, None)
                            assert view.tobytes() == shard_bytes(held.save.step)[W_SHARD]
                    except NotHeld:
                        continue  # reused meanwhile
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    def push(owner: int) -> None:
        try:
            for step in range(1, 40):
                save = save_id(step)
                tier.publish_host_state(save, owner, 4, document(step, owner))
        except RamdiskFull:
            pass  # so far behind that the store holds newer saves only
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    threads += [threading.Thread(target=push, args=(owner,)) for owner in (1, 2, 3)]
    for thread in threads:
        thread.start()
    step, deadline_s = 0, time.monotonic() + 60
    while step < 40 and time.monotonic() < deadline_s:
        with contextlib.suppress(SlotBusy):
            complete_save(tier, step + 1)
            step += 1
    done.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert step == 40
    assert max(held_steps(tier)) == 40
