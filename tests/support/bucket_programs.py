"""Programs of ``tests/jobs`` that use a bucket of a GCS server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from fake_gcs import FakeGcs
from places import JOBS


def printed_beside_bucket(program: str, *arguments: str, timeout_s: float = 500.0) -> Any:
    """Run a program beside an empty bucket ``bucket``; return the JSON of its last line. Blocks."""
    with FakeGcs(buckets=["bucket"]) as gcs:
        # The clients read their environment when they are imported.
        environ = {**os.environ, **gcs.environment(), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(JOBS / program), *arguments]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
