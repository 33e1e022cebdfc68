"""A process that reads a slot while somebody cuts the slot's file.

Run as ``python cut_program.py <ramdisk> <faulthandler: no, before, after>``. It prints the slot's
path, waits for a line, and reads.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

from tiers_support import LAYOUT, W_SHARD, complete_save, open_tier


def main() -> None:
    when = sys.argv[2]
    if when == "before":
        faulthandler.enable()
    tier = open_tier(Path(sys.argv[1]))
    tier.reserve(LAYOUT.size_bytes)
    if when == "after":
        faulthandler.enable()
    reading = tier.reading(complete_save(tier, 1))
    view = reading.__enter__()(W_SHARD)
    if when == "after":
        complete_save(tier, 2)
        tier.reserve(4 * LAYOUT.size_bytes)  # maps anew
    print(tier.path / "slot_0.bin", flush=True)
    sys.stdin.readline()
    print(int(view.sum()), flush=True)


if __name__ == "__main__":
    main()
