"""``eckpt ls --survives``: copies on several ramdisks and at live peers, and costly losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from looks import eckpt_here, tree_of
from tiers_support import (
    LAYOUT,
    LEAVES,
    RUN_ID,
    SHARDS,
    document,
    open_tier,
    save_id,
    write_save,
)

from emergency_ckpt.cluster import ProcessHoldings
from emergency_ckpt.core.shard_layout import Layout, lay_out
from emergency_ckpt.run_secret import SECRET_VARIABLE, generate_secret
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk
from emergency_ckpt.transfer import TransferServer


def fill(
    ramdisk: Path,
    slice_index: int,
    *steps: int,
    count: int = 4,
    layout: Layout = LAYOUT,
) -> Path:
    """One process of ``count`` with ``layout`` of each step, and the host states of all."""
    place = {"process_index": slice_index, "process_count": count, "slice_index": slice_index}
    tier = open_tier(ramdisk, **place)
    tier.reserve(layout.size_bytes)
    for step in steps:
        write_save(tier, step, layout=layout)
        for owner in range(count):
            tier.publish_host_state(save_id(step), owner, count, document(step, owner, count))
    tier.close()
    return ramdisk


def survives(
    capsys: pytest.CaptureFixture[str], *hosts: Path, words: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any]]:
    places = [word for host in hosts for word in ("--local-dir", str(host))]
    code = eckpt_here("ls", "--survives", "--json", *places, *words)
    return code, json.loads(capsys.readouterr().out)


def losses_of(report: dict[str, Any]) -> dict[str, tuple[int | None, int | None]]:
    return {
        f"{loss['what']} {Path(loss['name']).name}": (loss["left_step"], loss["steps_lost"])
        for loss in report["losses"]
    }


def test_survives_copies_on_two_slices_outlive_either(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [fill(ramdisk / str(index), index, 10, 20) for index in range(2)]
    before = tree_of(ramdisk)
    code, report = survives(capsys, *hosts)
    assert (code, report["format"], report["step"], report["hosts"]) == (0, 1, 20, 2)
    assert set(losses_of(report).values()) == {(20, 0)}
    assert set(losses_of(report)) == {"host 0", "host 1", "slice 0", "slice 1"}
    assert report["shards"] == {"2": 5}
    assert eckpt_here("ls", "--survives", "--local-dir", hosts[0], "--local-dir", hosts[1]) == 0
    assert "outlives any one host and any one slice" in capsys.readouterr().out
    assert tree_of(ramdisk) == before


def test_survives_names_the_host_that_would_cost_the_step(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [fill(ramdisk / "a", 0, 10, 20), fill(ramdisk / "b", 0, 10)]
    code, report = survives(capsys, *hosts)
    assert (code, report["step"]) == (1, 20)
    assert losses_of(report) == {"host a": (10, 10), "host b": (20, 0)}
    assert min(report["host_states"]) == "1"
    code, report = survives(capsys, hosts[0])
    assert losses_of(report) == {"host a": (None, None)}
    assert eckpt_here("ls", "--survives", "--local-dir", hosts[0]) == 1
    assert "nothing" in capsys.readouterr().out


def test_survives_without_whole_step_exits_with_1(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = fill(ramdisk / "a", 0, 10)
    for path in host.rglob("process_*_of_*.json"):
        path.unlink()
    code, report = survives(capsys, host)
    assert (code, report["step"], report["losses"]) == (1, None, [])
    assert eckpt_here("ls", "--survives", "--dir", ramdisk) == 2


def test_survives_asks_live_peers(
    ramdisk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = generate_secret()
    here = fill(ramdisk / "here", 0, 10, 20)
    there = fill(ramdisk / "there", 1, 20)
    holdings = ReadOnlyRamdisk(there, RUN_ID)
    with TransferServer(holdings, run_id=RUN_ID, secret=secret) as server:
        words = ("--peers", f"{server.contact},127.0.0.1:1", "--run-id", RUN_ID)
        assert eckpt_here("ls", "--survives", *words) == 2
        assert "needs the run's secret" in capsys.readouterr().err
        monkeypatch.setenv(SECRET_VARIABLE, secret.decode())
        code, report = survives(capsys, words=words)
        assert (code, report["step"], report["hosts"]) == (1, 20, 1)
        (fault,) = report["faults"]
        assert fault["where"] == "127.0.0.1:1"
        code, report = survives(capsys, here, words=(*words[:1], server.contact, *words[2:]))
        assert (code, report["hosts"], report["faults"]) == (0, 2, [])
        assert set(losses_of(report).values()) == {(20, 0)}
    holdings.close()


def stored_too(ramdisk: Path, tmp_path: Path) -> tuple[object, ...]:
    """Return the words that name a ramdisk and a directory, which have one step."""
    host = fill(ramdisk / "a", 0, 10)
    directory = tmp_path / "stored"
    drained = ("drain", "--local-dir", host, "--dir", directory, "--run-id", RUN_ID)
    assert eckpt_here(*drained) == 0
    return ("--local-dir", host, "--dir", directory, "--run-id", RUN_ID)


def test_survives_says_that_storage_has_the_step(
    ramdisk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = stored_too(ramdisk, tmp_path)
    capsys.readouterr()
    assert eckpt_here("ls", "--survives", *places) == 0
    lines = capsys.readouterr().out
    assert "any 0 hosts" not in lines
    assert "shards: 5 with 1 copy; the loss of 1 host costs some of them in RAM" in lines
    assert "the newest step outlives any one host: storage has step 10 too" in lines


def test_survives_counts_steps_that_storage_leaves(
    ramdisk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = stored_too(ramdisk, tmp_path)
    fill(ramdisk / "a", 0, 20)
    capsys.readouterr()
    assert eckpt_here("ls", "--survives", *places) == 1
    lines = capsys.readouterr().out
    assert "step 10 in storage" in lines
    assert "outlives any one host" not in lines


def test_survives_counts_a_ramdisk_and_its_process_once(
    ramdisk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = generate_secret()
    monkeypatch.setenv(SECRET_VARIABLE, secret.decode())
    one = fill(ramdisk / "one", 0, 10, count=2)
    tier = open_tier(one)
    holdings = ProcessHoldings(tier, 0)
    with TransferServer(holdings, run_id=RUN_ID, secret=secret) as server:
        words = ("--run-id", RUN_ID, "--peers", server.contact)
        _, report = survives(capsys, one, words=words)
    assert (report["hosts"], report["shards"]) == (1, {"1": 5})
    tier.close()


def test_survives_counts_parts_that_one_host_alone_has(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = lay_out(LEAVES, SHARDS[1:]), lay_out(LEAVES, SHARDS[:1] + SHARDS[2:])
    hosts = [fill(ramdisk / str(n), n, 20, count=2, layout=half) for n, half in enumerate(halves)]
    code, report = survives(capsys, *hosts)
    assert (code, report["shards"]) == (1, {"1": 2, "2": 3})
