"""``eckpt drain`` into a bucket, and of RAM that only other hosts have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import orbax.checkpoint as ocp
import pytest
from damage import flip
from fake_gcs import FakeGcs
from looks import eckpt_here, eckpt_json, tree_of
from quarters import W, save_quarters
from tiers_support import RUN_ID

from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.run_secret import SECRET_VARIABLE, generate_secret
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.tier import read_leaf
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk
from emergency_ckpt.transfer import TransferServer

Serve = Callable[[ReadOnlyRamdisk], str]


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> bytes:
    secret = generate_secret()
    monkeypatch.setenv(SECRET_VARIABLE, secret.decode())
    return secret


@pytest.fixture
def serve(secret: bytes, request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Serves a ramdisk until the test ends, as jobs of each mode do; returns the address."""
    with ExitStack() as stack:

        def start(holdings: ReadOnlyRamdisk) -> str:
            stack.callback(holdings.close)
            server = TransferServer(holdings, run_id=RUN_ID, secret=secret)
            return stack.enter_context(server).contact

        yield start


@pytest.fixture
def quarters(ramdisk: Path) -> list[Path]:
    """Four quarters of a leaf: two on the first host, one on each of the two others."""
    hosts = [ramdisk / name for name in ("a", "b", "c")]
    for host, held in zip(hosts, ({0: [0, 1]}, {1: [2]}, {2: [3, 0]}), strict=True):
        save_quarters(host, held)
    return hosts


def test_drain_fetches_what_only_peers_have(
    quarters: list[Path],
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    peers = [serve(ReadOnlyRamdisk(host, RUN_ID)) for host in quarters[1:]]
    before = tree_of(*quarters)
    words = [
        "drain",
        "--json",
        "--dir",
        str(tmp_path / "dir"),
        "--local-dir",
        str(quarters[0]),
    ]
    assert eckpt_here(*words) == 1
    assert "held nowhere" in capsys.readouterr().out
    assert eckpt_here(*words, "--peers", peers[0]) == 1
    assert "held nowhere" in capsys.readouterr().out
    assert eckpt_here(*words, "--peers", ",".join(["127.0.0.1:1", *peers])) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["is_written"]) == (5, True)
    assert [note.partition(" ")[0] for note in found["notes"]] == ["127.0.0.1:1:"]
    assert tree_of(*quarters) == before  # nothing is copied to a ramdisk
    with ocp.CheckpointManager(tmp_path / "dir") as manager:
        stored = manager.restore(5, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    assert stored.state["w"].tobytes() == W.tobytes()


def test_drain_takes_a_peers_copy_for_a_damaged_one(
    quarters: list[Path],
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (slot,) = quarters[0].rglob("slot_*.bin")  # with quarter 0, which the last host has too
    flip(slot, 0)
    peers = [serve(ReadOnlyRamdisk(host, RUN_ID)) for host in quarters[1:]]
    words = [
        "drain",
        "--json",
        "--dir",
        str(tmp_path / "dir"),
        "--local-dir",
        str(quarters[0]),
    ]
    assert eckpt_here(*words, "--peers", ",".join(peers)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["is_written"]) == (5, True)
    assert any(str(slot) in note for note in found["notes"])
    with ocp.CheckpointManager(tmp_path / "dir") as manager:
        stored = manager.restore(5, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    assert stored.state["w"].tobytes() == W.tobytes()


class _Trainer(ReadOnlyRamdisk):
    """The RAM of a process of a live job, as its server lists it."""

    def inventory(self) -> HolderInventory:
        return msgspec.structs.replace(super().inventory(), holder="process/0", process_index=0)


def test_drain_is_refused_while_a_peer_trains(
    ramdisk: Path, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_quarters(ramdisk, {0: [0, 1, 2, 3]})
    peer = serve(_Trainer(ramdisk, RUN_ID))
    words = [
        "drain",
        "--dir",
        str(tmp_path / "dir"),
        "--run-id",
        RUN_ID,
        "--peers",
        peer,
    ]
    assert eckpt_here(*words) == 1
    assert "the job still runs" in capsys.readouterr().err


def test_drain_into_a_bucket_writes_what_ram_has(
    quarters: list[Path], secret: bytes, gcs: FakeGcs
) -> None:
    env = {SECRET_VARIABLE: secret.decode()}
    ram: list[Any] = [word for host in quarters for word in ("--local-dir", host)]
    places = [*ram, "--dir", "gs://bucket/run", "--run-id", RUN_ID]
    status, found = eckpt_json("drain", *places, env=env)
    assert (status, found["step"], found["is_written"], found["notes"]) == (0, 5, True, [])
    names = gcs.object_names("bucket", "run/")
    assert {"run/5/_CHECKPOINT_METADATA", "run/host_state/5/marker.json"} <= set(names)
    assert not [name for name in names if "draining" in name]
    stored = PersistentTier("gs://bucket/run", timeout_s=60.0, buffer_bytes=1 << 20).open_step(5)
    assert read_leaf(stored, "w").tobytes() == W.tobytes()
