"""The process directories of ramdisks, read without their locks.

A trainer may own them, write to them and delete them meanwhile. Each file that counts is published
by a rename, so it is read whole or not at all; a directory that changed while others were read is
read again, so that all are described as of one instant.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from emergency_ckpt.core.limits import MAX_RUNS, NAME_PATTERN
from emergency_ckpt.core.restore.inventory import HeldHostState, HeldTensors, HolderInventory
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.state.host_state import document_name
from emergency_ckpt.tiers import files
from emergency_ckpt.tiers.local.host_state_store import (
    document_names,
    read_document,
    read_file,
    save_directories,
    save_directory,
)
from emergency_ckpt.tiers.local.manifest import end_of
from emergency_ckpt.tiers.local.process_directory import Ledger, read_ledger
from emergency_ckpt.tiers.local.signatures import Signer, check_believed
from emergency_ckpt.tiers.local.slots import (
    NUMBERS,
    Published,
    file_name,
    manifest_name,
    read_manifest,
)
from emergency_ckpt.tiers.ramdisk.deletion import HOST_STATE_DIRECTORY, LEDGER
from emergency_ckpt.tiers.ramdisk.locks import check_run_id, process_directories
from emergency_ckpt.tiers.ramdisk.owners import Owner, read_owner
from emergency_ckpt.tiers.ramdisk.ownership import open_local_dir, open_process_directory
from emergency_ckpt.tools.survey.places import Places, SurveyFault
from emergency_ckpt.types import SaveId

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


@dataclasses.dataclass(frozen=True)
class RamdiskContents:
    """The process directories of all ramdisks.

    ``changing``: they changed during every reading, so steps may seem to lack parts that they had.
    """

    folders: tuple[ProcessFolder, ...]
    faults: tuple[SurveyFault, ...]
    changing: bool


def read_ramdisks(places: Places) -> RamdiskContents:
    """Describe the process directories on all ramdisks of ``places``. ConfigError."""
    if places.run_id is not None:
        check_run_id(places.run_id)
    faults: list[SurveyFault] = []
    found: dict[Path, ProcessFolder | SurveyFault] = {}
    changing = bool(places.local_dirs)
    for _ in range(_PASSES):
        faults, changing = [], False
        present: dict[Path, ProcessFolder | SurveyFault] = {}
        for local_dir in places.local_dirs:
            for path in _process_paths(local_dir, places, faults):
                old = found.get(path)
                new = _read_again(old, path, local_dir, places)
                changing = changing or new is not old
                if new is not None:
                    present[path] = new
        changing = changing or present.keys() != found.keys()
        found = present
        if not changing:
            break
    folders = tuple(each for each in found.values() if isinstance(each, ProcessFolder))
    faults += [each for each in found.values() if isinstance(each, SurveyFault)]
    faults += [fault for folder in folders for fault in folder.faults]
    return RamdiskContents(folders, tuple(faults), changing)


def _process_paths(local_dir: Path, places: Places, faults: list[SurveyFault]) -> Iterator[Path]:
    try:
        os.close(open_local_dir(local_dir, places.owner_uid))
    except OSError as error:
        faults.append(
            SurveyFault.of(str(local_dir), files.local_error("open", str(local_dir), error))
        )
        return
    for run_id in _run_ids(local_dir) if places.run_id is None else [places.run_id]:
        try:
            yield from process_directories(local_dir / run_id)
        except OSError as error:
            # On a shared tmpfs most directories are other programs' and users'.
            if places.run_id is not None or not isinstance(error, PermissionError):
                faults.append(SurveyFault.of(str(local_dir / run_id), error))


def _run_ids(local_dir: Path) -> list[str]:
    with os.scandir(local_dir) as entries:
        names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    return sorted(name for name in names if NAME_PATTERN.fullmatch(name))[:MAX_RUNS]


def _read_again(
    old: ProcessFolder | SurveyFault | None, path: Path, local_dir: Path, places: Places
) -> ProcessFolder | SurveyFault | None:
    """Return the description of a directory: ``old`` when nothing changed, None when it is gone."""
    try:
        dir_fd = open_process_directory(path, places.owner_uid)
    except FileNotFoundError:
        return None
    except OSError as error:
        fault = SurveyFault.of(str(path), files.local_error("open", str(path), error))
        return old if old == fault else fault
    try:
        version = _version(dir_fd)
        if isinstance(old, ProcessFolder) and old.version == version:
            return old
        return _Reading(path, dir_fd, places.signer(path.parent.name)).folder(local_dir, version)
    finally:
        os.close(dir_fd)


def _version(dir_fd: int) -> Version:
    """Return the stamps of the files that count. Slots change during a save: they are left out."""
    stamps = list(_stamps("", dir_fd))
    for name, save_fd in save_directories(dir_fd):
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


class _Reading:
    """One reading of an open process directory. Faults are collected."""

    def __init__(self, path: Path, dir_fd: int, signer: Signer | None) -> None:
        self._path = path
        self._dir_fd = dir_fd
        self._run_id = path.parent.name
        self._signer = signer
        self._faults: list[SurveyFault] = []

    def folder(self, local_dir: Path, version: Version) -> ProcessFolder:
        return ProcessFolder(
            path=self._path,
            local_dir=local_dir,
            run_id=self._run_id,
            owner=read_owner(self._dir_fd),
            ledger=self._ledger(),
            copies=tuple(self._copies()),
            host_states=tuple(sorted(self._host_states())),
            faults=tuple(self._faults),
            version=version,
        )

    def _copies(self) -> Iterator[RamCopy]:
        for number in NUMBERS:
            name = manifest_name(number)
            try:
                published = read_manifest(number, self._dir_fd, self._run_id, self._signer)
                if published is None:
                    continue
                saved_s = os.stat(name, dir_fd=self._dir_fd, follow_symlinks=False).st_mtime
                self._check_size(number, published)
            except FileNotFoundError:
                continue  # unpublished meanwhile
            except CorruptData as error:
                self._note(name, error)
            else:
                yield RamCopy(self._path, number, published, saved_s)

    def _check_size(self, number: int, published: Published) -> None:
        name, needed = file_name(number), end_of(published.contents)
        try:
            fd = files.open_regular(name, self._dir_fd, os.O_RDONLY)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._is_published(number):
                raise
            problem = f"the slot cannot be opened: {error.strerror}"
            raise CorruptData("open", name, problem) from error
        try:
            actual = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if actual < needed:
            raise CorruptData(
                "open",
                name,
                "the slot is shorter than its manifest says",
                expected=f"at least {needed} bytes",
                actual=f"{actual} bytes",
            )

    def _is_published(self, number: int) -> bool:
        try:
            os.stat(manifest_name(number), dir_fd=self._dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _host_states(self) -> Iterator[HeldHostState]:
        for save_name, save_fd in save_directories(self._dir_fd):
            for name in document_names(save_fd):
                try:
                    yield read_document(save_name, name, save_fd, self._run_id, self._signer)
                except FileNotFoundError:
                    continue  # removed meanwhile
                except CorruptData as error:
                    self._note(f"{HOST_STATE_DIRECTORY}/{save_name}/{name}", error)

    def _ledger(self) -> Ledger:
        ledger = Ledger()
        try:
            ledger, doubt = read_ledger(self._dir_fd, self._run_id, self._signer)
            check_believed(LEDGER, doubt)
        except CorruptData as error:
            self._note(LEDGER, error)
        return ledger

    def _note(self, name: str, error: CorruptData) -> None:
        self._faults.append(SurveyFault.of(f"{self._path}/{name}", error))


def copies_of(folders: Sequence[ProcessFolder], save: SaveId) -> list[RamCopy]:
    """Return the slots of one save on all ramdisks."""
    return [c for folder in folders for c in folder.copies if c.published.save == save]


def read_document_of(folder: ProcessFolder, held: HeldHostState) -> bytes:
    """Return a host state that ``folder`` had. CorruptData, also when it is gone meanwhile."""
    save_name, name = save_directory(held.save), document_name(held.owner, held.count)
    try:
        dir_fd = files.open_directory(folder.path)
        try:
            for found, save_fd in save_directories(dir_fd):
                if found == save_name:
                    return read_file(save_name, name, save_fd, None)
        finally:
            os.close(dir_fd)
    except FileNotFoundError:
        pass  # told as absent below
    except OSError as error:
        raise files.local_error("open", str(folder.path), error) from error
    raise CorruptData("read", f"{folder.path}/{save_name}/{name}", "it is not there any more")
