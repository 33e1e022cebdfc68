"""The goodput benchmark: costs scaled as README.md says, closed forms, and one small run."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import refusal

from benchmarks.goodput import __main__ as goodput
from benchmarks.goodput import model
from benchmarks.goodput.closed_form import best_interval_s
from benchmarks.goodput.closed_form import goodput as closed_goodput

MEASURED = model.MeasuredCosts(
    stall_s=0.1, save_s=1.1, restore_s=2.0, host_bytes=1e9, source="made up"
)
SITE = model.Site(**{name: setting.default for name, setting in goodput.SETTINGS.items()})
OURS_FLAG = "ours=0.001,0.1,0.5,1024"


def site(**changed: Any) -> model.Site:
    return dataclasses.replace(SITE, **changed)


def test_jobs_have_equal_slices_and_no_more_chips_than_wanted() -> None:
    for chips in (16, 1000, 1024, 5000, 50_000):
        job = SITE.job(chips)
        assert job.slices >= 2
        assert job.hosts_per_slice * SITE.chips_per_host <= SITE.chips_per_slice
        assert chips - job.slices * SITE.chips_per_host < SITE.chips(job) <= chips
        assert job.mtbf_s * SITE.chips(job) == pytest.approx(SITE.chip_mtbf_h * 3600)
    with pytest.raises(ValueError, match="less than one host"):
        SITE.job(7)


def test_failures_are_those_of_the_report() -> None:
    assert SITE.chip_mtbf_h / 16_384 == pytest.approx(3.09, abs=0.01)


def test_costs_grow_with_what_a_host_holds() -> None:
    here = site(state_gb=1000, device_gb_per_s=50, storage_gb_per_s=20, network_gb_per_s=25)
    job = here.job(2 * 1024)  # 256 hosts share 1000 GB
    gb = 1000 / 256
    local = model.design(model.OURS, here, job, MEASURED).local
    assert local is not None
    assert local.cost_s == pytest.approx(0.1 + gb / 50)
    assert local.publish_s == pytest.approx(1.0 * gb)
    assert local.restore_s == pytest.approx(2.0 * gb + gb / 50)
    storage = model.design(model.STORAGE_ONLY, here, job, MEASURED).persistent
    assert storage.cost_s == pytest.approx(0.1 + gb / 50)
    assert storage.publish_s == pytest.approx(50)
    assert storage.restore_s == pytest.approx(50 + gb / 25 + gb / 50)


def test_no_restore_is_faster_than_the_network() -> None:
    fast = dataclasses.replace(MEASURED, restore_s=1e-6)
    job = SITE.job(2048)
    local = model.design(model.OURS, SITE, job, fast).local
    gb = SITE.state_gb / job.hosts_per_slice
    assert local is not None
    assert local.restore_s == pytest.approx(gb / 25 + gb / 60)


def test_every_design_has_the_best_interval_for_its_costs() -> None:
    job = SITE.job(16_384)
    ours = model.design(model.OURS, SITE, job, MEASURED)
    assert ours.local is not None
    assert ours.local.interval_s == pytest.approx(best_interval_s(ours.local.cost_s, job.mtbf_s))
    # No single failure loses the RAM tier: storage is written as often as the site wants.
    assert ours.persistent.interval_s == SITE.storage_at_least_every_s

    two = SITE.job(2048)
    orbax = model.design(model.ORBAX, SITE, two, MEASURED).persistent
    lost = (SITE.host_share + SITE.slice_share) / 2 / 100
    assert orbax.interval_s == pytest.approx(best_interval_s(orbax.cost_s, two.mtbf_s / lost))


def test_interval_is_no_shorter_than_a_save() -> None:
    slow = site(storage_gb_per_s=1)
    tier = model.design(model.STORAGE_ONLY, slow, slow.job(50_000), MEASURED).persistent
    assert tier.interval_s == pytest.approx(tier.cost_s + tier.publish_s)


def test_slowdown_is_a_cost_of_the_save() -> None:
    job = SITE.job(16_384)
    plain = model.design(model.OURS, SITE, job, MEASURED).local
    slowed = model.design(model.OURS, site(slowdown=0.1), job, MEASURED).local
    assert plain is not None
    assert slowed is not None
    assert slowed.cost_s == pytest.approx(plain.cost_s + 0.1 * plain.publish_s)
    assert slowed.interval_s > plain.interval_s


def test_who_stores_and_what_a_restore_needs() -> None:
    assert model.ram_rule(model.OURS, 2).slices == {0, 1}
    assert model.ram_rule(model.OURS, 4).slices == {1, 2, 3}
    assert model.ram_rule(model.ORBAX, 2).slices == {1}
    both_half_lost = {(1, 0), (2, 1)}
    assert model.ram_rule(model.OURS, 3).survives(both_half_lost)
    assert not model.ram_rule(model.ORBAX, 3).survives(both_half_lost)


def test_ours_agrees_with_closed_form_where_ram_is_never_lost() -> None:
    """Software failures only; storage saves cost nothing, so they can be left out."""
    here = site(host_share=0, slice_share=0, days=60, seeds=10, storage_at_least_every_s=86_400)
    found = model.evaluate(model.OURS, here, 50_000, MEASURED)
    local, storage = found.design.local, found.design.persistent
    assert local is not None
    closed = closed_goodput(
        local.interval_s,
        local.cost_s,
        found.mtbf_s,
        publish_s=local.publish_s,
        recovery_s=here.down_s + local.restore_s,
    )
    stalls = storage.cost_s / storage.interval_s
    assert found.goodput == pytest.approx(closed - stalls, abs=max(3 * found.margin, 1e-4))
    assert found.ram_restore_share > 0.98
    assert found.failures_per_day == pytest.approx(86_400 / found.mtbf_s, rel=0.1)


def _comparison(stall_s: float) -> dict[str, Any]:
    summary = {
        "stall": {"median": stall_s},
        "published": {"median": 0.2},
        "restore_lost_slice": {"median": 0.4},
    }
    first = {
        "job": {"state_bytes": 2**30, "hosts_per_slice": 2},
        "contenders": {
            name: {"summary": summary} for name in ("ours", "orbax-emergency", "orbax-p2p")
        },
    }
    return {"jobs": [first]}


def test_costs_are_the_comparisons_medians_per_host() -> None:
    costs = model.costs_of_comparison(_comparison(0.05), "compare.json")
    assert set(costs) == {model.OURS, model.ORBAX}
    assert costs[model.OURS] == model.MeasuredCosts(0.05, 0.2, 0.4, 2**29, "compare.json")


def test_one_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = tmp_path / "compare.json"
    compared.write_text(json.dumps(_comparison(0.002)))
    arguments = ["--compare", str(compared), "--out", str(tmp_path / "out"), "--days", "5"]
    arguments += ["--seeds", "3", "--chips", "1024,50000", "--date", "2001-02-03"]
    assert goodput.main(arguments) == 0
    text = capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "goodput.json").read_text())
    assert document["date"] == "2001-02-03"
    assert document["costs"]["ours"]["source"] == "measured, compare.json"
    assert document["settings"]["days"]["source"] == "given as a flag"
    assert document["settings"]["chip_mtbf_h"]["source"].startswith("Llama 3 report")
    results = document["results"]
    assert [row["design"] for row in results] == 2 * list(model.DESIGNS)
    for row in results:
        assert 0 < row["goodput"] < 1
        assert math.isfinite(row["margin"])
        assert f"{100 * row['goodput']:.2f} ±" in text
        assert (row["local"] is None) == (row["design"] == model.STORAGE_ONLY)
    assert (tmp_path / "out" / "goodput.png").read_bytes().startswith(b"\x89PNG")


def test_flag_beats_the_file_and_the_file_beats_a_default(tmp_path: Path) -> None:
    compared = tmp_path / "compare.json"
    compared.write_text(json.dumps(_comparison(0.002)))
    arguments = ["--compare", str(compared), "--out", str(tmp_path), "--days", "1"]
    arguments += ["--seeds", "1", "--chips", "1024", "--costs", OURS_FLAG]
    assert goodput.main(arguments) == 0
    costs = json.loads((tmp_path / "goodput.json").read_text())["costs"]
    assert costs["ours"]["stall_s"] == 0.001
    assert costs["orbax-emergency"]["stall_s"] == 0.002


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no costs of 'ours'"),
        (["--costs", "nobody=1,1,1,1"], "neither"),
        (["--costs", "ours=1,0.5,1,1"], "a save ends after its stall"),
        (["--costs", OURS_FLAG, "--chips", "50001"], "more than 50000"),
        (["--costs", OURS_FLAG, "--chips", "4"], "less than one host"),
        (["--costs", OURS_FLAG, "--storage-gb-per-s", "0"], "too little"),
        (["--costs", OURS_FLAG, "--down-s", "nan"], "no finite number"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--compare", str(tmp_path / "compare.json"), "--out", str(tmp_path)]
    assert message in refusal(goodput.main, [*arguments, *places], capsys)


def test_file_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "compare.json"
    other.write_text("{}")
    places = ["--compare", str(other), "--out", str(tmp_path)]
    assert "not what compare.py writes" in refusal(goodput.main, places, capsys)
