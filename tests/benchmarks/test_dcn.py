"""Hosts with links of their own: what is computed, and one small real run where it is possible."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import rows_of

from benchmarks.common.job import parse_job
from benchmarks.dcn import __main__ as dcn
from benchmarks.dcn import links

MIB = 2**20


def _process(start_s: float, restored_s: float, received: int, sent: int) -> dict[str, Any]:
    return {"start_s": start_s, "restored_s": restored_s, "over_links": [received, sent]}


def _round(seconds: float) -> dict[str, Any]:
    processes = [
        _process(10.0, 10.0 + seconds, 64 * MIB, MIB),
        _process(10.5, 11.0, 2 * MIB, 40 * MIB),
        _process(10.5, 11.0, 3 * MIB, 24 * MIB),
    ]
    return {"restores": {"slice": {"processes": processes}}}


def test_row_has_the_busiest_links_and_medians_over_rounds() -> None:
    shape = parse_job("3x1x64", 1)
    row = dcn.row_of("ours", shape, [_round(2.0), _round(4.0), _round(3.0)])
    assert row == dcn.Row("ours", 3, 3.0, None, 64 * MIB, 40 * MIB, 69 * MIB)


def test_growth_is_over_the_first_row_of_the_same_contender() -> None:
    rows = [
        dcn.Row("ours", 2, 2.0),
        dcn.Row("ours", 8, 3.0),
        dcn.Row("other", 2, 10.0),
        dcn.Row("other", 8, 40.0),
    ]
    cells = rows_of(dcn.table(rows, state_s=1.0))[2:]
    growth = ["1x 2x", "1.5x 3x", "1x 10x", "4x 40x"]
    assert [" ".join(cell[3:5]) for cell in cells] == growth


def test_refusal_is_shown_with_its_reason() -> None:
    refused = {"restores": {"slice": {"refused": "offers step None", "processes": []}}}
    row = dcn.row_of("other", parse_job("2x1x64", 1), [_round(1.0), refused])
    text = dcn.table([row], state_s=1.0)
    assert rows_of(text)[2][:4] == ["other", "2", "cannot", "-"]
    assert "other cannot, 2 slices: offers step None" in text


def test_addresses_differ_and_are_no_networks_own() -> None:
    addresses = [links.address(number) for number in range(1000)]
    assert len(set(addresses)) == 1000
    assert addresses[0] == "10.77.0.1"
    assert addresses[255] == "10.77.1.0"  # an address like others in a network of 16 bits


def test_without_the_means_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert dcn.main(["--mib", "1", "--out", str(tmp_path / "out")]) == dcn.NOT_POSSIBLE
    assert "cannot be measured here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if f"-{os.getpid()}-" in line]


@pytest.fixture(scope="module")
def possible() -> Iterator[bool]:
    """Whether this machine can have such hosts; where not, that is what the test shows."""
    try:
        with links.linked_hosts(2, 100.0) as hosts:
            assert len(_namespaces()) == 3  # and the switch
            assert hosts.addresses == ("10.77.0.1", "10.77.0.2")
    except links.NotPossible:
        yield False
    else:
        assert _namespaces() == []
        yield True


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_small_run_or_a_word_about_what_is_missing(
    possible: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--slices", "2", "--mib", "4", "--rounds", "1"]
    arguments += ["--contenders", "ours", "--out", str(tmp_path), "--timeout-s", "240"]
    status = dcn.main(arguments)
    said = capsys.readouterr()
    if not possible:
        assert status == dcn.NOT_POSSIBLE
        assert "cannot be measured here" in said.err
        return
    assert status == 0, said.err
    assert _namespaces() == []
    (row,) = json.loads((tmp_path / "dcn.json").read_text())["rows"]
    # What was lost came over the link, once, and the other host sent it.
    assert 4 * MIB <= row["received_by_lost_bytes"] < 6 * MIB
    assert 4 * MIB <= row["sent_bytes"] < 6 * MIB
    assert row["restore_s"] > 0
