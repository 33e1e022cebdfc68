"""A real process for tests: it opens the tier, does one thing, and is killed or waits.

Run as ``python tier_process.py <ramdisk> <what> [argument]``. Prints ``ready`` when it has come to
where it waits.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tiers_support import LAYOUT, complete_save, fill, open_tier, save_id

from emergency_ckpt.ram import LocalTier
from emergency_ckpt.ram import locks as claims


def die_before_publishing(tier: LocalTier) -> None:
    tier.reserve(LAYOUT.size_bytes)
    writer = tier.begin_write(save_id(2), LAYOUT.size_bytes)
    writer.stage(fill(writer, save_id(2)))
    os.kill(os.getpid(), signal.SIGKILL)


def leave_everything_open(ramdisk: Path) -> None:
    """End with pages being touched, a pinned view in a cycle, and a writer at work."""
    tier = open_tier(ramdisk)
    tier.reserve(64 << 20)
    tier.prefault_in_background()
    writer = tier.begin_write(save_id(1), LAYOUT.size_bytes)
    writer.stage(fill(writer, save_id(1)))
    pin = writer.pin()
    writer.publish()
    cycle: list[object] = [tier, pin.view(0, 64), tier.begin_write(save_id(2), 0)]
    cycle.append(cycle)


def main() -> None:
    ramdisk, what, argument = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if what == "serve":
        paths = claims.process_directories(ramdisk / argument)
        held = [claims.read_claim(path) for path in paths]
        assert held, "nothing to serve"
        assert all(claim is not None for claim in held)
    elif what == "hold":
        tier = open_tier(ramdisk, run_id=argument)
        print(tier.path.name, flush=True)
    elif what == "old_life":
        tier = open_tier(ramdisk, process_index=int(argument), start="an earlier start")
        complete_save(tier, 40)
    elif what == "die_before_publishing":
        die_before_publishing(open_tier(ramdisk))
    elif what == "exit_without_close":
        leave_everything_open(ramdisk)
        return
    elif what == "claim":
        index = int(argument)
        tier = open_tier(ramdisk, process_index=index)
        print(tier.path.name, flush=True)
    print("ready", flush=True)
    sys.stdin.read()  # until the test closes the pipe


if __name__ == "__main__":
    main()
