"""The host states of one save, from ramdisks or from storage, as documents."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from emergency_ckpt.core.restore.candidates import filter_inventory
from emergency_ckpt.core.restore.host_state_plan import choose_host_states
from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.errors import CorruptData, HostStateError, TransferError
from emergency_ckpt.state.host_state import decode, document_name
from emergency_ckpt.tiers import files
from emergency_ckpt.tiers.local.host_state_store import read_file, save_directory
from emergency_ckpt.tiers.local.signatures import Signer
from emergency_ckpt.tiers.persistent.tier import PersistentTier
from emergency_ckpt.tiers.ramdisk.deletion import HOST_STATE_DIRECTORY
from emergency_ckpt.tiers.ramdisk.ownership import open_process_directory
from emergency_ckpt.tools.offline.ram import OtherHosts
from emergency_ckpt.tools.survey.places import Places
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder
from emergency_ckpt.types import SaveId


def ram_documents(
    save: SaveId,
    inventory: Inventory,
    folders: Iterable[ProcessFolder],
    places: Places,
    others: OtherHosts | None = None,
) -> dict[int, bytes]:
    """Return every process's document of a save, by process index.

    HostStateError when one is held nowhere; CorruptData when no copy of one can be read.
    """
    part = next((p for p in filter_inventory(inventory).saves if p.save == save), None)
    chosen = "no host state is held anywhere" if part is None else choose_host_states(part, 0)
    if isinstance(chosen, str):
        raise HostStateError("read", f"host states of step {save.step}", chosen)
    paths = {folder.holder.holder: folder.path for folder in folders}
    signer = places.signer(save.run_id)

    def bytes_of(path: Path, owner: int) -> bytes:
        if others is not None and others.has(path):
            return others.document(path, save, owner, chosen.count)
        name = document_name(owner, chosen.count)
        return _bytes_of(path, save, name, signer, places.owner_uid)

    documents: dict[int, bytes] = {}
    for owner, (digest, names) in chosen.copies.items():
        problems: list[str] = []
        for path in (paths[name] for name in names):
            try:
                data = bytes_of(path, owner)
                if decode(data).digest == digest:
                    documents[owner] = data
                    break
                problems.append(f"{path}: it was replaced")
            except (OSError, CorruptData, TransferError) as error:
                problems.append(f"{path}: {error}")
        else:
            target = f"host state of process {owner} at step {save.step}"
            raise CorruptData("read", target, f"no copy is sound: {'; '.join(problems)}")
    return documents


def _bytes_of(
    path: Path, save: SaveId, name: str, signer: Signer | None, owner_uid: int | None
) -> bytes:
    dir_fd = open_process_directory(path, owner_uid)
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


def stored_documents(folder: str, digests: tuple[str, ...], places: Places) -> dict[int, bytes]:
    """Return every process's document of a step of ``places.directory``, by process index.

    ``folder``: below ``host_state``. ``digests``: those of the step's marker. CorruptData,
    PersistentTierError.
    """
    tier = PersistentTier(places.directory, timeout_s=places.timeout_s, signing=places.signing())
    return {
        owner: tier.read_document(folder, owner, len(digests), digest)
        for owner, digest in enumerate(digests)
    }
