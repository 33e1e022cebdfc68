"""The memory that files on a ramdisk use."""

import os
import threading
from pathlib import Path


def allocated_bytes(directory: Path) -> int:
    """Return the bytes of the blocks of all files below ``directory``, as ``du`` counts them.

    Files that vanish during the walk count as gone; a hard-linked file counts once.
    """
    blocks: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                stat = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            blocks[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(blocks.values())


class PeakWatch:
    """Samples ``allocated_bytes`` in a thread; ``size_bytes`` is the maximum of the samples."""

    def __init__(self, directory: Path, interval_s: float = 0.02) -> None:
        self.size_bytes = 0
        self._directory = directory
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ramdisk-peak", daemon=True)

    def __enter__(self) -> "PeakWatch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self.size_bytes = max(self.size_bytes, allocated_bytes(self._directory))
