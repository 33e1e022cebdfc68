"""A host's ramdisk served while its trainer is down, and one suite for all holdings."""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from launch_support import free_port
from looks import eckpt, eckpt_here
from memory_holdings import MemoryHoldings
from programs import serving
from served_tiers import later, open_tier, save_shards
from transfer_support import RUN_ID, SAVE, SECRET, fetch_all, random_shards

from emergency_ckpt.cluster import ProcessHoldings
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import LocalTierError, NotHeld, TransferError
from emergency_ckpt.state import host_state
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk
from emergency_ckpt.transfer import Holdings, TransferClient, TransferServer
from emergency_ckpt.types import SaveId


def document(save: SaveId, owner: int, payload: object = None) -> bytes:
    return host_state.encode(save, owner, 2, host_state.capture(payload))


class Holder(Protocol):
    """A kind of holdings under test: how it comes to hold something."""

    holdings: Holdings

    def hold(self, save: SaveId, shards: list[bytes]) -> str: ...
    def hold_state(self, save: SaveId, owner: int, data: bytes) -> None: ...
    def close(self) -> None: ...


class InMemory:
    def __init__(self, _: Path) -> None:
        self.holdings = MemoryHoldings()

    def hold(self, save: SaveId, shards: list[bytes]) -> str:
        return self.holdings.add(save, shards)

    def hold_state(self, save: SaveId, owner: int, data: bytes) -> None:
        self.holdings.publish_host_state(save, owner, 2, data)

    def close(self) -> None:
        return None


class OfProcess:
    def __init__(self, ramdisk: Path) -> None:
        self.tier = open_tier(ramdisk)
        self.holdings: Holdings = ProcessHoldings(self.tier, 0)

    def hold(self, save: SaveId, shards: list[bytes]) -> str:
        return save_shards(self.tier, save, shards)

    def hold_state(self, save: SaveId, owner: int, data: bytes) -> None:
        self.tier.publish_host_state(save, owner, 2, data)

    def close(self) -> None:
        self.tier.close()


class ReadOnly(OfProcess):
    """The reader finds what another life publishes, also after it was opened."""

    def __init__(self, ramdisk: Path) -> None:
        super().__init__(ramdisk)
        self.reader = ReadOnlyRamdisk(ramdisk, RUN_ID)
        self.holdings = self.reader

    def close(self) -> None:
        self.reader.close()
        super().close()


@pytest.fixture(params=[InMemory, OfProcess, ReadOnly])
def holder(request: pytest.FixtureRequest, ramdisk: Path) -> Iterator[Holder]:
    made = request.param(ramdisk)
    yield made
    made.close()


def test_holdings_start_empty(holder: Holder) -> None:
    inventory = holder.holdings.inventory()
    assert inventory.tensors == inventory.host_states == ()
    assert holder.holdings.contents_bytes("0" * 64) is None
    assert holder.holdings.host_state_bytes(SAVE, 0, 2) is None
    with pytest.raises(NotHeld), holder.holdings.mapping_for("0" * 64):
        raise AssertionError("never inside")


def test_holdings_serve_what_they_say_they_hold(holder: Holder, client: TransferClient) -> None:
    first, second = random_shards(5000, 0, 64), random_shards(300_000, 7)
    digests = [holder.hold(later(1), first), holder.hold(later(2), second)]
    state = document(later(2), 1, {"position": 17})
    holder.hold_state(later(2), 1, state)
    with TransferServer(holder.holdings, run_id=RUN_ID, secret=SECRET) as server:
        inventory = client.inventory(server.address)
        assert [(held.save, held.digest) for held in inventory.tensors] == [
            (later(1), digests[0]),
            (later(2), digests[1]),
        ]
        assert [(h.save, h.owner, h.count, h.size_bytes) for h in inventory.host_states] == [
            (later(2), 1, 2, len(state))
        ]
        for digest, shards, save in zip(
            digests, (first, second), (later(1), later(2)), strict=True
        ):
            data, crcs, contents = fetch_all(client, server.address, digest)
            assert data == shards
            assert crcs == [entry.crc32c for entry in contents.shards]
            assert contents.save == save
            encoded = holder.holdings.contents_bytes(digest)
            assert encoded is not None
            assert hashlib.sha256(encoded).hexdigest() == digest
        assert client.fetch_host_state(server.address, later(2), 1, 2) == state
        with pytest.raises(NotHeld):
            client.fetch_host_state(server.address, later(1), 1, 2)


def test_reader_changes_nothing_and_follows_what_a_trainer_does(
    ramdisk: Path, client: TransferClient
) -> None:
    tier = open_tier(ramdisk)
    old = save_shards(tier, later(1), random_shards(10_000))
    reader = ReadOnlyRamdisk(ramdisk, RUN_ID)
    with TransferServer(reader, run_id=RUN_ID, secret=SECRET) as server:
        fetch_all(client, server.address, old)
        with pytest.raises(TransferError, match="only reads"):
            client.push_host_state(server.address, later(1), 0, 2, document(later(1), 0))
        tier.note_complete(later(1))
        save_shards(tier, later(2), random_shards(10_000))
        tier.note_complete(later(2))
        new = save_shards(tier, later(3), random_shards(10_000))  # in the slot of step 1
        fetch_all(client, server.address, new)
        with pytest.raises(NotHeld):
            client.fetch_contents(server.address, old)
        inventory = client.inventory(server.address)
        assert {held.save for held in inventory.tensors} == {later(2), later(3)}
        assert inventory.known_complete == later(2)
        other = open_tier(ramdisk, process_index=1)
        digest = save_shards(other, later(3), random_shards(77))
        fetch_all(client, server.address, digest)
        other.close()
    reader.close()
    tier.close()


def test_what_is_not_whole_is_not_served(ramdisk: Path, client: TransferClient) -> None:
    tier = open_tier(ramdisk)
    digest = save_shards(tier, later(1), random_shards(100_000))
    tier.publish_host_state(later(1), 0, 2, document(later(1), 0))
    directory = tier.path
    tier.close()
    reader = ReadOnlyRamdisk(ramdisk, RUN_ID)
    (slot,) = directory.glob("slot_?.manifest.json")
    good = slot.read_bytes()
    (state,) = directory.glob("host_state/*/*.json")
    with TransferServer(reader, run_id=RUN_ID, secret=SECRET) as server:
        fetch_all(client, server.address, digest)
        state.write_bytes(state.read_bytes()[:-3])
        slot.write_bytes(good[:-3])
        inventory = client.inventory(server.address)
        assert inventory.tensors == inventory.host_states == ()
        slot.write_bytes(good)
        assert [held.digest for held in client.inventory(server.address).tensors] == [digest]
        os.truncate(directory / slot.name.replace("manifest.json", "bin"), 4096)
        with pytest.raises(NotHeld, match="cannot be read"):
            fetch_all(client, server.address, digest)
    reader.close()


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


def test_server_gives_back_the_memory_of_a_run_that_was_freed(
    ramdisk: Path, secret_file: Path, client: TransferClient, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = open_tier(ramdisk)
    digest = save_shards(tier, later(1), random_shards(2_000_000, 3))
    free = ["doctor", "--clean", "--served", "--local-dir", str(ramdisk), "--run-id", RUN_ID]
    free += ["--older-than", "0", "--yes", "--peers"]
    with serving(ramdisk, RUN_ID, "--secret-file", secret_file) as (server, address):
        fetch_all(client, address, digest)  # the server has the slot mapped
        assert eckpt_here(*free, "none.invalid:7411") == 1
        assert "stays: in use by process" in capsys.readouterr().out
        tier.close()
        trainer = address.rpartition("@")[2]  # whatever answers there may be a trainer
        assert eckpt_here(*free, f"none.invalid:7411,{trainer}") == 1
        assert f"stays: a process answers at {trainer}" in capsys.readouterr().out
        assert eckpt_here(*free, f"none.invalid:7411,127.0.0.1:{free_port()}") == 0
        assert "removed: process_00000" in capsys.readouterr().out
        assert not (ramdisk / RUN_ID).exists()
        deadline_s = time.monotonic() + 60
        while held := deleted_files(server.pid):
            assert time.monotonic() < deadline_s, held
            time.sleep(0.05)
        assert server.poll() is None


def test_reader_lets_go_of_slots_that_a_trainer_deleted(ramdisk: Path) -> None:
    tier = open_tier(ramdisk)
    digest = save_shards(tier, later(1), random_shards(2_000_000, 3))
    reader = ReadOnlyRamdisk(ramdisk, RUN_ID)
    with reader.mapping_for(digest):
        pass
    tier.remove(1)
    tier.reserve(mmap.PAGESIZE)  # in place of the larger one
    assert any(str(ramdisk) in name for name in deleted_files(os.getpid()))
    reader.let_go()
    assert not [name for name in deleted_files(os.getpid()) if str(ramdisk) in name]
    reader.close()
    tier.close()


def deleted_files(pid: int) -> list[str]:
    """Return what a process has open or mapped of files that are removed."""
    mapped = [
        line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "slot_" in line
    ]
    opened = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]
    return [
        each for each in (*mapped, *opened) if each.endswith("(deleted)") and "process_" in each
    ]


def test_reader_needs_a_directory(ramdisk: Path) -> None:
    with pytest.raises(LocalTierError, match="not a directory"):
        ReadOnlyRamdisk(ramdisk / "none", RUN_ID)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_serves_until_it_is_told_to_stop(
    ramdisk: Path, secret_file: Path, client: TransferClient, number: signal.Signals
) -> None:
    tier = open_tier(ramdisk)
    shards = random_shards(2_000_000, 3)
    digest = save_shards(tier, later(1), shards)
    tier.close()
    words = ("--secret-file", secret_file)
    with serving(ramdisk, RUN_ID, *words, stderr=subprocess.PIPE) as (server, address):
        inventory: HolderInventory = client.inventory(address)
        assert inventory.holder == f"server/{address.rpartition('@')[2]}"
        assert inventory.process_index is None
        assert fetch_all(client, address, digest)[0] == shards
        server.send_signal(number)
        _, errors = server.communicate(timeout=60)
        assert (server.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("options", "env", "match"),
    [
        ((), {}, "ECKPT_SECRET"),
        ((), {"ECKPT_SECRET": "short"}, "32 to 4096"),
        (("--bind", "0.0.0.0"), {"ECKPT_SECRET": SECRET.decode()}, "all interfaces"),
    ],
)
def test_command_says_what_it_lacks(
    ramdisk: Path, options: tuple[str, ...], env: dict[str, str], match: str
) -> None:
    done = eckpt("serve", "--local-dir", ramdisk, "--run-id", RUN_ID, *options, env=env)
    assert done.returncode == 2
    assert match in done.stderr
