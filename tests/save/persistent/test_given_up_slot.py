"""A bucket still takes the bytes of a slot after the save of it was given up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fake_gcs import FakeGcs
from places import JOBS


def test_slot_that_tensorstore_still_sends_is_not_written(ramdisk: Path) -> None:
    """Four local saves of other values come before storage takes the bytes of the first."""
    with FakeGcs(buckets=["bucket"]) as gcs:
        # The clients read their environment when they are imported.
        environ = {**os.environ, **gcs.environment(), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(JOBS / "given_up_slot_program.py"), str(ramdisk)]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=250, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"slots": 3, "is_step": True, "failed": 1, "sources": ["slot", "slot"]}
