"""Simulated machines: ramdisk, address, clock, and bits that flip in RAM."""

from __future__ import annotations

import shutil
from pathlib import Path

import oracle
from lives import Tags


class Host:
    """A machine: its ramdisk, its clock, its address."""

    def __init__(self, root: Path, number: int) -> None:
        self.name = f"host-{number}"
        self.address = f"10.0.0.{number + 1}"
        self.ram = root / self.name
        self.ram.mkdir(parents=True, mode=0o700)
        self.is_full = False
        self.is_damaged = False
        self.clock_ahead_s = 0.0
        self._holdings: oracle.Holdings | None = None

    def wipe(self) -> None:
        """Lose all RAM."""
        shutil.rmtree(self.ram)
        self.ram.mkdir(mode=0o700)
        self.is_damaged = False
        self._holdings = None

    def flip(self, choice: float) -> str:
        """Change a bit of a file; return which one, or "" without any file."""
        slots = sorted(path for path in self.ram.rglob("slot_*.bin") if path.stat().st_size)
        files = sorted(path for path in self.ram.rglob("*.json") if path.stat().st_size)
        files = files if choice * 1009 % 1 < 0.25 or not slots else slots
        if not files:
            return ""
        self.is_damaged = True
        self._holdings = None
        path = files[int(choice * len(files))]
        data = bytearray(path.read_bytes())
        limit = min(len(data), 150)  # most of a slot's page is unused
        place = int(choice * 7919 * limit) % limit
        data[place] ^= 1 << int(choice * 8191) % 8
        with path.open("r+b") as file:
            file.write(data)
        return f"a bit of {path.name} at {place} on {self.name}"

    def holdings(self, tags: Tags) -> oracle.Holdings:
        """Return what its RAM holds; read once until ``changed``."""
        if self._holdings is None:
            self._holdings = oracle.survey(self.ram, tags, is_damaged=self.is_damaged)
        return self._holdings

    def changed(self) -> None:
        """Note that processes ran here."""
        self._holdings = None
