"""Programs that tests run in processes of their own, some beside a GCS server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_gcs import FakeGcs
from places import JOBS


class Program(subprocess.Popen[str]):
    """A program that runs, with pipes of text for its standard input and output."""

    def line(self) -> str:
        """Return the next line that it prints, without its end. Blocks."""
        assert self.stdout is not None
        return self.stdout.readline().rstrip("\n")

    def say(self, line: str = "") -> None:
        """Let it read a line."""
        assert self.stdin is not None
        self.stdin.write(f"{line}\n")
        self.stdin.flush()


@contextmanager
def started(
    *words: object, env: dict[str, str] | None = None, stderr: int | None = None
) -> Iterator[Program]:
    """Run Python with ``words`` beside the block, at whose end it is killed if it still runs."""
    with Program(
        [sys.executable, *map(str, words)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as program:
        try:
            yield program
        finally:
            program.kill()


@contextmanager
def serving(
    ramdisk: Path, run_id: str, *options: object, **settings: Any
) -> Iterator[tuple[Program, str]]:
    """Run ``eckpt serve`` beside the block; yield it and its address, with its identity."""
    words = ["-m", "emergency_ckpt.tools.cli.main", "serve", "--local-dir", ramdisk]
    with started("-u", *words, "--run-id", run_id, *options, **settings) as server:
        word, address = server.line().split()
        assert word == "serving"
        yield server, address


def ended(
    *words: object, env: dict[str, str] | None = None, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run Python with ``words`` to its end, whatever that is. Blocks."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def printed(*words: object, env: dict[str, str] | None = None, timeout_s: float = 300.0) -> str:
    """Run Python with ``words``; return what it printed, or fail with its errors. Blocks."""
    done = ended(*words, env=env, timeout_s=timeout_s)
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
