"""``eckpt ls STEP`` of steps in RAM and in storage; it changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from looks import eckpt, eckpt_json, tree_of
from persistent_steps import fill, life, save_over
from tiers_support import (
    LAYOUT,
    LEAVES,
    open_tier,
    save_id,
    shard_bytes,
    whole_steps,
)
from tiers_support import (
    fill as fill_slot,
)

from emergency_ckpt._native import crc32c
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.types import Contents


def two_copies(ramdisk: Path, step: int = 5) -> None:
    whole_steps(ramdisk, step, value="x" * 999)


def test_show_of_ram_step_has_every_shard(ramdisk: Path) -> None:
    two_copies(ramdisk)
    before = tree_of(ramdisk)
    status, found = eckpt_json("ls", 5, "--local-dir", ramdisk)
    assert tree_of(ramdisk) == before
    assert (status, found["tier"], found["state"], found["faults"]) == (0, "local", "whole", [])
    leaves = {leaf["path"]: leaf for leaf in found["leaves"]}
    assert {(p, tuple(leaf["shape"])) for p, leaf in leaves.items()} == {
        (leaf.path, leaf.global_shape) for leaf in LEAVES
    }
    assert leaves["rng"]["key_impl"] == "threefry2x32"
    shards = {
        (path, str(shard["box"])): shard
        for path, leaf in leaves.items()
        for shard in leaf["shards"]
    }
    for placed, data in zip(LAYOUT.shards, shard_bytes(5), strict=True):
        shard = shards[placed.shard.leaf, str([list(span) for span in placed.shard.box])]
        assert shard["crc32c"] == f"{crc32c(data):08x}"
        assert shard["size_bytes"] == placed.nbytes
        assert len(shard["holders"]) == 2
    states = found["host_states"]
    assert [(each["process"], len(each["holders"])) for each in states] == [
        (owner, 2) for owner in range(4)
    ]
    assert states[0]["value"].endswith("... (999 characters)")


def test_show_json_has_the_fields_of_the_listed_step(ramdisk: Path) -> None:
    two_copies(ramdisk)
    _, listing = eckpt_json("ls", "--local-dir", ramdisk)
    _, shown = eckpt_json("ls", 5, "--local-dir", ramdisk)
    (listed,) = listing["steps"]
    del listed["age_s"]
    assert shown.pop("age_s") >= 0
    assert {field: shown[field] for field in listed} == listed


def test_show_of_differing_replicas_tells_both(ramdisk: Path) -> None:
    two_copies(ramdisk)
    tier = open_tier(ramdisk, process_index=7)
    tier.reserve(LAYOUT.size_bytes)
    with tier.begin_write(save_id(5), LAYOUT.size_bytes) as writer:
        wrong = fill_slot(writer, save_id(6))
        writer.stage(Contents(save_id(5), wrong.leaves, wrong.shards))
        writer.publish()
    tier.close()
    _, found = eckpt_json("ls", 5, "--local-dir", ramdisk)
    (count,) = [leaf for leaf in found["leaves"] if leaf["path"] == "count"]
    assert len(count["shards"]) == 2
    assert len({shard["crc32c"] for shard in count["shards"]}) == 2


def test_show_of_absent_step_is_an_error(ramdisk: Path) -> None:
    two_copies(ramdisk)
    done = eckpt("ls", 6, "--local-dir", ramdisk)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no place that was given has it" in done.stderr
    assert eckpt("ls", "x", "--local-dir", ramdisk).returncode == 2


def test_show_of_stored_step_has_boxes_and_host_state(tmp_path: Path) -> None:
    save_over(PersistentTier(str(tmp_path)), 3, 7, life(1))
    before = tree_of(tmp_path)
    status, found = eckpt_json("ls", 3, "--dir", tmp_path)
    assert tree_of(tmp_path) == before
    assert (status, found["tier"], found["state"]) == (0, "persistent", "whole")
    (leaf,) = found["leaves"]
    assert (leaf["path"], leaf["dtype"], leaf["shape"], leaf["size_bytes"]) == (
        "w",
        "int64",
        [4],
        32,
    )
    assert [each["value"] for each in found["host_states"]] == [{"at": 7}]


def test_show_of_stored_step_names_damaged_host_state(tmp_path: Path) -> None:
    save_over(PersistentTier(str(tmp_path)), 3, 7, life(1))
    (document_path,) = (tmp_path / "host_state" / "3").glob("process_*.json")
    document_path.write_bytes(document_path.read_bytes().replace(b"7", b"8"))
    status, found = eckpt_json("ls", 3, "--dir", tmp_path)
    assert status == 1
    assert [fault["where"] for fault in found["faults"]] == [str(document_path)]


def test_show_of_plain_orbax_step_has_its_leaves(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.StandardSave({"a": {"w": np.arange(4, dtype=np.int32)}}))
    status, found = eckpt_json("ls", 7, "--dir", tmp_path)
    assert status == 0
    assert [(leaf["path"], leaf["dtype"], leaf["shape"]) for leaf in found["leaves"]] == [
        ("a/w", "int32", [4])
    ]


def test_show_prefers_ram_unless_a_tier_is_named(ramdisk: Path, tmp_path: Path) -> None:
    two_copies(ramdisk)
    fill(str(tmp_path), [5])
    places = ["--local-dir", ramdisk, "--dir", tmp_path]
    assert eckpt_json("ls", 5, *places)[1]["tier"] == "local"
    assert eckpt_json("ls", 5, *places, "--tier", "persistent")[1]["tier"] == "persistent"


def test_show_without_json_prints_a_table(ramdisk: Path) -> None:
    two_copies(ramdisk)
    done = eckpt("ls", 5, "--local-dir", ramdisk)
    assert (done.returncode, done.stderr) == (0, "")
    assert "params/w  float32" in done.stdout
    assert "[0:32, 0:32]" in done.stdout
    assert "0,1" in done.stdout
    assert str(ramdisk) in done.stdout
