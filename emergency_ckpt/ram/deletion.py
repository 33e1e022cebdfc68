"""The deletion of a process directory's contents: only files that this package names."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

from emergency_ckpt import files

HOST_STATE_DIRECTORY = "host_state"
QUARANTINE_DIRECTORY = "quarantine"
LEDGER = "ledger.json"
MANIFEST_END = ".manifest.json"

# Published names first, so that an interrupted deletion leaves nothing that counts.
_DELETE_ORDER = (
    re.compile(r"slot_\d{1,2}" + re.escape(MANIFEST_END)),
    re.compile(re.escape(LEDGER)),
    re.compile(r"slot_\d{1,2}\.bin"),
    re.compile(re.escape(files.TEMPORARY_PREFIX) + r".*"),
)
_HOST_STATE_SAVE = re.compile(r"[A-Za-z0-9._-]{1,160}")
_HOST_STATE_FILE = re.compile(r"process_\d{5,10}_of_\d{5,10}\.json|\.tmp-.*")
_QUARANTINE_FILE = re.compile(r"[A-Za-z0-9._-]{1,160}\.json|\.tmp-.*")


def delete_contents(dir_fd: int) -> None:
    """Delete the files of this package in a process directory, except its locks. OSError."""
    names = os.listdir(dir_fd)
    for pattern in _DELETE_ORDER:
        for name in names:
            if pattern.fullmatch(name):
                files.remove(name, dir_fd)
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
                files.remove(entry, dir_fd)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent_fd)
