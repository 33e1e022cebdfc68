"""Host states in a process directory: the process's own and copies for its buddies, one file each.

``host_state/<incarnation>-<step>/process_00003_of_00008.json``; the file's presence is the marker.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator

from emergency_ckpt.core.limits import (
    MAX_HOST_STATE_BYTES,
    MAX_HOST_STATE_DOCUMENTS,
    MAX_HOST_STATE_SAVES,
    MAX_TOTAL_DOCUMENTS_AT_LIMIT,
)
from emergency_ckpt.core.restore.inventory import HeldHostState
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    HostStateError,
    NotSigned,
    RamdiskFull,
)
from emergency_ckpt.state.host_state import (
    HostStateDocument,
    decode,
    decode_of,
    document_name,
)
from emergency_ckpt.tiers import files
from emergency_ckpt.tiers.local.signatures import (
    OVERHEAD_BYTES,
    Signer,
    check_believed,
    open_signed,
    signed,
)
from emergency_ckpt.tiers.ramdisk.deletion import HOST_STATE_DIRECTORY
from emergency_ckpt.types import SaveId

DOCUMENT_PATTERN = re.compile(r"process_\d{5,7}_of_\d{5,7}\.json")

Key = tuple[SaveId, int, int]


class HostStateStore:
    """The published host states of one directory. Thread-safe. Peers are not trusted.

    Peers push into it, so saves, documents and bytes are bounded: the oldest saves are removed
    first; a document that still does not fit is refused.
    """

    def __init__(
        self,
        dir_fd: int,
        run_id: str,
        limit_bytes: int,
        report: Callable[[str, CheckpointError], None],
        signer: Signer | None = None,
    ) -> None:
        """Scan the directory; report each damaged document and remove it.

        With a ``signer``, an unsigned document is reported, and removed once a save is complete.
        ``limit_bytes`` bounds one document of this job; the bound of all follows from it.
        """
        self._run_id = run_id
        self._signer = signer
        self._unbelieved: list[tuple[str, str]] = []
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held: dict[Key, HeldHostState] = {}
        self._in_memory: dict[Key, bytes] = {}
        self._complete: SaveId | None = None
        self._parent_fd = dir_fd
        self._dir_fd = files.ensure_directory(HOST_STATE_DIRECTORY, dir_fd)
        for name in os.listdir(self._dir_fd):
            try:
                self._scan_save(name, report)
            except OSError as error:
                problem = CorruptData("open", name, f"not a directory of host states: {error}")
                report(name, problem)

    def publish(
        self, save: SaveId, owner: int, count: int, data: bytes, *, in_memory: bool = False
    ) -> None:
        """Publish a document; it survives the end of every process on the host.

        With ``in_memory`` it takes no room, and is there until ``drop_memory``.
        CorruptData when it is not the document of that save and owner, HostStateError when it is
        another run's or differs from the held one, RamdiskFull when there is no room.
        """
        document = decode_of(save, owner, count, data)
        if save.run_id != self._run_id:
            raise HostStateError(
                "publish", f"host state of step {save.step}", "another run's", actual=save.run_id
            )
        entry = _entry(document, len(data))
        with self._lock:
            key = (save, owner, count)
            known = self._held.get(key)
            is_there = in_memory or key not in self._in_memory
            if known == entry and is_there and self._read(save, owner, count) == data:
                return
            if known is not None and known.digest != entry.digest:
                raise HostStateError(
                    "publish",
                    f"{document_name(owner, count)} of step {save.step}",
                    "another one is published already",
                    expected=known.digest,
                    actual=entry.digest,
                )
            if in_memory:
                self._in_memory[key] = data
                self._held[key] = entry
                return
            try:
                self._mend()
            except OSError as error:
                raise files.local_error("publish in", HOST_STATE_DIRECTORY, error) from error
            self._make_room(save, len(data))
            try:
                save_fd = files.ensure_directory(save_directory(save), self._dir_fd)
            except OSError as error:
                raise files.local_error("publish", save_directory(save), error) from error
            try:
                name = document_name(owner, count)
                file = signed(signed_name(save_directory(save), name), data, self._signer)
                files.write_atomic(name, save_fd, file)
            finally:
                os.close(save_fd)
            self._held[key] = entry
            self._in_memory.pop(key, None)

    def read(self, save: SaveId, owner: int, count: int) -> bytes | None:
        """Return a document's bytes, or None when not held. The caller checks the digest."""
        with self._lock:
            return self._read(save, owner, count)

    def held(self) -> tuple[HeldHostState, ...]:
        """Return all published host states, sorted."""
        with self._lock:
            return tuple(sorted(self._held.values()))

    def note_complete(self, save: SaveId, still_published: Collection[SaveId]) -> None:
        """Remove the documents of saves before ``save``, except those in ``still_published``.

        The documents of ``save`` are never removed to make room.
        """
        with self._lock:
            self._complete = save
            outdated = [
                key
                for key in self._held
                if key[0] != save and key[0].step <= save.step and key[0] not in still_published
            ]
            self._remove(outdated)
            self._remove_unbelieved()

    def remove_if(self, unwanted: Callable[[HeldHostState], bool]) -> None:
        """Remove the documents for which ``unwanted`` is true."""
        with self._lock:
            self._remove([key for key, entry in self._held.items() if unwanted(entry)])

    def drop_memory(self, keep: SaveId | None = None) -> None:
        """Remove the documents that are in memory alone, but those of ``keep``."""
        with self._lock:
            self._remove([key for key in self._in_memory if key[0] != keep])

    def close(self) -> None:
        """Close the directory; later calls find no documents."""
        with self._lock:
            self._held.clear()
            os.close(self._dir_fd)
            self._dir_fd = -1

    def _read(self, save: SaveId, owner: int, count: int) -> bytes | None:
        if (save, owner, count) not in self._held:
            return None
        if (save, owner, count) in self._in_memory:
            return self._in_memory[save, owner, count]
        try:
            save_fd = files.open_inner(save_directory(save), self._dir_fd)
        except OSError:
            return None  # removed by another program
        try:
            name = document_name(owner, count)
            return read_file(save_directory(save), name, save_fd, self._signer)
        except (FileNotFoundError, CorruptData):
            return None  # removed or replaced by another program
        finally:
            os.close(save_fd)

    def _mend(self) -> None:
        """Make the directory again when another program removed it; its documents are lost."""
        if os.fstat(self._dir_fd).st_nlink > 0:
            return
        dir_fd = files.ensure_directory(HOST_STATE_DIRECTORY, self._parent_fd)
        os.close(self._dir_fd)
        self._dir_fd = dir_fd
        self._held.clear()
        self._in_memory.clear()

    def _remove_unbelieved(self) -> None:
        """Remove documents that the scan did not trust, unless this process replaced them."""
        held = {
            (save_directory(save), document_name(owner, count)) for save, owner, count in self._held
        }
        for save_name, file_name in self._unbelieved:
            if (save_name, file_name) in held:
                continue
            with contextlib.suppress(OSError):  # removed meanwhile
                save_fd = files.open_inner(save_name, self._dir_fd)
                try:
                    files.remove(file_name, save_fd)
                finally:
                    os.close(save_fd)
                os.rmdir(save_name, dir_fd=self._dir_fd)
        self._unbelieved.clear()

    def _make_room(self, save: SaveId, size_bytes: int) -> None:
        """Remove saves older than ``save`` until one more document is within the bounds."""
        while True:
            saves = {key[0] for key in self._held}
            total = sum(entry.size_bytes for entry in self._held.values())
            if (
                len(saves | {save}) <= MAX_HOST_STATE_SAVES
                and len(self._held) < MAX_HOST_STATE_DOCUMENTS
                and total + size_bytes <= MAX_TOTAL_DOCUMENTS_AT_LIMIT * self._limit_bytes
            ):
                return
            older = {held for held in saves if held < save and held != self._complete}
            if not older:
                raise RamdiskFull(
                    "publish host state in",
                    f"{len(self._held)} documents of {len(saves)} saves",
                    "the store is full of newer ones",
                    expected=f"at most {MAX_HOST_STATE_SAVES} saves, {MAX_HOST_STATE_DOCUMENTS}"
                    f" documents and {MAX_TOTAL_DOCUMENTS_AT_LIMIT * self._limit_bytes} bytes",
                    actual=f"{total} bytes",
                )
            oldest = min(older)
            self._remove([key for key in self._held if key[0] == oldest])

    def _remove(self, keys: list[Key]) -> None:
        for save, owner, count in keys:
            del self._held[save, owner, count]
            if self._in_memory.pop((save, owner, count), None) is not None:
                continue
            with contextlib.suppress(FileNotFoundError):
                save_fd = files.open_inner(save_directory(save), self._dir_fd)
                try:
                    files.remove(document_name(owner, count), save_fd)
                finally:
                    os.close(save_fd)
        for save in {key[0] for key in keys} - {key[0] for key in self._held}:
            with contextlib.suppress(OSError):  # another file is in it
                os.rmdir(save_directory(save), dir_fd=self._dir_fd)

    def _scan_save(self, name: str, report: Callable[[str, CheckpointError], None]) -> None:
        save_fd = files.open_inner(name, self._dir_fd)
        try:
            files.remove_temporaries(save_fd)
            for file_name in sorted(os.listdir(save_fd)):
                if not DOCUMENT_PATTERN.fullmatch(file_name):
                    continue
                try:
                    if len(self._held) >= MAX_HOST_STATE_DOCUMENTS:
                        raise CorruptData("open", file_name, "there are too many documents")
                    entry = read_document(name, file_name, save_fd, self._run_id, self._signer)
                except NotSigned as error:
                    report(f"{name}/{file_name}", error)
                    self._unbelieved.append((name, file_name))
                except CorruptData as error:
                    report(f"{name}/{file_name}", error)
                    with contextlib.suppress(IsADirectoryError):
                        files.remove(file_name, save_fd)
                else:
                    self._held[entry.save, entry.owner, entry.count] = entry
            empty = not os.listdir(save_fd)
        finally:
            os.close(save_fd)
        if empty:
            os.rmdir(name, dir_fd=self._dir_fd)


def save_directories(dir_fd: int) -> Iterator[tuple[str, int]]:
    """Yield the name and a descriptor of each save's directory of a process directory.

    For readers that own no directory: what is no directory, or goes meanwhile, is passed over.
    """
    try:
        parent_fd = files.open_inner(HOST_STATE_DIRECTORY, dir_fd)
    except OSError:
        return  # no host state was published
    try:
        for name in sorted(os.listdir(parent_fd)):
            try:
                save_fd = files.open_inner(name, parent_fd)
            except OSError:
                continue  # not a directory, or gone meanwhile
            try:
                yield name, save_fd
            finally:
                os.close(save_fd)
    finally:
        os.close(parent_fd)


def document_names(save_fd: int) -> list[str]:
    """Return the names of the documents in a save's directory, sorted."""
    names = sorted(name for name in os.listdir(save_fd) if DOCUMENT_PATTERN.fullmatch(name))
    return names[:MAX_HOST_STATE_DOCUMENTS]


def signed_name(save_name: str, file_name: str) -> str:
    """Return the path of a document below the process directory, as it is signed."""
    return f"{HOST_STATE_DIRECTORY}/{save_name}/{file_name}"


def read_file(save_name: str, file_name: str, save_fd: int, signer: Signer | None) -> bytes:
    """Return a document's bytes. CorruptData, NotSigned, FileNotFoundError."""
    name = signed_name(save_name, file_name)
    limit_bytes = MAX_HOST_STATE_BYTES + OVERHEAD_BYTES
    data, doubt = open_signed(name, files.read_bounded(file_name, save_fd, limit_bytes), signer)
    check_believed(name, doubt)
    return data


def read_document(
    save_name: str, file_name: str, save_fd: int, run_id: str, signer: Signer | None = None
) -> HeldHostState:
    """Return the description of a published document. CorruptData when it contradicts its names.

    NotSigned when it is valid but not signed with the secret of ``signer``.
    """
    limit_bytes = MAX_HOST_STATE_BYTES + OVERHEAD_BYTES
    read = files.read_bounded(file_name, save_fd, limit_bytes)
    data, doubt = open_signed(signed_name(save_name, file_name), read, signer)
    document = decode(data)
    named = (save_directory(document.save), document_name(document.owner, document.count))
    if named != (save_name, file_name) or document.save.run_id != run_id:
        raise CorruptData(
            "open",
            file_name,
            "it is the document of another process, save or run",
            expected=(save_name, file_name, run_id),
            actual=(*named, document.save.run_id),
        )
    check_believed(file_name, doubt)
    return _entry(document, len(data))


def save_directory(save: SaveId) -> str:
    """Return the name of the directory with the documents of a save."""
    return f"{save.incarnation}-{save.step}"


def _entry(document: HostStateDocument, size_bytes: int) -> HeldHostState:
    return HeldHostState(
        save=document.save,
        owner=document.owner,
        count=document.count,
        digest=document.digest,
        size_bytes=size_bytes,
        empty=document.empty,
    )
