"""The goodput benchmark: costs scaled as README.md says, one small run, and refusals."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import refusal

from benchmarks.goodput import __main__ as goodput
from benchmarks.goodput import model

MEASURED = model.MeasuredCosts(
    stall_s=0.1, save_s=1.1, restore_s=2.0, host_bytes=1e9, source="made up"
)
SITE = model.Site(**{name: setting.default for name, setting in goodput.SETTINGS.items()})
OURS_FLAG = "ours=0.001,0.1,0.5,1024"


def site(**changed: Any) -> model.Site:
    return dataclasses.replace(SITE, **changed)


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
