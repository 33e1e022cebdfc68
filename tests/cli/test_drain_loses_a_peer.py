"""A peer of ``eckpt drain`` is killed between two shards, or slow."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from looks import eckpt_here
from programs import Program, serving
from quarters import W, save_quarters
from tiers_support import RUN_ID

from emergency_ckpt.run_secret import SECRET_VARIABLE, generate_secret
from emergency_ckpt.transfer import TransferClient

OLDER, NEWER = 4, 5
FETCHES = 4
"""Two quarters are fetched to be checked, and once more to be written."""
LIMIT_S, PAUSE_S, PIECES = 4.0, 1.0, 6


class Hosts:
    """Two hosts: the first has the older step, and both together have the newer one."""

    def __init__(self, root: Path, stack: ExitStack, secret: bytes) -> None:
        self.own, self._other, self._stack = root / "own", root / "other", stack
        save_quarters(self.own, {0: [0, 1, 2, 3]}, step=OLDER)
        save_quarters(self.own, {0: [0, 1]}, step=NEWER)
        save_quarters(self._other, {1: [2, 3]}, step=NEWER)

    def serve(self) -> tuple[Program, str]:
        """Start a server on the second host; return it and its address."""
        words = ("--bind", "127.0.0.1", "--port", 0)
        return self._stack.enter_context(serving(self._other, RUN_ID, *words))


@pytest.fixture
def hosts(ramdisk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    secret = generate_secret()
    monkeypatch.setenv(SECRET_VARIABLE, secret.decode())
    with ExitStack() as stack:
        yield Hosts(ramdisk, stack, secret)


def drained(
    hosts: Hosts, directory: Path, address: str, capsys: pytest.CaptureFixture[str], *more: str
) -> dict[str, Any]:
    words = ["--dir", str(directory), "--local-dir", str(hosts.own), "--run-id", RUN_ID]
    assert eckpt_here("drain", "--json", *words, "--peers", address, *more) == 0
    with ocp.CheckpointManager(directory) as manager:
        stored = manager.restore(None, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    assert stored.state["w"].tobytes() == W.tobytes()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("fetches", range(FETCHES))
def test_drain_whose_peer_is_killed_writes_the_step_before(
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fetches: int,
) -> None:
    server, address = hosts.serve()
    fetch, left = TransferClient.fetch_shards, iter(range(fetches))

    def fetch_or_kill(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            server.kill()
            server.wait()
        return fetch(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TransferClient, "fetch_shards", fetch_or_kill)
        found = drained(hosts, tmp_path / "dir", address, capsys)
    assert (found["step"], found["is_written"]) == (OLDER, True)
    assert any(f"step {NEWER} in RAM is passed over" in note for note in found["notes"])
    _, address = hosts.serve()
    found = drained(hosts, tmp_path / "dir", address, capsys)
    assert (found["step"], found["is_written"], found["notes"]) == (NEWER, True, [])


def test_drain_from_a_peer_that_is_slow_is_not_given_up(
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One shard takes longer than the limit of the write, and its bytes come all the time."""
    _, address = hosts.serve()
    fetch, left = TransferClient.fetch_shards, iter(range(FETCHES - 1))

    def fetch_slowly(
        client: TransferClient,
        *what: Any,
        deadline_s: float,
        on_bytes: Callable[[int], object] = str,
    ) -> Any:
        if next(left, None) is None:
            for _ in range(PIECES):
                time.sleep(PAUSE_S)
                on_bytes(1)
            deadline_s -= PIECES * PAUSE_S
        return fetch(client, *what, deadline_s=deadline_s)

    monkeypatch.setattr(TransferClient, "fetch_shards", fetch_slowly)
    assert PIECES * PAUSE_S > LIMIT_S
    outcome = drained(hosts, tmp_path / "dir", address, capsys, "--write-timeout", str(LIMIT_S))
    assert (outcome["step"], outcome["is_written"], outcome["notes"]) == (NEWER, True, [])
