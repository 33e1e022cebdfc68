"""Small files of the ramdisk with a secret: what is not signed with it is named, never used."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from forgery import canonical, inner, make_up_step, resealed, write, write_inside
from tiers_support import (
    LAYOUT,
    RUN_ID,
    assert_whole,
    complete_save,
    document,
    held_steps,
    open_tier,
    save_id,
    write_save,
)

from emergency_ckpt.core.keys import RunSecret
from emergency_ckpt.core.timeline import Ancestor, Timeline
from emergency_ckpt.errors import CorruptData, NotSigned
from emergency_ckpt.ram import LocalTier, Signer
from emergency_ckpt.ram.signatures import check_believed, open_signed, signed
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk


def signer_of(secret: bytes, run_id: str = RUN_ID) -> Signer:
    made = Signer.of(RunSecret(run_id, secret, given=True))
    assert made is not None
    return made


SIGNER, OTHER = signer_of(b"5e" * 32), signer_of(b"5f" * 32)
HOST_STATE = "host_state/000000000001-first-2/process_00000_of_00004.json"


def leave(ramdisk: Path, signer: Signer | None = SIGNER) -> tuple[Path, list[str]]:
    """A life that saved steps 1 and 2; its directory, and the digests of both."""
    tier = open_tier(ramdisk, signer=signer)
    tier.reserve(LAYOUT.size_bytes)
    digests: list[str] = []
    for step in (1, 2):
        digests.append(write_save(tier, step))
        tier.publish_host_state(save_id(step), 0, 4, document(step))
    tier.note_complete(save_id(2))
    tier.follow(Timeline("000000000002-next", 2, (Ancestor("000000000001-first", 2),), 0))
    tier.close()
    return tier.path, digests


def problems(tier: LocalTier) -> str:
    return "\n".join(f"{record.name}: {record.problem}" for record in tier.quarantined)


def test_signer_of_a_made_up_secret_is_none() -> None:
    assert Signer.of(RunSecret(RUN_ID, b"5e" * 32, given=False)) is None


def test_signed_files_are_read_by_the_next_life(ramdisk: Path) -> None:
    path, digests = leave(ramdisk)
    assert all(b'"mac":"' in file.read_bytes() for file in path.rglob("*.json"))
    with closing(open_tier(ramdisk, signer=SIGNER)) as tier:
        assert held_steps(tier) == [1, 2]
        assert [held.save.step for held in tier.held()[1]] == [1, 2]
        assert tier.held()[2] == save_id(2)
        assert tier.timeline is not None
        assert tier.host_state_bytes(save_id(2), 0, 4) == document(2)
        assert_whole(tier, digests[1], 2)
        assert tier.quarantined == ()


def altered_manifest(path: Path) -> None:
    manifest = path / "slot_1.manifest.json"
    file = inner(manifest)
    file["manifest"]["contents"]["save"]["step"] = 1_000_000
    write_inside(manifest, resealed(file))


def altered_crc(path: Path) -> None:
    manifest = path / "slot_1.manifest.json"
    file = inner(manifest)
    file["manifest"]["contents"]["shards"][-1]["crc32c"] ^= 1
    write_inside(manifest, resealed(file))


def swapped_manifests(path: Path) -> None:
    (path / "slot_1.manifest.json").write_bytes((path / "slot_0.manifest.json").read_bytes())


def altered_host_state(path: Path) -> None:
    file = inner(path / HOST_STATE)
    write_inside(path / HOST_STATE, {**file, "count": 4, "writer": 1} | {"owner": 0})


def swapped_host_states(path: Path) -> None:
    first = path / "host_state/000000000001-first-1/process_00000_of_00004.json"
    (path / HOST_STATE).write_bytes(first.read_bytes())


def altered_chain(path: Path) -> None:
    data = (path / "ledger.json").read_bytes()
    (path / "ledger.json").write_bytes(data.replace(b"1-first", b"1-fault"))


def altered_complete(path: Path) -> None:
    ledger = inner(path / "ledger.json")["ledger"]
    ledger["complete"]["step"] = 1_000_000
    digest = hashlib.sha256(canonical(ledger)).hexdigest()
    write_inside(path / "ledger.json", {"format": 1, "digest": digest, "ledger": ledger})


DAMAGE: dict[str, Callable[[Path], None]] = {
    "slot_1.manifest.json": altered_manifest,
    "slot_1.manifest.json ": altered_crc,
    "slot_1.manifest.json  ": swapped_manifests,
    f"{HOST_STATE.removeprefix('host_state/')}": altered_host_state,
    f"{HOST_STATE.removeprefix('host_state/')} ": swapped_host_states,
    "ledger.json": altered_chain,
    "ledger.json ": altered_complete,
}


@pytest.mark.parametrize("name", DAMAGE, ids=[damage.__name__ for damage in DAMAGE.values()])
def test_altered_file_is_damage_and_named(ramdisk: Path, name: str) -> None:
    path, _ = leave(ramdisk)
    DAMAGE[name](path)
    with closing(open_tier(ramdisk, signer=SIGNER)) as tier:
        assert problems(tier).startswith(f"{name.strip()}: ")
        assert problems(tier).count("signature is wrong: the file was changed") == 1
        assert held_steps(tier) == ([1] if "slot_1" in name else [1, 2])
        states = [held.save.step for held in tier.held()[1]]
        assert states == ([1] if "process_" in name else [1, 2])
        assert (tier.timeline is None) is (name.strip() == "ledger.json")
        assert (tier.held()[2] is None) is (name.strip() == "ledger.json")


@pytest.mark.parametrize(
    ("before", "reason"),
    [(None, "it is not signed"), (OTHER, "it was signed with another secret")],
    ids=["an earlier version", "another secret"],
)
def test_steps_not_of_this_secret_are_named_and_stay(
    ramdisk: Path, before: Signer | None, reason: str
) -> None:
    """Restored again by a start with the right secret; overwritten by the next save."""
    _, digests = leave(ramdisk, before)
    with closing(open_tier(ramdisk, signer=SIGNER)) as tier:
        assert held_steps(tier) == []
        assert tier.held()[1] == ()
        assert problems(tier).count(reason) == 5
        # Not a fresh start: a job that asks for its newest step is told of this one.
        assert tier.held()[2] == save_id(2)
        assert tier.host_state_bytes(save_id(2), 0, 4) is None
    with closing(open_tier(ramdisk, signer=before)) as tier:
        assert held_steps(tier) == [1, 2]
        assert_whole(tier, digests[1], 2)
    with closing(open_tier(ramdisk, signer=SIGNER)) as tier:
        tier.reserve(LAYOUT.size_bytes)
        complete_save(tier, 3)
        tier.publish_host_state(save_id(3), 0, 4, document(3))
        complete_save(tier, 4)
        assert len(list(tier.path.glob("slot_*.bin"))) == 2
        (documents,) = (tier.path / "host_state").iterdir()
        assert documents.name == "000000000001-first-3"
    with closing(open_tier(ramdisk, signer=SIGNER)) as tier:
        assert held_steps(tier) == [3, 4]
        assert tier.quarantined == ()


def test_signed_steps_without_a_secret_are_taken(ramdisk: Path) -> None:
    """As all that lies there: whoever gives no secret asks for no proof."""
    _, digests = leave(ramdisk)
    with closing(open_tier(ramdisk)) as tier:
        assert held_steps(tier) == [1, 2]
        assert_whole(tier, digests[1], 2)
        assert tier.host_state_bytes(save_id(2), 0, 4) == document(2)


def test_orphan_of_another_secret_is_not_offered(ramdisk: Path) -> None:
    leave(ramdisk, OTHER)
    shutil.move(ramdisk / RUN_ID / "process_00000", ramdisk / RUN_ID / "process_00003")
    with closing(open_tier(ramdisk, signer=SIGNER, process_index=1)) as tier:
        write_save(tier, 3)
        tier.adopt_orphans()
        assert 1_000_000 not in held_steps(tier)
        assert held_steps(tier) in ([3], [])


def test_host_state_changed_under_a_live_job_is_not_read(ramdisk: Path) -> None:
    with closing(open_tier(ramdisk, signer=SIGNER)) as tier:
        tier.publish_host_state(save_id(2), 0, 4, document(2))
        write_inside(tier.path / HOST_STATE, inner(tier.path / HOST_STATE) | {"owner": 0, "x": 1})
        assert tier.host_state_bytes(save_id(2), 0, 4) is None
        write(tier.path / HOST_STATE, {"not": "signed"})
        assert tier.host_state_bytes(save_id(2), 0, 4) is None


def test_serve_offers_signed_steps_alone(ramdisk: Path) -> None:
    path, _ = leave(ramdisk)
    make_up_step(path, 1_000_000)
    with closing(ReadOnlyRamdisk(ramdisk, RUN_ID, signer=SIGNER)) as reader:
        inventory = reader.inventory()
        assert [held.save.step for held in inventory.tensors] == [1, 2]
        assert [held.save.step for held in inventory.host_states] == [1, 2]
        assert reader.host_state_bytes(save_id(2), 0, 4) == document(2)
    with closing(ReadOnlyRamdisk(ramdisk, RUN_ID, signer=OTHER)) as reader:
        assert reader.inventory().tensors == ()
        assert reader.host_state_bytes(save_id(2), 0, 4) is None


def test_open_signed_with_any_byte_changed_gives_nothing_else() -> None:
    data = signed("name", b'{"a":1}', SIGNER)
    assert open_signed("name", data, SIGNER) == (b'{"a":1}', "")
    for position in range(len(data)):
        for bit in range(8):
            changed = data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]
            with pytest.raises(CorruptData):
                check_believed("name", open_signed("name", changed, SIGNER)[1])
    for name, signer in (("other", SIGNER), ("name", signer_of(b"5e" * 32, "another-run"))):
        with pytest.raises((CorruptData, NotSigned)):
            check_believed(name, open_signed(name, data, signer)[1])


@pytest.mark.parametrize("signer", [None, SIGNER], ids=["no secret", "a secret"])
def test_open_signed_of_another_format_raises(signer: Signer | None) -> None:
    data = signed("name", b'{"a":1}', SIGNER)
    assert b'"format":1,' in data
    with pytest.raises(CorruptData, match="unknown format"):
        open_signed("name", data.replace(b'"format":1,', b'"format":2,'), signer)


def test_file_with_a_signature_cut_out_is_damaged(ramdisk: Path) -> None:
    """What has the field ``file`` is signed, so it is no unsigned file."""
    path, _ = leave(ramdisk)
    manifest = path / "slot_1.manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data[: data.rindex(b',"key":')] + b"}")
    with closing(open_tier(ramdisk)) as tier:
        assert held_steps(tier) == [1]
        assert problems(tier).startswith("slot_1.manifest.json: ")
