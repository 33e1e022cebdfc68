"""``eckpt ls --check`` names each damaged file, shard and box alone; it changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import numpy as np
import orbax.checkpoint as ocp
import pytest
from damage import flip
from looks import eckpt, eckpt_here, eckpt_json, tree_of
from persistent_steps import fill, life, save_over, writer_of
from tiers_support import LAYOUT, open_tier, save_id, whole_step, whole_steps
from tiers_support import fill as fill_slot

from emergency_ckpt._native import crc32c
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.types import Contents, ShardId

BACKENDS = """
import sys
from emergency_ckpt.tools.cli.main import main
status = main(sys.argv[1:])
bridge = sys.modules.get("jax._src.xla_bridge")
print([] if bridge is None else list(bridge._backends), file=sys.stderr)
"""


def on_ramdisk(ramdisk: Path) -> Path:
    """Steps 5 and 6 of one process, whole; returns its directory."""
    (directory,) = whole_steps(ramdisk, 5, 6, processes=[0])
    return directory


def in_storage(directory: Path, step: int, *, wrong: bool = False) -> None:
    """One step with the checksum of its one box, or with one of other bytes."""
    tier = PersistentTier(str(directory))
    writer = writer_of(tier)
    save_over(tier, step, 7, life(1), writer=writer)
    marker = tier.find(step).marker
    assert marker is not None
    for name in ("checksums.json", "marker.json"):
        (directory / "host_state" / str(step) / name).unlink()
    crc = crc32c(np.full(4, 8 if wrong else 7, np.int64).tobytes())
    documents = {0: (marker.digests[0], marker.empty[0])}
    entry = tier.finish(marker.save, documents, marker.leaves, {ShardId("w", ((0, 4),)): crc})
    writer.publish(entry, None)


def test_check_of_whole_ramdisk_is_good(ramdisk: Path) -> None:
    on_ramdisk(ramdisk)
    before = tree_of(ramdisk)
    status, found = eckpt_json("ls", "--check", "--local-dir", ramdisk, "--read-data")
    assert tree_of(ramdisk) == before
    assert (status, found["good"], found["faults"]) == (0, True, [])
    assert found["checked"] == {
        "manifests": 2,
        "host_states": 8,
        "shards": 2 * len(LAYOUT.shards),
        "bytes": 2 * sum(placed.nbytes for placed in LAYOUT.shards),
        "gone": 0,
    }


def test_check_with_data_names_damaged_shard(ramdisk: Path) -> None:
    directory = on_ramdisk(ramdisk)
    (placed,) = [each for each in LAYOUT.shards if each.shard.leaf == "params/b"]
    flip(directory / "slot_1.bin", placed.offset + 1)
    assert eckpt_json("ls", "--check", "--local-dir", ramdisk)[0] == 0
    before = tree_of(ramdisk)
    status, found = eckpt_json("ls", "--check", "--local-dir", ramdisk, "--read-data")
    assert tree_of(ramdisk) == before
    assert status == 1
    (fault,) = found["faults"]
    assert fault["where"] == str(directory / "slot_1.bin")
    assert fault["problem"].startswith("params/b[0:33] is damaged")
    assert fault["step"] == 6


def test_check_of_damaged_host_state_names_it(ramdisk: Path) -> None:
    directory = on_ramdisk(ramdisk)
    (path, *_) = sorted((directory / "host_state").glob("*-6/process_00002*"))
    path.write_bytes(path.read_bytes().replace(b"17", b"18"))
    status, found = eckpt_json("ls", "--check", "--local-dir", ramdisk)
    assert status == 1
    assert [fault["where"] for fault in found["faults"]] == [str(path)]


def test_check_of_differing_replicas_names_them(ramdisk: Path) -> None:
    on_ramdisk(ramdisk)
    # Hosts of their own, as two processes of one host would own different directories.
    (ramdisk / "b").mkdir(mode=0o700)
    other = open_tier(ramdisk / "b", process_index=1)
    other.reserve(LAYOUT.size_bytes)
    with other.begin_write(save_id(6), LAYOUT.size_bytes) as writer:
        wrong = fill_slot(writer, save_id(7))
        writer.stage(Contents(save_id(6), wrong.leaves, wrong.shards))
        writer.publish()
    other.close()
    status, found = eckpt_json(
        "ls", "--check", "--local-dir", ramdisk, "--local-dir", ramdisk / "b"
    )
    assert status == 1
    assert {fault["step"] for fault in found["faults"]} == {6}
    assert all("replicas differ" in fault["problem"] for fault in found["faults"])


def test_check_of_storage_with_data_is_good(tmp_path: Path) -> None:
    in_storage(tmp_path, 3)
    before = tree_of(tmp_path)
    status, found = eckpt_json("ls", "--check", "--dir", tmp_path, "--read-data")
    assert tree_of(tmp_path) == before
    assert (status, found["faults"]) == (0, [])
    assert found["checked"]["shards"] == 1
    assert found["checked"]["bytes"] == 32
    assert found["checked"]["host_states"] == 1


def test_check_of_storage_with_data_names_wrong_box(tmp_path: Path) -> None:
    in_storage(tmp_path, 3)
    in_storage(tmp_path, 4, wrong=True)
    assert eckpt_json("ls", "--check", "--dir", tmp_path)[0] == 0
    status, found = eckpt_json("ls", "--check", "--dir", tmp_path, "--read-data")
    assert status == 1
    (fault,) = found["faults"]
    assert fault["where"].endswith("4, w[0:4]")
    assert "CRC32C differs" in fault["problem"]
    assert fault["step"] == 4


def test_check_of_storage_with_data_names_lost_arrays(tmp_path: Path) -> None:
    in_storage(tmp_path, 3)
    in_storage(tmp_path, 4)
    for path in sorted((tmp_path / "4").rglob("d/*")):
        path.unlink()
    status, found = eckpt_json("ls", "--check", "--dir", tmp_path, "--read-data")
    assert status == 1
    assert {fault["step"] for fault in found["faults"]} == {4}


@pytest.mark.parametrize("name", ["checksums.json", "process_00000_of_00001.json"])
def test_check_of_storage_names_damaged_document(tmp_path: Path, name: str) -> None:
    save_over(PersistentTier(str(tmp_path)), 3, 7, life(1))
    path = tmp_path / "host_state" / "3" / name
    flip(path)
    status, found = eckpt_json("ls", "--check", "--dir", tmp_path)
    assert status == 1
    assert [(fault["where"], fault["step"]) for fault in found["faults"]] == [(str(path), 3)]


@pytest.mark.parametrize("fault", ["flipped", "gone", "other"])
def test_check_of_storage_names_damaged_marker(tmp_path: Path, fault: str) -> None:
    """The steps beside it are still checked, and `ls`, which goes by the log, lists them all."""
    fill(str(tmp_path), [10, 20, 30])
    marker = tmp_path / "host_state" / "20" / "marker.json"
    if fault == "flipped":
        flip(marker)
    elif fault == "gone":
        marker.unlink()
    else:
        marker.write_bytes((tmp_path / "host_state" / "30" / "marker.json").read_bytes())
    before = tree_of(tmp_path)
    listed = eckpt_json("ls", "--dir", tmp_path)[1]["steps"]
    assert [each["step"] for each in listed] == [30, 20, 10]
    status, found = eckpt_json("ls", "--check", "--dir", tmp_path)
    assert status == 1
    (told,) = found["faults"]
    assert (told["step"], "marker.json" in told["problem"]) == (20, True)
    assert found["checked"]["manifests"] == 2
    status, found = eckpt_json("ls", 20, "--dir", tmp_path)
    assert (status, found["state"]) == (1, "damaged")
    assert any("marker.json" in fault["problem"] for fault in found["faults"])
    assert tree_of(tmp_path) == before


def damage_a_block(step: Path, at: int) -> None:
    """Damage the largest block of an item where zstd's frame begins, in which it keeps its form."""
    block = max(step.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = block.read_bytes()
    block.write_bytes(data[:at] + bytes(8) + data[at + 8 :])


PATIENT = ("--timeout", 3000)


def test_undecodable_block_is_told_with_its_leaf(tmp_path: Path) -> None:
    """However long an answer of storage may take: what it has given is not asked for again."""
    stored = tmp_path / "stored"
    in_storage(stored, 3)
    damage_a_block(stored / "3", 14)
    done = eckpt("ls", "--check", "--read-data", "--dir", stored, *PATIENT)
    assert done.returncode == 1
    assert "leaf 'w'" in done.stdout + done.stderr
    assert "Error decoding" in done.stdout + done.stderr


def test_undecodable_chunk_of_plain_orbax_is_told_with_its_leaf(tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    noise = np.random.default_rng(0).integers(0, 5, (64, 64), np.int32)
    with ocp.CheckpointManager(stored) as manager:
        manager.save(7, args=ocp.args.StandardSave({"w": noise}))
    damage_a_block(stored / "7", 0)
    done = eckpt("ls", "--check", "--read-data", "--dir", stored, *PATIENT)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "leaf 'w'" in said or "7, w[" in said
    assert "decompress" in said.lower()


ANSWERED_AT_THE_END = """
import os, sys, time
class AtTheEnd:
    def __init__(self, path):
        self.path = path
    def __del__(self, os=os, time=time):
        try:
            fifo = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(fifo, b"x" * 64)
            os.close(fifo)
        except OSError:
            return
        time.sleep(1)
sys.modules["held until the interpreter ends"] = AtTheEnd(sys.argv.pop(1))
from emergency_ckpt.tools.cli.main import main
sys.exit(main())
"""


def test_check_of_silent_storage_ends_with_its_status(tmp_path: Path) -> None:
    """A thread that TensorStore holds aborts the interpreter that ends, if it is then let go."""
    in_storage(tmp_path, 3)
    (block,) = (tmp_path / "3" / "state" / "d").iterdir()
    block.unlink()
    os.mkfifo(block)
    words = ["ls", "--check", "--dir", tmp_path, "--read-data", "--timeout", 1]
    command = [sys.executable, "-c", ANSWERED_AT_THE_END, block, *words]
    for _ in range(3):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        assert "no answer in time" in done.stderr or "deliver in time" in done.stderr


def test_check_of_a_directory_that_is_none_is_not_good(ramdisk: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    status, found = eckpt_json("ls", "--check", "--dir", tmp_path)
    assert (status, found["good"]) == (1, False)
    assert [each["where"] for each in found["faults"]] == [str(tmp_path)]
    assert "no step of a job" in found["faults"][0]["problem"]
    in_storage(tmp_path / "run", 3)
    status, found = eckpt_json("ls", "--check", "--dir", tmp_path / "run", "--local-dir", ramdisk)
    assert status == 1
    assert [each["where"] for each in found["faults"]] == [str(ramdisk)]
    on_ramdisk(ramdisk)
    status, found = eckpt_json("ls", "--check", "--dir", tmp_path / "run", "--local-dir", ramdisk)
    assert (status, found["faults"]) == (0, [])


def test_check_of_plain_orbax_step_reads_it(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.StandardSave({"w": np.arange(4, dtype=np.int32)}))
    status, found = eckpt_json("ls", "--check", "--dir", tmp_path, "--read-data")
    assert (status, found["faults"]) == (0, [])
    assert found["checked"]["bytes"] == 16


def test_check_with_data_initialises_no_backend(ramdisk: Path, tmp_path: Path) -> None:
    on_ramdisk(ramdisk)
    save_over(PersistentTier(str(tmp_path)), 3, 7, life(1))
    places = ["--local-dir", ramdisk, "--dir", tmp_path]
    command = [sys.executable, "-c", BACKENDS, "ls", "--check", "--read-data", *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_check_without_json_ends_with_its_verdict(ramdisk: Path) -> None:
    directory = on_ramdisk(ramdisk)
    done = eckpt("ls", "--check", "--local-dir", ramdisk)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "good")
    (directory / "slot_0.manifest.json").write_text("{}")
    done = eckpt("ls", "--check", "--local-dir", ramdisk)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "1 fault:")
    assert "slot_0.manifest.json" in done.stderr


def test_check_while_a_tier_saves_finds_no_damage(ramdisk: Path) -> None:
    tier = open_tier(ramdisk)
    tier.reserve(LAYOUT.size_bytes)
    whole_step(tier, 1)
    stop, saved = threading.Event(), [1]

    def save() -> None:
        while not stop.is_set():
            saved[0] += 1
            whole_step(tier, saved[0])
            stop.wait(0.01)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        while saved[0] < 20:
            status, found = eckpt_json("ls", "--check", "--local-dir", ramdisk, "--read-data")
            assert (status, found["faults"]) == (0, [])
    finally:
        stop.set()
        thread.join()
    tier.close()


def calls_of_a_check(directory: Path) -> int:
    """Return how many functions of ``core`` a check of ``directory`` calls, in any thread."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/emergency_ckpt/core/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert eckpt_here("ls", "--check", "--dir", directory) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(calls)


def test_check_of_more_steps_costs_the_same_for_each(tmp_path: Path) -> None:
    """The log of 5,000 steps has as many entries: no step goes through all of them."""
    calls: dict[int, int] = {}
    for count in (3, 6, 12):
        fill(str(tmp_path / str(count)), range(1, count + 1))
        calls[count] = calls_of_a_check(tmp_path / str(count))
    among_few, among_many = (calls[6] - calls[3]) / 3, (calls[12] - calls[6]) / 6
    assert among_many == pytest.approx(among_few, rel=0.05)
