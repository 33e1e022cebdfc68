"""Another user of the host, who knows this package: plants, opens, serves or cleans directories.

Run by root as ``python stranger_program.py <uid> <ramdisk> <what>``. Prints what came of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from tiers_support import RUN_ID, complete_save, document, held_steps, open_tier, save_id

from emergency_ckpt.errors import LocalTierError
from emergency_ckpt.tools.cli.main import main as eckpt
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk


def plant(local_dir: Path, step: int) -> None:
    """A save that is sound in itself, in directories that are open to everybody."""
    tier = open_tier(local_dir)
    tier.publish_host_state(save_id(step), 0, 4, document(step))
    complete_save(tier, step)
    tier.close()
    for path in [local_dir, *local_dir.rglob("*")]:
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o777 if path.is_dir() else 0o666)


def import_all() -> None:
    """What is imported late: another user may not be able to read the interpreter's files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        plant(Path(place) / "local", 1)
        eckpt(["doctor", "--clean", "--local-dir", place])


def main() -> None:
    uid, local_dir, what = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    import_all()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.umask(0)
    if what == "plant":
        plant(local_dir, 1_000_000)
        print("planted")
    elif what == "open":
        try:
            tier = open_tier(local_dir)
        except LocalTierError as error:
            print(error)
            return
        complete_save(tier, 7)
        print(held_steps(tier), oct(tier.path.stat().st_mode & 0o7777))
        tier.close()
    elif what == "serve":
        try:
            reader = ReadOnlyRamdisk(local_dir, RUN_ID)
        except LocalTierError as error:
            print(error)
            return
        with contextlib.closing(reader):
            print([held.save.step for held in reader.inventory().tensors])
    elif what == "clean":
        words = ["doctor", "--clean", "--local-dir", str(local_dir), "--older-than", "0", "--yes"]
        print("status", eckpt(words))


if __name__ == "__main__":
    main()
