"""The files of a process directory, as its owner's scan and all other readers read them.

A trainer may own the directory, write to it and delete it meanwhile. Each file that counts is
published by a rename, so it is read as a whole or not at all; a slot's bytes are what a reader
compares with their CRCs. Nothing here takes a lock, and ``delete_contents`` alone changes files:
only those that this package names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from emergency_ckpt import files
from emergency_ckpt.core.digested_file import DigestedFile
from emergency_ckpt.core.limits import (
    MAX_HOST_STATE_BYTES,
    MAX_HOST_STATE_DOCUMENTS,
    MAX_INCARNATION_NUMBER,
    MAX_LEDGER_BYTES,
    MAX_MANIFEST_BYTES,
    NAME_PATTERN,
)
from emergency_ckpt.core.restore.inventory import HeldHostState, RestoredSave
from emergency_ckpt.core.timeline import Timeline, check_save, newest, problem_of
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.ram.manifest import Published, decode_manifest, end_of
from emergency_ckpt.ram.ownership import open_process_directory
from emergency_ckpt.state.host_state import HostStateDocument, decode, document_name
from emergency_ckpt.types import SaveId

NUMBERS = range(100)
"""Valid slot numbers: at most two digits."""

LEDGER = "ledger.json"
HOST_STATE_DIRECTORY = "host_state"
QUARANTINE_DIRECTORY = "quarantine"

_DOCUMENT = re.compile(r"process_[0-9]{5,7}_of_[0-9]{5,7}\.json")


def file_name(number: int) -> str:
    """Return the name of a slot file."""
    return f"slot_{number}.bin"


def manifest_name(number: int) -> str:
    """Return the name of a slot's manifest."""
    return f"slot_{number}.manifest.json"


_SLOT_FILES = {file_name(number): number for number in NUMBERS}
_MANIFESTS = {manifest_name(number): number for number in NUMBERS}


def slot_number(name: str) -> int | None:
    """Return the number of the slot whose file or manifest has ``name``, else None.

    A name such as ``slot_01.bin``, which this package never makes, is another program's.
    """
    return _SLOT_FILES.get(name, _MANIFESTS.get(name))


def is_published_name(name: str) -> bool:
    """Return whether ``name`` is that of a manifest or of the ledger."""
    return name in _MANIFESTS or name == LEDGER


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of a process directory across lives of the job.

    Attributes:
      incarnation: the newest life that its process has heard of; empty before the first.
      chain: which saves were rolled back; None before that was ever decided.
      complete: the newest save known to be complete on all processes; None without one. It only
        tells a job that lost its checkpoints from one that never had any.
      finite: the newest of these saves without a value that is NaN or infinite, on any process;
        not in the file before there was one.
      restored: the save that the newest lives began from; not in the file once another is complete.
      stored: the newest save that was complete in storage, as this process heard; not in the file
        before there was one. While storage is silent, RAM's older steps do not take its place.
    """

    incarnation: str = ""
    chain: Timeline | None = None
    complete: SaveId | None = None
    finite: SaveId | msgspec.UnsetType = msgspec.UNSET
    restored: RestoredSave | msgspec.UnsetType = msgspec.UNSET
    stored: SaveId | msgspec.UnsetType = msgspec.UNSET


def newest_chain(ledgers: Iterable[Ledger]) -> Timeline | None:
    """Return the chain of the newest life on record; None without one."""
    ledgers = list(ledgers)
    complete = (ledger.complete for ledger in ledgers if ledger.complete is not None)
    return newest(*(ledger.chain for ledger in ledgers), complete=complete)


def newest_stored(ledgers: Iterable[Ledger]) -> SaveId | None:
    """Return the newest save that storage had, as the ledgers have it on record."""
    stored = [ledger.stored for ledger in ledgers]
    return max((save for save in stored if isinstance(save, SaveId)), default=None)


LEDGER_FILE = DigestedFile("ledger", Ledger, limit_bytes=MAX_LEDGER_BYTES)


class ProcessFiles:
    """The published files of one process directory. CorruptData is raised for a damaged file."""

    def __init__(self, dir_fd: int, run_id: str) -> None:
        """``dir_fd`` stays the caller's, who keeps it open as long as this is used."""
        self.dir_fd = dir_fd
        self.run_id = run_id

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, owner_uid: int | None = None) -> Generator[ProcessFiles]:
        """Open ``<local_dir>/<run id>/<process directory>``. OSError, files.NotOwn.

        ``owner_uid``: the user that it must belong to; None for the effective user.
        """
        with files.closing(open_process_directory(path, owner_uid)) as dir_fd:
            yield cls(dir_fd, path.parent.name)

    def ledger(self) -> Ledger:
        """Return the ledger, which is empty without a file."""
        try:
            file = files.read_bounded(LEDGER, self.dir_fd, MAX_LEDGER_BYTES)
        except FileNotFoundError:
            return Ledger()
        ledger = LEDGER_FILE.decode(file, LEDGER)
        problem = "" if ledger.chain is None else problem_of(ledger.chain)
        restored = ledger.restored if isinstance(ledger.restored, RestoredSave) else None
        if restored is not None and not 0 < restored.lives <= MAX_INCARNATION_NUMBER:
            problem = "the number of lives from one save is out of bounds"
        for save in (ledger.complete, ledger.finite, ledger.stored, restored and restored.save):
            if isinstance(save, SaveId):
                check_save(save)
                if save.run_id != self.run_id:
                    problem = "it is of another run"
        if ledger.incarnation and not NAME_PATTERN.fullmatch(ledger.incarnation):
            problem = "its incarnation is not a plain name"
        if problem:
            raise CorruptData("decode", LEDGER, problem)
        return ledger

    def manifest(self, number: int) -> Published | None:
        """Return the contents of a slot's manifest, or None without one."""
        name = manifest_name(number)
        try:
            file = files.read_bounded(name, self.dir_fd, MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            return None
        published = decode_manifest(file)
        run_id = published.save.run_id
        if run_id != self.run_id:
            raise CorruptData(
                "open", name, "another run's manifest", expected=self.run_id, actual=run_id
            )
        return published

    def open_slot(self, number: int, published: Published | None = None) -> int:
        """Return a read-only descriptor of a slot's file, which the caller closes.

        OSError; CorruptData when it is shorter than ``published`` says.
        """
        fd = files.open_regular(file_name(number), self.dir_fd, os.O_RDONLY)
        if published is not None:
            problem = why_too_short(number, published, os.fstat(fd).st_size)
            if problem is not None:
                os.close(fd)
                raise problem
        return fd

    def save_directories(self) -> Iterator[tuple[str, int]]:
        """Yield the name and a descriptor of each directory of host states.

        What is no directory, or goes meanwhile, is passed over.
        """
        try:
            parent_fd = files.open_inner(HOST_STATE_DIRECTORY, self.dir_fd)
        except OSError:
            return  # no host state was published
        with files.closing(parent_fd):
            for name in sorted(os.listdir(parent_fd)):
                try:
                    save_fd = files.open_inner(name, parent_fd)
                except OSError:
                    continue
                with files.closing(save_fd):
                    yield name, save_fd

    def host_states(self) -> Iterator[tuple[str, HeldHostState | CorruptData]]:
        """Yield the name of each document, below ``host_state``, and what it is or its damage."""
        count = 0
        for save_name, save_fd in self.save_directories():
            for name in sorted(filter(_DOCUMENT.fullmatch, os.listdir(save_fd))):
                try:
                    if count >= MAX_HOST_STATE_DOCUMENTS:
                        raise CorruptData("open", name, "there are too many documents")
                    host_state = self._describe(save_name, name, save_fd)
                except FileNotFoundError:
                    continue  # removed meanwhile
                except CorruptData as error:
                    yield f"{save_name}/{name}", error
                else:
                    count += 1
                    yield f"{save_name}/{name}", host_state

    def document(self, save: SaveId, owner: int, count: int) -> bytes:
        """Return a document. FileNotFoundError or another OSError when it is not held.

        The caller checks its digest.
        """
        with (
            files.closing(files.open_inner(HOST_STATE_DIRECTORY, self.dir_fd)) as parent_fd,
            files.closing(files.open_inner(save_directory(save), parent_fd)) as save_fd,
        ):
            return files.read_bounded(document_name(owner, count), save_fd, MAX_HOST_STATE_BYTES)

    def _describe(self, save_name: str, name: str, save_fd: int) -> HeldHostState:
        """CorruptData when a document contradicts its names."""
        data = files.read_bounded(name, save_fd, MAX_HOST_STATE_BYTES)
        document = decode(data)
        named = (save_directory(document.save), document_name(document.owner, document.count))
        if named != (save_name, name) or document.save.run_id != self.run_id:
            raise CorruptData(
                "open",
                name,
                "it is the document of another process, save or run",
                expected=(save_name, name, self.run_id),
                actual=(*named, document.save.run_id),
            )
        return held_host_state(document, len(data))


def save_directory(save: SaveId) -> str:
    """Return the name of the directory with the documents of a save."""
    return f"{save.incarnation}-{save.step}"


def held_host_state(document: HostStateDocument, size_bytes: int) -> HeldHostState:
    """Return the description of a document of ``size_bytes``."""
    return HeldHostState(
        save=document.save,
        owner=document.owner,
        count=document.count,
        digest=document.digest,
        size_bytes=size_bytes,
        empty=document.empty,
    )


def why_too_short(number: int, published: Published, size_bytes: int) -> CorruptData | None:
    """Return the damage of a slot's file of ``size_bytes``, or None when it has all bytes."""
    needed = end_of(published.contents)
    if needed <= size_bytes:
        return None
    return CorruptData(
        "open",
        file_name(number),
        "the slot is shorter than its manifest says",
        expected=f"at least {needed} bytes",
        actual=f"{size_bytes} bytes",
    )


_HOST_STATE_SAVE = re.compile(r"[A-Za-z0-9._-]{1,160}")
_HOST_STATE_FILE = re.compile(r"process_[0-9]{5,10}_of_[0-9]{5,10}\.json|\.tmp-.*")
_QUARANTINE_FILE = re.compile(r"[A-Za-z0-9._-]{1,160}\.json|\.tmp-.*")


def delete_contents(dir_fd: int) -> None:
    """Delete the files of this package in a process directory, except its locks. OSError.

    A folder under the name of a file stays, so the directory stays too.
    """
    names = os.listdir(dir_fd)
    # Published names first, so that an interrupted deletion leaves nothing that counts.
    for own in (_MANIFESTS, (LEDGER,), _SLOT_FILES):
        for name in names:
            if name in own:
                files.remove_file(name, dir_fd)
    files.remove_temporaries(dir_fd)
    _delete_tree(HOST_STATE_DIRECTORY, dir_fd, (_HOST_STATE_SAVE, _HOST_STATE_FILE))
    _delete_tree(QUARANTINE_DIRECTORY, dir_fd, (_QUARANTINE_FILE,))


def _delete_tree(name: str, parent_fd: int, levels: Sequence[re.Pattern[str]]) -> None:
    try:
        dir_fd = files.open_directory(name, parent_fd=parent_fd)
    except OSError:
        return  # absent, or not ours: then its parent stays too
    with files.closing(dir_fd):
        for entry in os.listdir(dir_fd):
            if not levels[0].fullmatch(entry):
                continue
            if len(levels) > 1:
                _delete_tree(entry, dir_fd, levels[1:])
            else:
                files.remove_file(entry, dir_fd)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent_fd)
