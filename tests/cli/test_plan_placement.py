"""``eckpt plan``, as a user runs it."""

from __future__ import annotations

import json

import pytest
from looks import USAGE_EXIT_CODE, eckpt_here

JOB = ["plan", "--slices", "4", "--hosts", "64", "--state-gib", "64"]


def test_table_with_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert eckpt_here(*JOB, "--lost-hosts", "3", "--survival", "0.98") == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    row = lines["striped(2)"]
    assert row[1] == "*"
    assert row[2] == "1.00"  # GiB: two slots of half of a host's one
    assert row[-3:] == ["100%", "99.61%", "98.82%"]
    assert "Recommended: striped(2)" in out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_json_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert eckpt_here(*JOB, "--json", "--ramdisk-gib", "1.6") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] == "striped(3)"
    assert len(found["placements"]) == 5
    assert found["placements"][1]["survival"][3] == pytest.approx(0.9765, abs=1e-4)


def test_host_states_of_two_saves_and_all_buddies_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert eckpt_here(*JOB, "--json", "--host-state-mib", "64") == 0
    found = json.loads(capsys.readouterr().out)
    ram = {row["name"]: row["ram_bytes"] for row in found["placements"]}
    assert ram["striped(2)"] == (1 << 30) + 2 * 4 * (64 << 20)


@pytest.mark.parametrize("extra", [["--slices", "0"], ["--hosts", "0"], ["--survival", "2"]])
def test_impossible_values_are_named(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert eckpt_here(*JOB, *extra) == USAGE_EXIT_CODE
    assert extra[0].lstrip("-").split("-")[0] in capsys.readouterr().err


def test_one_slice_is_told_that_no_copy_outlives_a_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--slices", "1", "--hosts", "4", "--state-gib", "64"]
    assert eckpt_here(*words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recommended"] == "all_but_primary"
    assert [row["name"] for row in document["placements"]] == ["all_but_primary"]
    assert eckpt_here(*words) == 0
    lines = capsys.readouterr().out
    assert "1 slice of 4 hosts" in lines
    assert "one slice has no second copy" in lines
    assert "in 0.0000% of the cases" not in lines
    assert eckpt_here(*words, "--ramdisk-gib", "10") == 0
    assert "enlarge the ramdisk" in capsys.readouterr().out


def test_each_step_that_ram_keeps_needs_a_slot(capsys: pytest.CaptureFixture[str]) -> None:
    assert eckpt_here(*JOB, "--json", "--local-keep-last-n", "3") == 0
    found = json.loads(capsys.readouterr().out)
    ram = {row["name"]: row["ram_bytes"] for row in found["placements"]}
    assert ram["all_but_primary"] == 4 << 30


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--placement", "striped(2)"], "--placement needs --gke"),
        (["--gke", "x", "--ramdisk-gib", "1", "--json"], "--gke prints YAML, no JSON"),
        (["--local-keep-last-n", "0"], "kept steps must be at least 1"),
    ],
)
def test_option_that_would_be_ignored_is_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eckpt_here(*JOB, *words) == USAGE_EXIT_CODE
    assert problem in capsys.readouterr().err
