"""The host states of one save, from ramdisks or from storage, as documents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.core.restore.restore_plan import choose_host_states, filter_inventory
from emergency_ckpt.errors import CorruptData, HostStateError, TransferError
from emergency_ckpt.ram.process_files import ProcessFiles
from emergency_ckpt.state.host_state import decode
from emergency_ckpt.storage.tier import PersistentTier
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
        with ProcessFiles.opened(path, places.owner_uid, signer) as place:
            return place.document(save, owner, chosen.count)

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
