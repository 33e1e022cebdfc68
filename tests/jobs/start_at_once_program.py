"""Opens one directory as one run of many, when it is told to; see the test that starts it."""

from __future__ import annotations

import sys

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import DirectoryInUse


def main() -> None:
    directory, local_dir, run_id, rounds = sys.argv[1:]
    for number in range(int(rounds)):
        print("ready", flush=True)
        sys.stdin.readline()
        settings = {"dir": f"{directory}/{number}", "local_dir": local_dir, "run_id": run_id}
        try:
            with EmergencyCheckpointer(**settings, save_every=1):
                print("accepted", flush=True)
                sys.stdin.readline()
        except DirectoryInUse:
            print("told", flush=True)
            sys.stdin.readline()


main()
