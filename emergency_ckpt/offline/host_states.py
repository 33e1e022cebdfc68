"""The host states of one save, from ramdisks or from storage, as documents."""

from __future__ import annotations

import os
from collections.abc import Iterable

from emergency_ckpt.core.restore.candidates import filter_inventory
from emergency_ckpt.core.restore.host_state_plan import choose_host_states
from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.errors import CorruptData, HostStateError
from emergency_ckpt.state.host_state import decode, document_name
from emergency_ckpt.survey.places import Places
from emergency_ckpt.survey.ramdisk import ProcessFolder
from emergency_ckpt.tiers import files
from emergency_ckpt.tiers.local.host_state_store import read_file, save_directory
from emergency_ckpt.tiers.local.signatures import Signer
from emergency_ckpt.tiers.persistent.tier import PersistentTier
from emergency_ckpt.tiers.ramdisk.deletion import HOST_STATE_DIRECTORY
from emergency_ckpt.tiers.ramdisk.ownership import open_process_directory
from emergency_ckpt.types import SaveId


def ram_documents(
    save: SaveId, inventory: Inventory, folders: Iterable[ProcessFolder], places: Places
) -> dict[int, bytes]:
    """Return every process's document of a save, by process index.

    HostStateError when one is held nowhere; CorruptData when no copy of one can be read.
    """
    part = next((p for p in filter_inventory(inventory).saves if p.save == save), None)
    chosen = "no host state is held anywhere" if part is None else choose_host_states(part, 0)
    if isinstance(chosen, str):
        raise HostStateError("read", f"host states of step {save.step}", chosen)
    by_holder = {folder.holder.holder: folder for folder in folders}
    signer = places.signer(save.run_id)
    return {
        owner: _read(
            save,
            owner,
            chosen.count,
            digest,
            [by_holder[name] for name in names],
            signer,
            places.owner_uid,
        )
        for owner, (digest, names) in chosen.copies.items()
    }


def _read(
    save: SaveId,
    owner: int,
    count: int,
    digest: str,
    folders: list[ProcessFolder],
    signer: Signer | None,
    owner_uid: int | None,
) -> bytes:
    problems: list[str] = []
    for folder in folders:
        try:
            data = _bytes_of(folder, save, document_name(owner, count), signer, owner_uid)
            if decode(data).digest == digest:
                return data
            problems.append(f"{folder.path}: it was replaced")
        except (OSError, CorruptData) as error:
            problems.append(f"{folder.path}: {error}")
    target = f"host state of process {owner} at step {save.step}"
    raise CorruptData("read", target, f"no copy is sound: {'; '.join(problems)}")


def _bytes_of(
    folder: ProcessFolder, save: SaveId, name: str, signer: Signer | None, owner_uid: int | None
) -> bytes:
    dir_fd = open_process_directory(folder.path, owner_uid)
    try:
        parent_fd = files.open_inner(HOST_STATE_DIRECTORY, dir_fd)
        try:
            save_fd = files.open_inner(save_directory(save), parent_fd)
        finally:
            os.close(parent_fd)
    finally:
        os.close(dir_fd)
    try:
        return read_file(save_directory(save), name, save_fd, signer)
    finally:
        os.close(save_fd)


def stored_documents(step: int, digests: tuple[str, ...], places: Places) -> dict[int, bytes]:
    """Return every process's document of a step of ``places.directory``, by process index.

    ``digests``: those of its marker. CorruptData, PersistentTierError.
    """
    tier = PersistentTier(places.directory, timeout_s=places.timeout_s, signing=places.signing())
    return {
        owner: tier.read_document(step, owner, len(digests), digest)
        for owner, digest in enumerate(digests)
    }
