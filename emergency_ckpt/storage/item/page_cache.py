"""The pages of the page cache that hold a step's data files."""

from __future__ import annotations

import contextlib
import os


def release_pages(database: str) -> None:
    """Let the kernel take the pages of the data files below the folder ``database`` for new ones.

    A save to a disk then needs no more pages than the one before it. Without this each save takes
    new ones, which cost several times as much as the write where the machine is a virtual one that
    made them last, or where memory has to be reclaimed first. The files stay as they are: a restore
    of that step reads them from the disk.
    """
    # Only advice: a step that is being removed has no files to advise on.
    with contextlib.suppress(OSError), os.scandir(f"{database}/d") as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                _release(entry.path)


def _release(path: str) -> None:
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
