"""``eckpt ls --survives``: copies on several ramdisks and at live peers, and costly losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from looks import tree_of
from tiers_support import (
    HOST_STATE_LIMIT_BYTES,
    LAYOUT,
    RUN_ID,
    document,
    save_id,
    write_save,
)

from emergency_ckpt.core.placement.held_copies import survival_of
from emergency_ckpt.core.placement.policies import Striped
from emergency_ckpt.core.placement.striping import blocks
from emergency_ckpt.core.placement.survivability import loss_probability, slices_that_may_fail
from emergency_ckpt.core.secret.keys import RunSecret
from emergency_ckpt.run_secret import SECRET_VARIABLE, generate_secret
from emergency_ckpt.tiers.local.read_only import ReadOnlyRamdisk
from emergency_ckpt.tiers.local.signatures import Signer
from emergency_ckpt.tiers.local.tier import LocalTier
from emergency_ckpt.tools.cli.main import main
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.types import Security, Writer


def fill(ramdisk: Path, slice_index: int, *steps: int, signer: Signer | None = None) -> Path:
    """One process that has all of each step, and the host states of all four."""
    tier = LocalTier.open(
        ramdisk,
        RUN_ID,
        Writer(process_index=slice_index, process_count=4, slice_index=slice_index, hostname="h"),
        host_state_limit_bytes=HOST_STATE_LIMIT_BYTES,
        copy_threads=1,
        signer=signer,
    )
    tier.reserve(LAYOUT.size_bytes)
    for step in steps:
        write_save(tier, step)
        for owner in range(4):
            tier.publish_host_state(save_id(step), owner, 4, document(step, owner))
    tier.close()
    return ramdisk


def survives(
    capsys: pytest.CaptureFixture[str], *hosts: Path, words: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any]]:
    places = [word for host in hosts for word in ("--local-dir", str(host))]
    code = main(["ls", "--survives", "--json", *places, *words])
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
    assert (code, report["step"], report["hosts"]) == (0, 20, 2)
    assert set(losses_of(report).values()) == {(20, 0)}
    assert set(losses_of(report)) == {"host 0", "host 1", "slice 0", "slice 1"}
    assert report["shards"] == {
        **{"parts_by_copies": {"2": 5}, "may_fail": 1, "fatal_alone": []},
        **{"fatal_pairs": 1, "pairs": 1},
    }
    assert (
        main(["ls", "--survives", "--local-dir", str(hosts[0]), "--local-dir", str(hosts[1])]) == 0
    )
    assert "outlives any one host and any one slice" in capsys.readouterr().out
    assert tree_of(ramdisk) == before


def test_survives_names_the_host_that_would_cost_the_step(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [fill(ramdisk / "a", 0, 10, 20), fill(ramdisk / "b", 0, 10)]
    code, report = survives(capsys, *hosts)
    assert (code, report["step"]) == (1, 20)
    assert losses_of(report) == {"host a": (10, 10), "host b": (20, 0)}
    assert report["shards"]["fatal_alone"] == [str(hosts[0])]
    assert report["host_states"]["may_fail"] == 0
    code, report = survives(capsys, hosts[0])
    assert losses_of(report) == {"host a": (None, None)}
    assert main(["ls", "--survives", "--local-dir", str(hosts[0])]) == 1
    assert "nothing" in capsys.readouterr().out


def test_survives_without_whole_step_exits_with_1(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = fill(ramdisk / "a", 0, 10)
    for path in host.rglob("process_*_of_*.json"):
        path.unlink()
    code, report = survives(capsys, host)
    assert (code, report["step"], report["losses"]) == (1, None, [])
    assert main(["ls", "--survives", "--dir", str(ramdisk)]) == 2


@pytest.mark.parametrize("security", ["aead", "crc"])
def test_survives_asks_live_peers(
    security: Security,
    ramdisk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = generate_secret()
    signer = Signer.of(RunSecret(RUN_ID, secret, given=True))
    here = fill(ramdisk / "here", 0, 10, 20, signer=signer)
    there = fill(ramdisk / "there", 1, 20, signer=signer)
    holdings = ReadOnlyRamdisk(there, RUN_ID, signer=signer)
    with TransferServer(holdings, run_id=RUN_ID, secret=secret, security=security) as server:
        words = ("--peers", f"{server.contact},127.0.0.1:1", "--run-id", RUN_ID)
        assert main(["ls", "--survives", *words]) == 2
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


@pytest.mark.parametrize("slices", range(2, 8))
def test_survival_agrees_with_plan_placement(slices: int) -> None:
    for copies in range(1, slices + 1):
        placement = Striped(copies)
        holders = [frozenset(map(str, block)) for block in blocks(range(slices), copies)]
        found = survival_of(holders, slices)
        assert found.may_fail == slices_that_may_fail(placement, slices)
        assert found.fatal_pairs / found.pairs == loss_probability(placement, slices, 1, 2)
