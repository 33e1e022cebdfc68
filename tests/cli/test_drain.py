"""``eckpt drain``: what was in RAM alone is in storage afterwards, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import orbax.checkpoint as ocp
import pytest
from looks import tree_of
from quarters import W, save_quarters
from tiers_support import RUN_ID
from world import World, same, save_all

from emergency_ckpt.cli.main import main
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.core.secret.keys import RunSecret
from emergency_ckpt.offline.drain_lock import BELOW
from emergency_ckpt.run_secret import SECRET_VARIABLE, generate_secret
from emergency_ckpt.tiers.local.read_only import ReadOnlyRamdisk
from emergency_ckpt.tiers.local.signatures import Signer
from emergency_ckpt.transfer.server import TransferServer

MAIN = [sys.executable, "-m", "emergency_ckpt.cli.main"]


class HostState:
    """An iterator's state, as a restore gives it back."""

    def __init__(self) -> None:
        self.at = -1

    def get_state(self) -> int:
        return self.at

    def set_state(self, at: int) -> None:
        self.at = at


def words_of(world: World, *more: str) -> list[str]:
    places = ["--dir", str(world.persistent), "--local-dir", str(world.ramdisk)]
    return ["drain", *places, *more]


def drain(
    world: World, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, dict[str, Any]]:
    code = main([*words_of(world, "--json"), *more])
    out = capsys.readouterr()
    assert out.out, out.err
    return code, json.loads(out.out)


def restored(world: World, **settings: Any) -> tuple[int | None, int]:
    """Restore, from both tiers; return the step and the position of the iterator."""
    iterator = HostState()
    with world.open_both(**settings) as ckpt:
        step, state = ckpt.restore(state=world.state(-1), host_state=iterator)
    assert step is None or same(state, world.state(step))
    return step, iterator.at


def save_with_iterator(world: World, *steps: int, **settings: Any) -> None:
    iterator = HostState()
    with world.open_both(**{"save_every_n_steps": 0, **settings}) as ckpt:
        for step in steps:
            iterator.at = 10 * step
            ckpt.save(step=step, state=world.state(step), host_state=iterator)
            ckpt.wait_until_finished()
        ckpt.check_for_errors()


def test_drain_then_all_ram_lost_restores_that_step(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_iterator(world, 1, 2, 3)
    before = tree_of(world.ramdisk)
    code, found = drain(world, capsys)
    assert (code, found["step"], found["is_written"]) == (0, 3, True)
    assert tree_of(world.ramdisk) == before
    stored = tree_of(world.persistent)
    code, found = drain(world, capsys)
    assert (code, found["step"], found["is_written"]) == (0, 3, False)
    assert tree_of(world.persistent) == stored
    world.lose_ram()
    assert restored(world) == (3, 30)
    save_with_iterator(world, 4, 5, save_every_n_steps=1)  # and the run saves there
    world.lose_ram()
    assert restored(world) == (5, 50)


def test_drain_older_than_storage_does_nothing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_iterator(world, 2)
    kept = world.ramdisk.with_name("kept")
    shutil.copytree(world.ramdisk, kept)
    save_with_iterator(world, 4, save_every_n_steps=1)
    world.lose_ram()
    kept.rename(world.ramdisk)
    stored = tree_of(world.persistent)
    code, found = drain(world, capsys)
    assert (code, found["step"], found["is_written"]) == (0, 4, False)
    assert tree_of(world.persistent) == stored


def test_drain_while_the_job_runs_is_refused(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with world.open_both(require_storage=True) as ckpt:  # the probe of storage is over then
        save_all(ckpt, world, 1)
        world.persistent.mkdir(exist_ok=True)
        stored = tree_of(world.persistent)
        assert main(words_of(world)) == 1
        assert f"process {os.getpid()}" in capsys.readouterr().err
        assert tree_of(world.persistent) == stored
        save_all(ckpt, world, 2, 3)
    assert drain(world, capsys)[1]["step"] == 3


def test_drain_of_rolled_back_lives_follows_the_timeline(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Storage has step 8 of a life that was rolled back to step 4; RAM has 6 of the new one."""
    save_with_iterator(world, 4, 8, save_every_n_steps=1)
    kept = world.ramdisk.with_name("kept")
    shutil.copytree(world.ramdisk, kept)
    iterator = HostState()
    with world.open_both(save_every_n_steps=0) as ckpt:
        # The arrays are not kept: while they live, they hold the ramdisk.
        assert ckpt.restore(step=4, state=world.state(-1), host_state=iterator)[0] == 4
        iterator.at = 61
        ckpt.save(step=6, state=world.state(6), host_state=iterator)
        ckpt.wait_until_finished()
    code, found = drain(world, capsys)
    assert (code, found["step"], found["is_written"]) == (0, 6, True)
    world.lose_ram()
    assert restored(world) == (6, 61)
    world.lose_ram()
    kept.rename(world.ramdisk)  # a host comes back with RAM of the old life: storage knows better
    code, found = drain(world, capsys)
    assert (found["step"], found["is_written"]) == (6, False)
    assert "rolled back" in " ".join(found["notes"])


def test_drain_into_another_runs_directory_is_refused(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with world.open_both(run_id="other", save_every_n_steps=1) as ckpt:
        save_all(ckpt, world, 1)
    save_with_iterator(world, 7, save_every_n_steps=0, dir=None)
    stored = tree_of(world.persistent)
    assert main(words_of(world)) == 2
    assert "several runs: other, run" in capsys.readouterr().err
    assert main(words_of(world, "--run-id", "run")) == 1
    assert "run 'other' saves there" in capsys.readouterr().err
    assert tree_of(world.persistent) == stored


def test_drain_of_damaged_copy_takes_an_older_step(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_iterator(world, 1, 2, local_keep_last_n=2)
    slots = {json.loads(path.read_bytes())["manifest"]["contents"]["save"]["step"]: path
             for path in world.ramdisk.rglob("slot_*.manifest.json")}  # fmt: skip
    slot = slots[2].with_name(slots[2].name.replace(".manifest.json", ".bin"))
    data = bytearray(slot.read_bytes())
    data[64] ^= 1
    slot.write_bytes(data)
    code, found = drain(world, capsys)
    assert (code, found["step"], found["is_written"]) == (1, 1, True)
    assert any("no copy is sound" in note for note in found["notes"])
    assert any("step 2 was whole in RAM once" in note for note in found["notes"])
    world.lose_ram()
    assert restored(world) == (1, 10)


def test_drain_without_whole_step_says_what_is_missing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_iterator(world, 3)
    for path in world.ramdisk.rglob("process_*_of_*.json"):
        path.unlink()
    code, found = drain(world, capsys)
    assert (code, found["step"]) == (1, None)
    assert any("no host state is held anywhere" in note for note in found["notes"])
    world.lose_ram()
    world.ramdisk.mkdir(mode=0o700)
    assert drain(world, capsys, "--run-id", "run")[0] == 1
    assert main(["drain", "--dir", str(world.persistent)]) == 2


def test_drain_with_the_secret_signs_the_step(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, generate_secret().decode())
    save_with_iterator(world, 3)
    assert drain(world, capsys)[0] == 0
    world.lose_ram()
    assert restored(world, require_signed=True) == (3, 30)


KILLED = """
import os, signal, sys
from emergency_ckpt.cli.main import main
from emergency_ckpt.offline import drain
from emergency_ckpt.tiers.persistent.steps.changes import StepChanges
from emergency_ckpt.tiers.persistent.tier import PersistentTier
def die(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)
points = {"documents": (drain, "write_late_step"), "tensors": (PersistentTier, "publish"),
          "marker": (StepChanges, "end_replacement")}
setattr(*points[sys.argv[1]], die)
main(sys.argv[2:])
"""


@pytest.fixture
def environment() -> dict[str, str]:
    """Of a machine on which JAX would find no accelerator that it is told to take."""
    return {**os.environ, "JAX_PLATFORMS": "no such platform"}


@pytest.mark.parametrize("point", ["documents", "tensors", "marker"])
def test_drain_killed_loses_nothing_and_is_repeated(
    world: World, capsys: pytest.CaptureFixture[str], environment: dict[str, str], point: str
) -> None:
    save_with_iterator(world, 2, save_every_n_steps=2)
    save_with_iterator(world, 5)
    command = [sys.executable, "-c", KILLED, point, *words_of(world)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (world.persistent / BELOW).exists()
    held, stored = (path.with_name(f"{path.name}-kept") for path in places_of(world))
    for path, kept in zip(places_of(world), (held, stored), strict=True):
        shutil.copytree(path, kept)
    # The job starts again, with its RAM or without: nothing half-written is taken.
    assert restored(world) == (5, 50)
    world.lose_ram()
    if point != "marker":
        shutil.rmtree(world.persistent)
        shutil.copytree(stored, world.persistent)
        assert restored(world) == (2, 20)
        world.lose_ram()
    # Or the drain is repeated.
    shutil.rmtree(world.persistent)
    stored.rename(world.persistent)
    held.rename(world.ramdisk)
    code, found = drain(world, capsys)
    assert (code, found["step"], found["is_written"]) == (0, 5, point != "marker")
    assert not (world.persistent / BELOW).exists()
    world.lose_ram()
    assert restored(world) == (5, 50)


def places_of(world: World) -> tuple[Path, Path]:
    return world.ramdisk, world.persistent


def test_drains_at_once_leave_one_whole_step(world: World, environment: dict[str, str]) -> None:
    save_with_iterator(world, 5)
    command = [*MAIN, *words_of(world)]
    both = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate()[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 1]), errors
    assert codes == [0, 0] or any("another drain is under way" in error for error in errors)
    assert not (world.persistent / BELOW).exists()
    world.lose_ram()
    assert restored(world) == (5, 50)


def test_drain_fetches_what_only_peers_have(
    ramdisk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four quarters of a leaf: two on this host, one on each of two others, which are served."""
    secret = generate_secret()
    monkeypatch.setenv(SECRET_VARIABLE, secret.decode())
    signer = Signer.of(RunSecret(RUN_ID, secret, given=True))
    hosts = [ramdisk / name for name in ("a", "b", "c")]
    for host, held in zip(hosts, ({0: [0, 1]}, {1: [2]}, {2: [3, 0]}), strict=True):
        save_quarters(host, held, signer)
    before = tree_of(ramdisk)
    words = ["drain", "--json", "--dir", str(tmp_path / "dir"), "--local-dir", str(hosts[0])]
    assert main(words) == 1
    assert "held nowhere" in capsys.readouterr().out
    with ExitStack() as stack:
        peers: list[str] = []
        for host in hosts[1:]:
            holdings = ReadOnlyRamdisk(host, RUN_ID, signer=signer)
            stack.callback(holdings.close)
            server = TransferServer(holdings, run_id=RUN_ID, secret=secret, bind_host="127.0.0.1")
            peers.append(stack.enter_context(server).contact)
        assert main([*words, "--peers", peers[0]]) == 1
        assert "held nowhere" in capsys.readouterr().out
        assert main([*words, "--peers", ",".join(["127.0.0.1:1", *peers])]) == 0
        found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["is_written"]) == (5, True)
    assert [note.partition(" ")[0] for note in found["notes"]] == ["127.0.0.1:1:"]
    assert tree_of(*hosts).keys() == {name for name in before if name != str(ramdisk)}
    with ocp.CheckpointManager(tmp_path / "dir") as manager:
        stored = manager.restore(5, args=ocp.args.StandardRestore())
    assert stored["w"].tobytes() == W.tobytes()


class _Trainer(ReadOnlyRamdisk):
    """The RAM of a process of a live job, as its server lists it."""

    def inventory(self) -> HolderInventory:
        return msgspec.structs.replace(super().inventory(), holder="process/0", process_index=0)


def test_drain_is_refused_while_a_peer_trains(
    ramdisk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = generate_secret()
    monkeypatch.setenv(SECRET_VARIABLE, secret.decode())
    save_quarters(ramdisk, {0: [0, 1, 2, 3]})
    holdings = _Trainer(ramdisk, RUN_ID)
    words = ["drain", "--dir", str(tmp_path / "dir"), "--run-id", RUN_ID]
    with TransferServer(holdings, run_id=RUN_ID, secret=secret, bind_host="127.0.0.1") as server:
        assert main([*words, "--peers", server.contact]) == 1
    holdings.close()
    assert "the job still runs" in capsys.readouterr().err
