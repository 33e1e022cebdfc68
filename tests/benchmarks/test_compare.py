"""One small real comparison: all contenders, real processes, losses. No figure is judged."""

import json
from pathlib import Path

import pytest
from benchmark_runs import refusal, run_benchmark

from benchmarks.common.job import parse_job
from benchmarks.common.lives import Place, RoundFailed, run_round
from benchmarks.compare import __main__ as compare
from benchmarks.compare import report

MIB = 4
LEAVES = 4
SAVES = 2


NAMES = ["ours", "orbax-emergency", "orbax-p2p", "orbax"]
FEW = "ours,orbax"
"""One with both tiers, and one with storage only."""


@pytest.fixture(scope="module", params=[FEW, ",".join(NAMES)])
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[str]]:
    """What a run printed, where it wrote, and who took part."""
    names: str = request.param
    out = tmp_path_factory.mktemp("bench_out")
    told = run_benchmark(
        "benchmarks.compare",
        *("--jobs", f"2x1x{MIB}/{LEAVES}", "--rounds", "1", "--contenders", names),
        *("--saves", str(SAVES), "--restores", "slice,halves,storage", "--limits-mib", "8"),
        *("--timeout-s", "240", "--out", str(out), "--storage", str(out)),
    )
    return told, out, names.split(",")


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_whole_comparison_on_a_small_job(outcome: tuple[str, Path, list[str]]) -> None:
    text, out, names = outcome
    document = json.loads((out / "compare.json").read_text())
    assert document["date"].startswith("20")
    assert document["failures"] == []
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["versions"]["orbax-checkpoint"][0].isdigit()
    (job,) = document["jobs"]
    assert job["job"]["state_bytes"] == MIB * 2**20
    assert list(job["contenders"]) == names
    assert len(document["targets"]) > 5
    for target in document["targets"]:
        assert target["title"] in text
    # Nothing but the results is left of the directory that the storage was made in.
    assert sorted(path.name for path in out.iterdir()) == ["compare.json"]


@pytest.mark.slow
def test_every_measure_is_reported_for_those_that_have_it(
    outcome: tuple[str, Path, list[str]],
) -> None:
    text, out, _ = outcome
    (job,) = json.loads((out / "compare.json").read_text())["jobs"]
    not_here = ("nothing_lost", "halves")  # not asked for; not possible with one host a slice
    for measure in report.MEASURES:
        is_here = not measure.key.endswith(not_here)
        assert (measure.title in text) == is_here
        for name, contender in job["contenders"].items():
            values = contender["summary"][measure.key]["rounds"]
            of_all = "storage" in measure.key or name != "orbax"
            has_it = is_here and (name == "ours" if measure.key == "ready" else of_all)
            assert len(values) == has_it, (measure.key, name)
            # How fast is not judged, but nothing here takes no time.
            assert all(value > 0 for value in values), (measure.key, name)


@pytest.mark.slow
def test_every_limit_is_reported(outcome: tuple[str, Path, list[str]]) -> None:
    text, out, _ = outcome
    (limits,) = json.loads((out / "compare.json").read_text())["limits_gb_per_s"]
    assert {f"loopback TCP, {count}" for count in ("1 stream", "2 streams", "4 streams")} <= set(
        limits
    )
    for kind in ("non-temporal copy", "copy with CRC32C", "CRC32C of", "memcpy", "TCP into"):
        assert any(name.startswith(kind) for name in limits)
    for name, rate in limits.items():
        assert name in text
        assert rate > 0


@pytest.mark.slow
def test_restored_bytes_were_verified(
    outcome: tuple[str, Path, list[str]],
) -> None:
    _, out, _ = outcome
    (job,) = json.loads((out / "compare.json").read_text())["jobs"]
    for name, contender in job["contenders"].items():
        (round_,) = contender["rounds"]
        wanted = ["storage"] if name == "orbax" else ["slice", "storage"]
        assert list(round_["restores"]) == wanted
        for restore in round_["restores"].values():
            assert restore["verified_shards"] == LEAVES
            assert [p["verified_bytes"] for p in restore["processes"]] == [MIB * 2**20] * 2
        if name != "orbax":
            assert all(len(process["ram"]["saves"]) == SAVES for process in round_["save"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "0 is less than 1"),
        (["--contenders", "ours,nobody"], "nobody"),
        (["--restores", "everything"], "everything"),
        (["--jobs", "1x1x16"], "at least 2"),
        (["--jobs", "2x1"], "SLICESxHOSTSxMIB"),
        (["--jobs", "2x1x9999999"], "may take"),
        (["--minutes", "nan"], "not above 0"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(compare.main, arguments, capsys)


def test_failing_process_ends_the_round_with_its_log(tmp_path: Path) -> None:
    shape = parse_job("2x1x1/1", 1)
    with pytest.raises(
        RoundFailed, match=r"(?s)process \d on host \d ended with exit status 1.*KeyError: 'nobody'"
    ):
        run_round("nobody", shape, Place(tmp_path, tmp_path, timeout_s=240), ["slice"])
    assert list(tmp_path.iterdir()) == []


def test_life_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    shape = parse_job("2x1x1/1", 1)
    with pytest.raises(RoundFailed, match=r"still runs after 0\.2 s"):
        run_round("orbax-p2p", shape, Place(tmp_path, tmp_path, timeout_s=0.2), ["slice"])
    assert list(tmp_path.iterdir()) == []
