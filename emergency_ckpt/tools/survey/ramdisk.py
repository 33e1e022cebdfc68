"""The process directories of ramdisks, read without their locks.

A trainer may own them, write to them and delete them meanwhile. Each file that counts is published
by a rename, so it is read whole or not at all; a directory that changed while others were read is
read again, so that all are described as of one instant.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from emergency_ckpt import files
from emergency_ckpt.core.restore.inventory import HeldHostState, HeldTensors, HolderInventory
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.ram.leftovers import run_ids
from emergency_ckpt.ram.locks import Owner, check_run_id, process_directories, read_owner
from emergency_ckpt.ram.ownership import open_local_dir
from emergency_ckpt.ram.process_files import (
    HOST_STATE_DIRECTORY,
    LEDGER,
    NUMBERS,
    Ledger,
    ProcessFiles,
    Published,
    file_name,
    manifest_name,
)
from emergency_ckpt.ram.step_reader import DocumentCopy, SlotCopy
from emergency_ckpt.tier import Array
from emergency_ckpt.tools.survey.places import Places, SurveyFault
from emergency_ckpt.types import SaveId, ShardEntry

_PASSES = 8
"""A job that saves faster than its directories are read is described as of several instants."""

Version = tuple[tuple[str, int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class RamCopy:
    """One published slot. ``saved_s``: Unix time at which its manifest was published."""

    folder: Path
    number: int
    published: Published
    saved_s: float


@dataclasses.dataclass(frozen=True)
class ProcessFolder:
    """One process directory, as it was at one instant.

    Attributes:
      local_dir: the ramdisk that it is on.
      owner: the process that had it last; it may be dead.
      version: names and stamps of its files, which differ when one is published or removed.
      read_shard, read_document: as in ``SlotCopy`` and ``DocumentCopy``.
    """

    path: Path
    local_dir: Path
    run_id: str
    owner: Owner | None
    ledger: Ledger
    copies: tuple[RamCopy, ...]
    host_states: tuple[HeldHostState, ...]
    faults: tuple[SurveyFault, ...]
    version: Version
    read_shard: Callable[[RamCopy, ShardEntry], Array]
    read_document: Callable[[HeldHostState], bytes]

    @property
    def holder(self) -> HolderInventory:
        """Return its contents as a restore's leader gets them; the holder's name is its path."""
        return HolderInventory(
            holder=str(self.path),
            process_index=None,
            address="",
            tensors=tuple(HeldTensors(c.published.save, c.published.digest) for c in self.copies),
            host_states=self.host_states,
            known_complete=self.ledger.complete,
            timeline=self.ledger.chain,
            incarnation=self.ledger.incarnation,
        )


def read_ramdisks(places: Places) -> tuple[tuple[ProcessFolder, ...], list[SurveyFault], bool]:
    """Return the process directories on all ramdisks of ``places``, and what is wrong there.

    The third value is True when the directories changed during every reading, so that steps may
    seem to lack parts that they had. ConfigError.
    """
    if places.run_id is not None:
        check_run_id(places.run_id)
    faults: list[SurveyFault] = []
    known: dict[Path, ProcessFolder | SurveyFault] = {}
    changing = bool(places.local_dirs)
    for _ in range(_PASSES):
        faults, changing = [], False
        present: dict[Path, ProcessFolder | SurveyFault] = {}
        for local_dir in places.local_dirs:
            for path in _process_paths(local_dir, places, faults):
                old = known.get(path)
                new = _read_again(old, path, places)
                changing = changing or new is not old
                if new is not None:
                    present[path] = new
        changing = changing or present.keys() != known.keys()
        known = present
        if not changing:
            break
    folders = tuple(folder for folder in known.values() if isinstance(folder, ProcessFolder))
    faults += [fault for fault in known.values() if isinstance(fault, SurveyFault)]
    faults += [fault for folder in folders for fault in folder.faults]
    return folders, faults, changing


def _process_paths(local_dir: Path, places: Places, faults: list[SurveyFault]) -> Iterator[Path]:
    try:
        os.close(open_local_dir(local_dir, places.owner_uid))
    except OSError as error:
        faults.append(
            SurveyFault.of(str(local_dir), files.local_error("open", str(local_dir), error))
        )
        return
    for run_id in run_ids(local_dir) if places.run_id is None else [places.run_id]:
        try:
            yield from process_directories(local_dir / run_id)
        except OSError as error:
            # On a shared tmpfs most directories are other programs' and users'.
            if places.run_id is not None or not isinstance(error, PermissionError):
                faults.append(SurveyFault.of(str(local_dir / run_id), error))


def _read_again(
    old: ProcessFolder | SurveyFault | None, path: Path, places: Places
) -> ProcessFolder | SurveyFault | None:
    """Return the description of a directory: ``old`` when nothing changed, None when it is gone."""
    try:
        with ProcessFiles.opened(path, places.owner_uid) as place:
            if isinstance(old, ProcessFolder) and old.version == version_of(place):
                return old
            return read_folder(path, place, places)
    except FileNotFoundError:
        return None
    except OSError as error:
        fault = SurveyFault.of(str(path), files.local_error("open", str(path), error))
        return old if old == fault else fault


def version_of(place: ProcessFiles) -> Version:
    """Return the stamps of the files that count. Slots change during a save: they are left out."""
    stamps = list(_stamps("", place.dir_fd))
    for name, save_fd in place.save_directories():
        stamps += _stamps(f"{HOST_STATE_DIRECTORY}/{name}/", save_fd)
    return tuple(sorted(stamps))


def _stamps(prefix: str, dir_fd: int) -> Iterator[tuple[str, int, int, int]]:
    for name in os.listdir(dir_fd):
        if not name.endswith(".json") or name.startswith(files.TEMPORARY_PREFIX):
            continue
        try:
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            continue  # removed meanwhile: the next pass sees it
        yield prefix + name, status.st_ino, status.st_mtime_ns, status.st_size


def read_folder(path: Path, place: ProcessFiles, places: Places) -> ProcessFolder:
    """Return the description of an open process directory, with its faults. OSError."""
    version = version_of(place)
    faults: list[SurveyFault] = []

    def note(name: str, error: CorruptData) -> None:
        faults.append(SurveyFault.of(f"{path}/{name}", error))

    ledger = Ledger()
    try:
        ledger = place.ledger()
    except CorruptData as error:
        note(LEDGER, error)
    copies: list[RamCopy] = []
    for number in NUMBERS:
        try:
            published = place.manifest(number)
            if published is not None:
                copies.append(_copy_of(path, place, number, published))
        except FileNotFoundError:
            continue  # unpublished meanwhile
        except CorruptData as error:
            note(manifest_name(number), error)
    host_states: list[HeldHostState] = []
    for name, document in place.host_states():
        if isinstance(document, CorruptData):
            note(f"{HOST_STATE_DIRECTORY}/{name}", document)
        else:
            host_states.append(document)
    return ProcessFolder(
        path=path,
        local_dir=path.parents[1],
        run_id=place.run_id,
        owner=read_owner(place.dir_fd),
        ledger=ledger,
        copies=tuple(copies),
        host_states=tuple(sorted(host_states)),
        faults=tuple(faults),
        version=version,
        read_shard=partial(_read_shard, places),
        read_document=partial(_read_document, places, path),
    )


def _copy_of(path: Path, place: ProcessFiles, number: int, published: Published) -> RamCopy:
    """CorruptData when the slot cannot be read; FileNotFoundError when it was unpublished."""
    name = manifest_name(number)
    try:
        os.close(place.open_slot(number, published))
    except OSError as error:
        os.stat(name, dir_fd=place.dir_fd, follow_symlinks=False)
        problem = f"the slot cannot be opened: {error.strerror}"
        raise CorruptData("open", file_name(number), problem) from error
    status = os.stat(name, dir_fd=place.dir_fd, follow_symlinks=False)
    return RamCopy(path, number, published, status.st_mtime)


def _read_shard(places: Places, copy: RamCopy, entry: ShardEntry) -> Array:
    """Return a shard's bytes, fewer where the file is shorter. OSError, CorruptData."""
    with ProcessFiles.opened(copy.folder, places.owner_uid) as place:
        fd = place.open_slot(copy.number)
    data = np.empty(entry.nbytes, np.uint8)
    with open(fd, "rb", buffering=0) as file:
        file.seek(entry.offset)
        done = 0
        while done < entry.nbytes and (count := file.readinto(data.data[done:])):
            done += count
    return data[:done]


def _read_document(places: Places, path: Path, host_state: HeldHostState) -> bytes:
    with ProcessFiles.opened(path, places.owner_uid) as place:
        return place.document(host_state.save, host_state.owner, host_state.count)


def ram_parts(
    folders: Sequence[ProcessFolder], save: SaveId
) -> tuple[list[SlotCopy], list[DocumentCopy]]:
    """Return what the directories have of a save, for ``RamStep``."""
    own = [folder for folder in folders if folder.run_id == save.run_id]
    copies = [
        SlotCopy(
            str(folder.path),
            f"{folder.path}/{file_name(copy.number)}",
            copy.published.digest,
            copy.published.contents,
            partial(folder.read_shard, copy),
        )
        for folder in own
        for copy in folder.copies
        if copy.published.save == save
    ]
    documents = [
        DocumentCopy(str(folder.path), host_state, partial(folder.read_document, host_state))
        for folder in own
        for host_state in folder.host_states
        if host_state.save == save
    ]
    return copies, documents
