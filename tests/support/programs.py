"""Programs that tests run in processes of their own, some beside a GCS server on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import warm_start
from fake_gcs import FakeGcs
from places import JOBS


class Program:
    """A program that runs, with pipes of text for its standard input and output."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], stderr: int | None, cold: bool
    ) -> None:
        """Start it; ``stderr`` as for ``subprocess.Popen``."""
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_errors, theirs_errors = None, 2
        if stderr == subprocess.STDOUT:
            theirs_errors = theirs_out
        elif stderr == subprocess.PIPE:
            ours_errors, theirs_errors = os.pipe()
        streams = (theirs_in, theirs_out, theirs_errors)
        self.stdin: IO[str] = os.fdopen(ours_in, "w")
        self.stdout: IO[str] = os.fdopen(ours_out)
        self.stderr: IO[str] | None = None if ours_errors is None else os.fdopen(ours_errors)
        try:
            fork = None if cold else warm_start.start(words, environment, streams)
            self._process = fork or subprocess.Popen(
                [sys.executable, *words],
                env=environment,
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=theirs_errors,
            )
        finally:
            for descriptor in {*streams} - {2}:
                os.close(descriptor)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, as ``Popen`` gives it, once it was waited for."""
        return self._process.returncode

    def line(self) -> str:
        """Return the next line that it prints, without its end. Blocks."""
        return self.stdout.readline().rstrip("\n")

    def say(self, line: str = "") -> None:
        """Let it read a line."""
        self.stdin.write(f"{line}\n")
        self.stdin.flush()

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status. Blocks; raises subprocess.TimeoutExpired."""
        return self._process.wait(timeout)

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it was found ended."""
        self._process.send_signal(signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close its input, and return the rest of what it says, in both streams. Blocks.

        Raises:
          subprocess.TimeoutExpired: it still runs after ``timeout`` seconds; it is killed.
        """
        self.stdin.close()
        said: dict[IO[str], str] = {}

        def read(stream: IO[str]) -> None:
            said[stream] = stream.read()

        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            for thread in threads:
                thread.join(timeout)
        return said[self.stdout], said.get(self.stderr, "") if self.stderr else ""

    def close(self) -> None:
        """Kill it if it still runs, and close the pipes."""
        self.kill()
        self.wait()
        for stream in filter(None, (self.stdin, self.stdout, self.stderr)):
            with contextlib.suppress(BrokenPipeError):  # what it never read
                stream.close()


@contextmanager
def started(
    *words: object,
    env: dict[str, str] | None = None,
    stderr: int | None = None,
    cold: bool = False,
) -> Iterator[Program]:
    """Run Python with ``words`` beside the block, at whose end it is killed if it still runs.

    ``cold``: in an interpreter of its own; else a program of ``tests/jobs`` is a fork.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})}
    program = Program([*map(str, words)], environment, stderr, cold)
    try:
        yield program
    finally:
        program.close()


@contextmanager
def serving(
    ramdisk: Path,
    run_id: str,
    *options: object,
    env: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[tuple[Program, str]]:
    """Run ``eckpt serve`` beside the block; yield it and its address, with its identity."""
    words = ["serve", "--local-dir", ramdisk, "--run-id", run_id, *options]
    unbuffered = {"PYTHONUNBUFFERED": "1", **(env or {})}
    with started(JOBS / "eckpt_program.py", *words, env=unbuffered, **settings) as server:
        word, address = server.line().split()
        assert word == "serving"
        yield server, address


def ended(
    *words: object, env: dict[str, str] | None = None, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run Python with ``words`` to its end, whatever that is. Blocks."""
    with started(*words, env=env, stderr=subprocess.PIPE) as program:
        said, errors = program.communicate(timeout_s)
    assert program.returncode is not None
    return subprocess.CompletedProcess([*words], program.returncode, said, errors)


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


def eckpt(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``eckpt`` as a process of its own, which configures the clients of buckets by ``env``."""
    return ended(JOBS / "eckpt_program.py", *words, env=env, timeout_s=120.0)


def eckpt_json(*words: object, env: dict[str, str] | None = None) -> tuple[int, Any]:
    """Run ``eckpt`` as ``eckpt`` does, with ``--json``; return its exit status and the document."""
    done = eckpt(*words, "--json", env=env)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
