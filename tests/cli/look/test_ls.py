"""``eckpt ls`` on ramdisks and directories, whole and damaged; it changes nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from damage import flip
from looks import eckpt, eckpt_here, eckpt_json, tree_of
from persistent_steps import fill, life, save_over
from tiers_support import (
    LAYOUT,
    document,
    open_tier,
    save_id,
    whole_steps,
    write_save,
)

from emergency_ckpt.run_secret import SECRET_VARIABLE
from emergency_ckpt.storage import PersistentTier

PROBE = """
import sys
from emergency_ckpt.tools.cli.main import main
status = main(sys.argv[1:])
heavy = [name for name in ("jax", "orbax.checkpoint", "tensorstore") if name in sys.modules]
print(heavy, file=sys.stderr)
"""
BACKEND = """
import sys
from emergency_ckpt.tools.cli.main import main
status = main(sys.argv[1:])
bridge = sys.modules.get("jax._src.xla_bridge")
print([] if bridge is None else list(bridge._backends), file=sys.stderr)
"""


def test_ls_of_ramdisk_lists_whole_steps(ramdisk: Path) -> None:
    whole_steps(ramdisk, 5, 6, owners=2)
    before = tree_of(ramdisk)
    status, found = eckpt_json("ls", "--local-dir", ramdisk)
    assert tree_of(ramdisk) == before
    assert status == 0
    assert [(s["step"], s["tier"], s["state"], s["reason"]) for s in found["steps"]] == [
        (6, "local", "whole", ""),
        (5, "local", "whole", ""),
    ]
    newest = found["steps"][0]
    assert newest["processes"] == 4
    assert newest["run_id"] == "run-7"
    assert newest["size_bytes"] == sum(placed.nbytes for placed in LAYOUT.shards)
    assert newest["held_bytes"] == 2 * newest["size_bytes"]
    assert len(newest["holders"]) == 2
    assert [p["known_complete"] for p in found["processes"]] == [6, 6]
    assert [p["is_running"] for p in found["processes"]] == [True, True]  # this process's tiers
    assert found["faults"] == []


def test_ls_of_lost_host_names_what_is_missing(ramdisk: Path) -> None:
    tier = open_tier(ramdisk)
    tier.reserve(LAYOUT.size_bytes)
    tier.publish_host_state(save_id(5), 0, 4, document(5))
    write_save(tier, 5)
    tier.close()
    status, found = eckpt_json("ls", "--local-dir", ramdisk)
    (step,) = found["steps"]
    assert status == 0
    assert step["state"] == "incomplete"
    assert "3 of 4 host states are held nowhere: process 1, 2, 3" in step["reason"]


def test_ls_of_several_ramdisks_puts_them_together(ramdisk: Path) -> None:
    for host in (0, 1):
        (ramdisk / f"host{host}").mkdir(mode=0o700)
    for index in range(2):
        whole_steps(ramdisk / f"host{index}", 5, processes=[index], owners=2)
    alone = eckpt_json("ls", "--local-dir", ramdisk / "host0")[1]["steps"]
    both = eckpt_json("ls", "--local-dir", ramdisk / "host0", "--local-dir", ramdisk / "host1")[1]
    assert [s["state"] for s in alone] == ["incomplete"]
    assert [s["state"] for s in both["steps"]] == ["whole"]


@pytest.mark.parametrize("fault", ["flipped", "cut", "link", "folder", "pipe", "slot_gone"])
def test_ls_of_damaged_manifest_lists_the_others(ramdisk: Path, fault: str) -> None:
    whole_steps(ramdisk, 5, 6, owners=2)
    directory = ramdisk / "run-7" / "process_00000"
    manifest = directory / "slot_0.manifest.json"
    match fault:
        case "flipped":
            flip(manifest)
        case "cut":
            manifest.write_bytes(manifest.read_bytes()[:50])
        case "link":
            manifest.rename(directory / "elsewhere")
            manifest.symlink_to(directory / "elsewhere")
        case "folder":
            manifest.unlink()
            manifest.mkdir()
        case "pipe":
            manifest.unlink()
            os.mkfifo(manifest)
        case _:
            (directory / "slot_0.bin").unlink()
    before = None if fault == "pipe" else tree_of(ramdisk)
    status, found = eckpt_json("ls", "--local-dir", ramdisk)
    assert before is None or tree_of(ramdisk) == before
    assert status == 1
    assert [(s["step"], s["state"]) for s in found["steps"]] == [(6, "whole"), (5, "whole")]
    (told,) = found["faults"]
    assert told["where"].startswith(str(directory))
    assert "slot_0" in told["where"] + told["problem"]


def test_ls_of_foreign_files_ignores_them(ramdisk: Path) -> None:
    whole_steps(ramdisk, 5, owners=2)
    directory = ramdisk / "run-7" / "process_00000"
    (ramdisk / "notes.txt").write_text("not ours")
    (ramdisk / "other").mkdir()
    (directory / "slot_x.manifest.json").write_text("{}")
    (directory / "host_state" / "junk").write_text("junk")
    (ramdisk / "run-7" / "process_00009").symlink_to(directory)
    before = tree_of(ramdisk)
    status, found = eckpt_json("ls", "--local-dir", ramdisk)
    assert tree_of(ramdisk) == before
    assert status == 0
    assert [s["state"] for s in found["steps"]] == ["whole"]
    assert len(found["processes"]) == 2


def test_ls_of_open_process_directory_is_a_fault(ramdisk: Path) -> None:
    whole_steps(ramdisk, 5, owners=2)
    (ramdisk / "run-7" / "process_00001").chmod(0o755)
    status, found = eckpt_json("ls", "--local-dir", ramdisk)
    assert status == 1
    assert "open to others" in found["faults"][0]["problem"]
    assert "chmod" in found["faults"][0]["hint"]
    assert [s["state"] for s in found["steps"]] == ["incomplete"]


@pytest.mark.parametrize("option", ["--local-dir", "--dir"])
def test_ls_of_absent_directory_is_a_fault(tmp_path: Path, option: str) -> None:
    status, found = eckpt_json("ls", option, tmp_path / "absent")
    assert status == 1
    assert [fault["where"] for fault in found["faults"]] == [str(tmp_path / "absent")]
    (tmp_path / "file").write_text("")
    status, found = eckpt_json("ls", option, tmp_path / "file")
    assert status == 1
    assert len(found["faults"]) == 1


def test_ls_of_absent_run_is_a_fault(ramdisk: Path) -> None:
    whole_steps(ramdisk, 5, owners=2)
    status, found = eckpt_json("ls", "--local-dir", ramdisk, "--run-id", "other")
    assert status == 1
    assert "no run 'other'" in found["faults"][0]["problem"]


def test_ls_without_a_place_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert eckpt_here("ls") == 2
    assert "--local-dir" in capsys.readouterr().err
    assert eckpt_here("ls", "--local-dir", "/dev/shm", "--run-id", "../x") == 2


def test_ls_of_storage_lists_steps_and_faults(tmp_path: Path) -> None:
    fill(str(tmp_path), [10, 20, 30])
    shutil.rmtree(tmp_path / "20")
    (tmp_path / "40.orbax-checkpoint-tmp-1").mkdir()
    before = tree_of(tmp_path)
    status, found = eckpt_json("ls", "--dir", tmp_path)
    assert tree_of(tmp_path) == before
    assert status == 1
    assert [(s["step"], s["state"]) for s in found["steps"]] == [
        (30, "whole"),
        (20, "damaged"),
        (10, "whole"),
    ]
    assert [s["size_bytes"] for s in found["steps"] if s["state"] == "whole"] == [32, 32]
    assert all(s["age_s"] is not None for s in found["steps"] if s["state"] == "whole")
    assert [(f["step"], "tensors are gone" in f["problem"]) for f in found["faults"]] == [
        (20, True)
    ]
    assert found["directory"]["unfinished"] == ["40.orbax-checkpoint-tmp-1"]


def test_ls_of_storage_looks_at_steps_the_log_lacks(tmp_path: Path) -> None:
    """Without its log, as after a copy of the steps by hand, each marker is looked at."""
    fill(str(tmp_path), [10, 20, 30])
    shutil.rmtree(tmp_path / "host_state" / "log")
    flip(tmp_path / "host_state" / "20" / "marker.json")
    before = tree_of(tmp_path)
    status, found = eckpt_json("ls", "--dir", tmp_path)
    assert tree_of(tmp_path) == before
    assert status == 1
    assert [(s["step"], s["state"], s["size_bytes"]) for s in found["steps"]] == [
        (30, "whole", 32),
        (20, "damaged", None),
        (10, "whole", 32),
    ]
    assert all(s["age_s"] is not None for s in found["steps"] if s["state"] == "whole")
    told = [(f["step"], "marker.json" in f["problem"]) for f in found["faults"] if "step" in f]
    assert told == [(20, True)]
    assert any("the step log is gone" in f["problem"] for f in found["faults"])


def test_ls_json_has_escapes_for_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    directory = bytes(tmp_path) + b"/of-\xff"
    os.makedirs(directory + b"/40.orbax-checkpoint-tmp-\xff")
    status, found = eckpt_json("ls", "--dir", os.fsdecode(directory))
    assert status == 0
    assert found["directory"]["unfinished"] == [r"40.orbax-checkpoint-tmp-\udcff"]
    assert found["directory"]["directory"] == rf"{tmp_path}/of-\udcff"


def test_ls_of_plain_orbax_step_lists_it(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.StandardSave({"w": np.arange(4)}))
    status, found = eckpt_json("ls", "--dir", tmp_path)
    assert status == 0
    (step,) = found["steps"]
    assert (step["step"], step["run_id"], step["state"]) == (7, "", "whole")


def test_ls_without_json_prints_a_table(ramdisk: Path) -> None:
    whole_steps(ramdisk, 5, 6, owners=2)
    done = eckpt("ls", "--local-dir", ramdisk)
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "STEP",
        "TIER",
        "AGE",
        "SIZE",
        "PROCESSES",
        "RUN",
        "INCARNATION",
        "STATE",
    ]
    assert [line.split()[0] for line in lines[1:3]] == ["6", "5"]
    assert lines[1].endswith("whole")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["ls"], ["ls", "5"], ["ls", "10"], ["ls", "--check"]])
def test_looks_at_own_steps_load_no_jax(ramdisk: Path, tmp_path: Path, command: list[str]) -> None:
    whole_steps(ramdisk, 5, owners=2)
    save_over(PersistentTier(str(tmp_path)), 10, 7, life(1))
    places = ["--local-dir", ramdisk, "--dir", tmp_path]
    program = [sys.executable, "-c", PROBE, *command, *places]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["[]"]


def test_ls_of_linked_ramdisk_is_a_fault(ramdisk: Path, tmp_path: Path) -> None:
    whole_steps(ramdisk, 5, owners=2)
    (tmp_path / "link").symlink_to(ramdisk)
    status, found = eckpt_json("ls", "--local-dir", tmp_path / "link")
    assert (status, found["steps"]) == (1, [])
    assert "it is a link" in found["faults"][0]["problem"]


def test_ls_of_plain_step_initialises_no_backend(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.StandardSave({"w": np.arange(4)}))
    command = [sys.executable, "-c", BACKEND, "ls", "--dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_ls_reads_no_secret_where_no_peer_is_asked(
    ramdisk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    assert eckpt_here("ls", "--local-dir", ramdisk) == 0
    file = tmp_path / "secret"
    file.write_text("short")
    assert eckpt_here("ls", "--local-dir", ramdisk, "--secret-file", file) == 2
    assert "--secret-file needs --peers" in capsys.readouterr().err
