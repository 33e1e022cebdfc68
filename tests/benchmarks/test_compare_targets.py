"""What is wanted beside what was measured, on figures made up by hand."""

from typing import Any

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


def _summary(**medians: float) -> dict[str, Any]:
    keys = ["stall", "published", "restore_lost_slice", "restore_nothing_lost"]
    keys += ["first_over_later", "storage_save", "storage_restore"]
    return {"summary": {key: {"median": medians.get(key)} for key in keys}}


def _by_title(found: list[targets.Target]) -> dict[str, targets.Target]:
    return {target.title: target for target in found}


def test_times_are_compared_with_orbax_and_rates_with_best_limit() -> None:
    gib_at_6_gb_per_s = 2**31 / 6e9
    contenders = {
        "ours": _summary(
            stall=0.004, published=gib_at_6_gb_per_s, restore_lost_slice=2**30 / 2e9,
            restore_nothing_lost=2**31 / 5e9, first_over_later=2.5, storage_save=3.0,
            storage_restore=2.0,
        ),
        "orbax-emergency": _summary(stall=0.1, published=1.0, restore_lost_slice=60.0),
        "orbax": _summary(storage_save=3.0, storage_restore=1.9),
    }  # fmt: skip
    found = _by_title(targets.targets([(LARGE, {"contenders": contenders})], LIMITS))
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
