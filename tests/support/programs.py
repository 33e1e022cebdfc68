"""Programs that tests run in processes of their own, some beside a GCS server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from fake_gcs import FakeGcs
from places import JOBS


def printed(*words: object, env: dict[str, str] | None = None, timeout_s: float = 300.0) -> str:
    """Run Python with ``words``; return what it printed, or fail with its errors. Blocks."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def printed_beside_bucket(program: str, *arguments: str, timeout_s: float = 500.0) -> Any:
    """Run a program beside an empty bucket ``bucket``; return the JSON of its last line. Blocks."""
    with FakeGcs(buckets=["bucket"]) as gcs:
        # The clients read their environment when they are imported.
        told = printed(JOBS / program, *arguments, env=gcs.environment(), timeout_s=timeout_s)
    return json.loads(told.splitlines()[-1])


def seen_by_plain_orbax(directory: str, step: int) -> dict[str, Any]:
    """Return what ordinary Orbax reads of ``step``, where nobody has imported this package."""
    return json.loads(printed(JOBS / "plain_reader.py", directory, step).splitlines()[-1])
