"""What is wanted beside what was measured, on figures made up by hand."""

from pathlib import Path
from typing import Any

from benchmarks.common import plain_readers
from benchmarks.common.job import parse_job
from benchmarks.compare import targets

LIMITS = {
    "copy with CRC32C into a mapped ramdisk file, 1 thread": 5.0,
    "copy with CRC32C into a mapped ramdisk file, 2 threads": 10.0,
    "loopback TCP, 1 stream": 2.0,
    "loopback TCP, 2 streams": 4.0,
    "TCP into a new ramdisk file, 2 streams": 2.5,
    "CRC32C of a ramdisk file mapped anew, 1 thread": 6.0,
    "plain reads from storage, 2 readers": 2.0,
    "plain reads from storage, 4 readers": 3.0,
    "plain writes to storage, synced, 1 writer": 2.0,
    "plain writes to storage, synced, 2 writers": 3.0,
}
LARGE = parse_job("2x1x1024", 3)
SMALL = parse_job("2x1x125/2000", 3)


def _summary(**medians: float) -> dict[str, Any]:
    keys = ["stall", "published", "restore_lost_slice", "restore_nothing_lost"]
    keys += ["first_over_later", "storage_save", "storage_restore"]
    return {key: {"median": medians.get(key)} for key in keys}


def _by_title(found: list[targets.Target]) -> dict[str, targets.Target]:
    return {target.title: target for target in found}


def test_times_are_compared_with_orbax_and_rates_with_best_limit() -> None:
    gib_at_6_gb_per_s = 2**31 / 6e9
    summaries = {
        "ours": _summary(
            stall=0.004, published=gib_at_6_gb_per_s, restore_lost_slice=2**30 / 2e9,
            restore_nothing_lost=2**31 / 5e9, first_over_later=2.5, storage_save=3.0,
            storage_restore=2.0,
        ),
        "orbax-emergency": _summary(stall=0.1, published=1.0, restore_lost_slice=60.0),
        "orbax": _summary(storage_save=3.0, storage_restore=1.9),
    }  # fmt: skip
    found = _by_title(targets.targets([(LARGE, summaries)], LIMITS))
    reached = {title: target.is_reached for title, target in found.items()}
    assert reached == {
        "stall: in save, arrays ready, ms": True,
        "stall, orbax-emergency over ours": True,
        "published, orbax-emergency over ours": False,
        "published, share of the copy with CRC": True,  # both slices of two store: 2 GiB
        "restore lost slice, orbax-emergency over ours": True,
        "restore lost slice, orbax-p2p over ours": None,
        "lost slice restored, share of the loopback": False,
        "the same, share of TCP into a new ramdisk file": True,
        "restore nothing lost, orbax-emergency over ours": None,
        "nothing lost, share of the CRC of a file mapped anew": True,
        "first save over later ones": False,
        "storage save, orbax over ours": False,
        "storage save, share of as many plain writers": False,
        "storage restore, orbax over ours": False,
        "storage restore, share of as many plain readers": False,
    }
    assert found["storage restore, share of as many plain readers"].measured == "0.537"
    assert found["storage save, share of as many plain writers"].measured == "0.179"
    assert found["stall, orbax-emergency over ours"].measured == "25x"
    assert found["published, share of the copy with CRC"].measured == "0.6"
    assert found["the same, share of TCP into a new ramdisk file"].measured == "0.8"
    # All slices check their copies.
    assert found["nothing lost, share of the CRC of a file mapped anew"].measured == "0.833"


def test_small_leaves_have_targets_of_their_own() -> None:
    summaries = {
        "ours": _summary(stall=0.01, published=0.1),
        "orbax-emergency": _summary(stall=0.11, published=0.9),
    }
    found = targets.targets([(SMALL, summaries)], LIMITS)
    assert {t.job for t in found} == {"2x1x125/2000"}
    assert [t.is_reached for t in found] == [True, False, None, None, None, None]
    assert "not measured" in targets.table(found)


def test_saves_to_storage_have_targets_in_each_job() -> None:
    jobs = [parse_job(text, 3) for text in ("2x1x1024", "2x2x512", "2x1x125/2000")]
    summaries = {
        "ours": _summary(storage_save=1.0),
        "orbax": _summary(storage_save=2.5),
    }
    found = targets.targets([(shape, summaries) for shape in jobs], LIMITS)
    of_saves = [t for t in found if t.title.startswith("storage save")]
    assert [(t.job, t.wanted, t.measured, t.is_reached) for t in of_saves] == [
        ("2x1x1024/16", "at least 3x", "2.5x", False),
        ("2x1x1024/16", "at least 0.6", "0.537", False),
        ("2x2x512/16", "at least 3x", "2.5x", False),
        ("2x2x512/16", "at least 0.6", "0.179", False),  # of two writers
        ("2x1x125/2000", "at least 2x", "2.5x", True),
    ]


def test_without_ours_nothing_is_reached_or_missed() -> None:
    found = targets.targets([(LARGE, {"orbax": _summary(storage_save=1.0)})], LIMITS)
    assert found
    assert {target.is_reached for target in found} == {None}


def test_restores_from_storage_have_targets_in_each_job() -> None:
    summaries = {"ours": _summary(storage_restore=1.0), "orbax": _summary(storage_restore=2.5)}
    jobs = [(parse_job("2x2x512", 3), summaries), (SMALL, summaries)]
    found = [t for t in targets.targets(jobs, LIMITS) if t.title.startswith("storage restore")]
    assert [(t.job, t.wanted, t.is_reached) for t in found] == [
        ("2x2x512/16", "at least 3x", False),
        ("2x2x512/16", "at least 0.6", False),  # 2 copies at a third of the rate of 4 readers
        ("2x1x125/2000", "at least 2x", True),
    ]


def test_plain_readers_have_rates(tmp_path: Path) -> None:
    rates = plain_readers.measure(tmp_path, 1 << 20)
    assert set(rates) == {plain_readers.name_of(count) for count in plain_readers.READERS}
    assert min(rates.values()) > 0
    assert not list(tmp_path.iterdir())
