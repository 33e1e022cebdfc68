"""Host states in a process directory: the process's own and copies for its buddies, one file each.

``host_state/<incarnation>-<step>/process_00003_of_00008.json``; the file's presence is the marker.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection

from emergency_ckpt import files
from emergency_ckpt.core.limits import (
    MAX_DOCUMENTS_BYTES,
    MAX_HOST_STATE_DOCUMENTS,
    MAX_HOST_STATE_SAVES,
)
from emergency_ckpt.core.restore.inventory import HeldHostState
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    HostStateError,
    RamdiskFull,
)
from emergency_ckpt.ram.deletion import HOST_STATE_DIRECTORY
from emergency_ckpt.ram.process_files import (
    ProcessFiles,
    held_host_state,
    save_directory,
)
from emergency_ckpt.state.host_state import decode_of, document_name
from emergency_ckpt.types import SaveId

Key = tuple[SaveId, int, int]


class HostStateStore:
    """The published host states of one directory. Thread-safe. Peers are not trusted.

    Peers push into it, so saves, documents and bytes are bounded: the oldest saves are removed
    first; a document that still does not fit is refused.
    """

    def __init__(
        self,
        place: ProcessFiles,
        report: Callable[[str, CheckpointError], None],
    ) -> None:
        """Scan the directory; report each damaged document and remove it."""
        self._place = place
        self._lock = threading.Lock()
        self._held: dict[Key, HeldHostState] = {}
        self._complete: SaveId | None = None
        self._dir_fd = files.ensure_directory(HOST_STATE_DIRECTORY, place.dir_fd)
        for name, document in place.host_states():
            if not isinstance(document, CorruptData):
                self._held[document.save, document.owner, document.count] = document
                continue
            report(name, document)
            with contextlib.suppress(OSError):  # the file stays, damaged at the next scan too
                self._remove_file(name)
        for name in os.listdir(self._dir_fd):
            try:
                self._tidy(name)
            except OSError as error:
                problem = CorruptData("open", name, f"not a directory of host states: {error}")
                report(name, problem)

    def publish(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        """Publish a document; it survives the end of every process on the host.

        CorruptData when it is not the document of that save and owner, HostStateError when it is
        another run's or differs from the held one, RamdiskFull when there is no room.
        """
        document = decode_of(save, owner, count, data)
        if save.run_id != self._place.run_id:
            raise HostStateError(
                "publish", f"host state of step {save.step}", "another run's", actual=save.run_id
            )
        entry = held_host_state(document, len(data))
        with self._lock:
            key = (save, owner, count)
            published = self._held.get(key)
            if published == entry and self._read(save, owner, count) == data:
                return
            if published is not None and published.digest != entry.digest:
                raise HostStateError(
                    "publish",
                    f"{document_name(owner, count)} of step {save.step}",
                    "another one is published already",
                    expected=published.digest,
                    actual=entry.digest,
                )
            try:
                self._mend()
            except OSError as error:
                raise files.local_error(
                    "publish in", HOST_STATE_DIRECTORY, error, dir_fd=self._dir_fd
                ) from error
            self._make_room(save, len(data))
            try:
                save_fd = files.ensure_directory(save_directory(save), self._dir_fd)
            except OSError as error:
                raise files.local_error(
                    "publish", save_directory(save), error, dir_fd=self._dir_fd
                ) from error
            with files.closing(save_fd):
                files.write_atomic(document_name(owner, count), save_fd, data)
            self._held[key] = entry

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

    def remove_if(self, unwanted: Callable[[HeldHostState], bool]) -> None:
        """Remove the documents for which ``unwanted`` is true."""
        with self._lock:
            self._remove([key for key, entry in self._held.items() if unwanted(entry)])

    def close(self) -> None:
        """Close the directory; later calls find no documents."""
        with self._lock:
            self._held.clear()
            os.close(self._dir_fd)
            self._dir_fd = -1

    def _read(self, save: SaveId, owner: int, count: int) -> bytes | None:
        if (save, owner, count) not in self._held:
            return None
        try:
            return self._place.document(save, owner, count)
        except (OSError, CorruptData):
            return None  # removed or replaced by another program

    def _mend(self) -> None:
        """Make the directory again when another program removed it; its documents are lost."""
        if os.fstat(self._dir_fd).st_nlink > 0:
            return
        dir_fd = files.ensure_directory(HOST_STATE_DIRECTORY, self._place.dir_fd)
        os.close(self._dir_fd)
        self._dir_fd = dir_fd
        self._held.clear()

    def _make_room(self, save: SaveId, size_bytes: int) -> None:
        """Remove saves older than ``save`` until one more document is within the bounds."""
        while True:
            saves = {key[0] for key in self._held}
            total = sum(entry.size_bytes for entry in self._held.values())
            if (
                len(saves | {save}) <= MAX_HOST_STATE_SAVES
                and len(self._held) < MAX_HOST_STATE_DOCUMENTS
                and total + size_bytes <= MAX_DOCUMENTS_BYTES
            ):
                return
            older = {other for other in saves if other < save and other != self._complete}
            if not older:
                raise RamdiskFull(
                    "publish host state in",
                    f"{len(self._held)} documents of {len(saves)} saves",
                    "the store is full of newer ones",
                    expected=f"at most {MAX_HOST_STATE_SAVES} saves, {MAX_HOST_STATE_DOCUMENTS}"
                    f" documents and {MAX_DOCUMENTS_BYTES} bytes",
                    actual=f"{total} bytes",
                )
            oldest = min(older)
            self._remove([key for key in self._held if key[0] == oldest])

    def _remove(self, keys: list[Key]) -> None:
        for key in keys:
            del self._held[key]
            save, owner, count = key
            with contextlib.suppress(FileNotFoundError):
                self._remove_file(f"{save_directory(save)}/{document_name(owner, count)}")
        for save in {key[0] for key in keys} - {key[0] for key in self._held}:
            with contextlib.suppress(OSError):  # another file is in it
                os.rmdir(save_directory(save), dir_fd=self._dir_fd)

    def _remove_file(self, name: str) -> None:
        """Remove a document by its path below this directory. OSError."""
        save_name, _, file_name = name.partition("/")
        with files.closing(files.open_inner(save_name, self._dir_fd)) as save_fd:
            files.remove(file_name, save_fd)

    def _tidy(self, save_name: str) -> None:
        """Remove what an interrupted write left, and the directory of a save without a file."""
        with files.closing(files.open_inner(save_name, self._dir_fd)) as save_fd:
            files.remove_temporaries(save_fd)
            empty = not os.listdir(save_fd)
        if empty:
            os.rmdir(save_name, dir_fd=self._dir_fd)
