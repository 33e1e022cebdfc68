"""One small real comparison: every contender, real processes, a lost slice. No figure is judged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare
import pytest
import report
from job import plan_shape
from lives import RoundFailed, run_round
from ramdisk import PeakWatch, allocated_bytes

COMPARE = Path(__file__).parents[2] / "benchmarks" / "compare.py"
MIB = 8
LEAVES = 4
SAVES = 3


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("bench_out")
    run = subprocess.run(
        [
            *(sys.executable, str(COMPARE), "--slices", "2", "--hosts-per-slice", "1"),
            *("--mib", str(MIB), "--leaves", str(LEAVES), "--rounds", "1"),
            *("--saves", str(SAVES), "--limits-mib", "8", "--timeout-s", "120"),
            *("--out", str(out), "--date", "2001-02-03"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads((out / "compare.json").read_text())


def test_every_contender_and_limit_is_reported(outcome: tuple[str, dict[str, Any]]) -> None:
    text, document = outcome
    assert list(document["contenders"]) == ["ours", "orbax-emergency", "orbax-p2p"]
    assert list(document["ratios_to_ours"]) == ["orbax-emergency", "orbax-p2p"]
    for measure in report.MEASURES:
        assert measure.title in text
        for contender in document["contenders"].values():
            assert len(contender["summary"][measure.key]["rounds"]) == 1
    (limits,) = document["limits_gb_per_s"]
    assert {"memcpy, 1 thread", "loopback TCP, 1 stream", "loopback TCP, 2 streams"} <= set(limits)
    assert any(name.startswith("copy with CRC32C") for name in limits)
    for name, rate in limits.items():
        assert name in text
        assert rate > 0


def test_machine_job_and_date_are_recorded(outcome: tuple[str, dict[str, Any]]) -> None:
    _, document = outcome
    assert document["date"] == "2001-02-03"
    assert document["job"]["state_bytes"] == MIB * 2**20
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["versions"]["orbax-checkpoint"][0].isdigit()


def test_every_restored_byte_was_verified(outcome: tuple[str, dict[str, Any]]) -> None:
    _, document = outcome
    for contender in document["contenders"].values():
        (round_,) = contender["rounds"]
        for process in round_["restore"]:
            assert len(process["verified_shards"]) == LEAVES
            assert process["verified_bytes"] == MIB * 2**20


def test_only_the_local_tier_was_written(outcome: tuple[str, dict[str, Any]]) -> None:
    _, document = outcome
    for contender in document["contenders"].values():
        (round_,) = contender["rounds"]
        assert all(len(process["saves"]) == SAVES for process in round_["save"])
        # A manager may keep a few kilobytes of its own there, but no copy of the state.
        assert round_["persistent_bytes"] < MIB * 2**20 / 8
        # The normals hardly compress: at least one slice's hosts hold all of them.
        assert sum(round_["ramdisk_bytes"]) > 0.8 * MIB * 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "0 is less than 1"),
        (["--contenders", "ours,nobody"], "nobody"),
        (["--slices", "1"], "at least 2"),
        (["--mib", str(2**30)], "choose a smaller --mib"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        compare.main(arguments)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_a_failing_process_ends_the_round_with_its_log(tmp_path: Path) -> None:
    shape = plan_shape(slices=2, hosts_per_slice=1, mib=1, leaves=1, timed_saves=1)
    with pytest.raises(
        RoundFailed, match=r"(?s)process \d on host \d ended with exit status 1.*KeyError: 'nobody'"
    ):
        run_round("nobody", shape, tmp_path, timeout_s=60)
    assert list(tmp_path.iterdir()) == []


def test_a_life_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    shape = plan_shape(slices=2, hosts_per_slice=1, mib=1, leaves=1, timed_saves=1)
    with pytest.raises(RoundFailed, match=r"still runs after 0\.2 s"):
        run_round("orbax-p2p", shape, tmp_path, timeout_s=0.2)
    assert list(tmp_path.iterdir()) == []


def test_allocated_bytes_counts_blocks_of_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 10_000)
    (tmp_path / "two").hardlink_to(tmp_path / "a" / "one")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(2**30)
    blocks = (tmp_path / "two").stat().st_blocks + (tmp_path / "sparse").stat().st_blocks
    assert allocated_bytes(tmp_path) == blocks * 512
    assert allocated_bytes(tmp_path) < 2**20


def test_the_peak_outlives_the_file(tmp_path: Path) -> None:
    with PeakWatch(tmp_path, interval_s=0.001) as peak:
        (tmp_path / "big").write_bytes(b"x" * 2**20)
        while peak.size_bytes < 2**20:
            pass
        (tmp_path / "big").unlink()
    assert peak.size_bytes >= 2**20
