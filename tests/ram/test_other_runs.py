"""Leftovers of other runs on a ramdisk stay until the room is needed or a user removes them."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec
import pytest
from looks import USAGE_EXIT_CODE, eckpt_here
from other_processes import other_process
from tiers_support import make_old, open_tier

from emergency_ckpt import files
from emergency_ckpt.errors import RamdiskFull
from emergency_ckpt.ram import OtherRuns, left_runs, remove_run
from emergency_ckpt.ram.leftovers import LeftRun, holder_of

DAY_S = 86400.0


def leave(ramdisk: Path, run_id: str, age_s: float, *, processes: int = 1) -> None:
    tiers = [open_tier(ramdisk, run_id=run_id, process_index=i) for i in range(processes)]
    for tier in tiers:
        tier.reserve(1 << 16)
        tier.close()
        make_old(tier.path, age_s)


def names(ramdisk: Path) -> list[str]:
    return sorted(path.name for path in ramdisk.iterdir())


def test_open_leaves_other_runs_alone(ramdisk: Path) -> None:
    leave(ramdisk, "crashed", 10 * DAY_S)
    tier = open_tier(ramdisk)
    tier.reserve(1 << 16)
    tier.close()
    assert names(ramdisk) == ["crashed", "run-7"]
    assert (ramdisk / "crashed" / "process_00000" / "slot_0.bin").exists()


def test_reserve_removes_only_what_it_needs(ramdisk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(ramdisk, "a", 2 * DAY_S)
    leave(ramdisk, "b", 3 * DAY_S, processes=2)
    leave(ramdisk, "c", 60)
    free_bytes = files.free_bytes
    needed = ["b"]

    def free_when_gone(dir_fd: int) -> int:
        return 0 if any((ramdisk / run).exists() for run in needed) else free_bytes(dir_fd)

    monkeypatch.setattr(files, "free_bytes", free_when_gone)
    removed: list[LeftRun] = []
    tier = open_tier(ramdisk, other_runs=OtherRuns(ramdisk, "run-7", DAY_S, removed.append))
    tier.reserve(1 << 16)
    assert [run.run_id for run in removed] == ["b"]
    assert removed[0].size_bytes >= 4 << 16
    assert names(ramdisk) == ["a", "c", "run-7"]
    needed.append("c")
    with pytest.raises(RamdiskFull, match=r"other runs use \d+ bytes of it \(c\)"):
        tier.reserve(1 << 20)
    assert names(ramdisk) == ["c", "run-7"]


def test_run_with_a_live_process_is_not_removed(ramdisk: Path) -> None:
    leave(ramdisk, "alive", DAY_S, processes=2)
    with other_process(ramdisk, "hold", "alive"):
        for path in (ramdisk / "alive").iterdir():
            make_old(path, 3 * DAY_S)
        (left,) = left_runs(ramdisk)
        assert left.age_s(time.time()) > 2 * DAY_S
        assert holder_of(left) is not None
        assert not remove_run(left)
        assert not OtherRuns(ramdisk, "run-7").give_room()
        assert len(list((ramdisk / "alive").iterdir())) == 2
    assert OtherRuns(ramdisk, "run-7").give_room()
    assert names(ramdisk) == []


def test_run_that_is_served_is_not_removed(ramdisk: Path) -> None:
    leave(ramdisk, "served", 2 * DAY_S)
    with other_process(ramdisk, "serve", "served"):
        (left,) = left_runs(ramdisk)
        assert not remove_run(left)
        assert (ramdisk / "served" / "process_00000" / "slot_0.bin").exists()
    assert remove_run(left)


def test_clean_lists_and_removes_only_when_told(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(ramdisk, "old", 2 * DAY_S)
    leave(ramdisk, "new", 60)
    clean = ["doctor", "--clean", "--local-dir", str(ramdisk)]
    assert eckpt_here(*clean) == 0
    old, new = capsys.readouterr().out.splitlines()
    assert old.startswith("old  ")
    assert "2.0d old  would be removed (--yes)" in old
    assert "stays: not old enough" in new
    assert names(ramdisk) == ["new", "old"]
    assert eckpt_here(*clean, "--yes") == 0
    assert names(ramdisk) == ["new"]
    assert eckpt_here(*clean, "--yes", "--run-id", "new", "--older-than", "1h") == 1
    assert eckpt_here(*clean, "--yes", "--run-id", "new", "--older-than", "0") == 0
    assert eckpt_here(*clean, "--run-id", "new") == 1
    assert names(ramdisk) == []


def test_clean_names_the_process_that_has_a_run(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with other_process(ramdisk, "hold", "alive"):
        arguments = [
            "doctor",
            "--clean",
            "--local-dir",
            str(ramdisk),
            "--older-than",
            "0s",
            "--yes",
        ]
        assert eckpt_here(*arguments, "--run-id", "alive") == 1
        assert "stays: in use by process" in capsys.readouterr().out
        assert names(ramdisk) == ["alive"]


def test_clean_shows_a_forged_host_name_as_text(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of an owner is a file: its text must not act on a terminal, or add a line."""
    name = "a\x1b[2Jb\nother  1.0 MiB  9.0d old  removed: process_00000\u202e"
    with other_process(ramdisk, "hold", "alive"):
        record = ramdisk / "alive" / "process_00000" / "owner.lock"
        owner = msgspec.json.decode(record.read_bytes())
        record.write_bytes(msgspec.json.encode(owner | {"hostname": name}))
        assert eckpt_here("doctor", "--clean", "--local-dir", str(ramdisk)) == 0
    out = capsys.readouterr().out
    assert r"on host a\x1b[2Jb\nother  1.0 MiB  9.0d old  removed: process_00000\u202e" in out
    assert len(out.splitlines()) == 1
    assert out[:-1].isprintable()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError("timed out"), "does not answer, and may live: timed out"),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), "cannot be resolved now: try again"),
    ],
)
def test_served_run_stays_while_a_peer_may_live(
    ramdisk: Path,
    error: OSError,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    leave(ramdisk, "done", 60)

    def fail(*_: object, **__: object) -> None:
        raise error

    name = "getaddrinfo" if isinstance(error, socket.gaierror) else "create_connection"
    monkeypatch.setattr(socket, name, fail)
    words = ["doctor", "--clean", "--served", "--local-dir", str(ramdisk), "--run-id", "done"]
    assert eckpt_here(*words, "--peers", "127.0.0.1:7411", "--older-than", "0", "--yes") == 1
    assert said in capsys.readouterr().out
    assert names(ramdisk) == ["done"]


@pytest.mark.parametrize("left_out", ["--clean", "--run-id", "--peers"])
def test_served_needs_a_run_and_its_peers(
    ramdisk: Path, left_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"--clean": [], "--run-id": ["done"], "--peers": ["127.0.0.1:7411"]}
    del words[left_out]
    given = [word for name, values in words.items() for word in (name, *values)]
    assert eckpt_here("doctor", "--served", "--local-dir", str(ramdisk), *given) == USAGE_EXIT_CODE
    assert "--served needs --clean" in capsys.readouterr().err


@pytest.mark.parametrize("age", ["", "x", "-1", "1w", "nan", "1e9"])
def test_clean_refuses_an_age_that_is_none(ramdisk: Path, age: str) -> None:
    with pytest.raises(SystemExit):
        eckpt_here("doctor", "--clean", "--local-dir", str(ramdisk), "--older-than", age)


def test_clean_of_no_directory_is_an_error(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eckpt_here("doctor", "--clean", "--local-dir", str(ramdisk / "absent")) == 1
    assert "absent" in capsys.readouterr().err
