"""``enter.py COMMAND...``: run it where Ray's local cluster can run; else say why, and end with 77.

The raylets of one machine talk over its own address, and share /dev/shm with the workers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

_CANNOT = 77
_NEEDED_BYTES = 2 << 30


def reason_against() -> str:
    """Return why Ray's cluster cannot run here, empty when it can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: `make test-ray` installs it where the index has it"
    if not os.access("/dev/shm", os.W_OK):
        return "/dev/shm cannot be written"
    free = shutil.disk_usage("/dev/shm").free
    if free < _NEEDED_BYTES:
        return f"/dev/shm has {free >> 20} MiB free, and {_NEEDED_BYTES >> 20} MiB are needed"
    return ""


if __name__ == "__main__":
    reason = reason_against()
    if reason:
        print(f"test-ray cannot run here: {reason}", file=sys.stderr)
        sys.exit(_CANNOT)
    sys.exit(subprocess.run(sys.argv[1:], check=False).returncode)
