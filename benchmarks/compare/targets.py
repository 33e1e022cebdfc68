"""Targets for this checkpointer, compared with the figures of a run. Pure."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common import limits, plain_readers
from benchmarks.common.job import Shape
from benchmarks.common.tables import markdown, number

Summaries = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Results of ``report.summarize`` by contender and measure."""

OURS, EMERGENCY, P2P, PLAIN = "ours", "orbax-emergency", "orbax-p2p", "orbax"
MANY_LEAVES = 1000


@dataclasses.dataclass(frozen=True)
class Target:
    """One target and its result. ``is_reached`` is None when the run has no figure for it."""

    job: str
    title: str
    wanted: str
    measured: str
    is_reached: bool | None


def targets(
    jobs: Sequence[tuple[Shape, Summaries]], limit_rates: Mapping[str, float]
) -> list[Target]:
    """Return targets for the first job with large leaves and the first with many small ones.

    Those of saves to storage and of restores from it are for each job.
    """
    found: list[Target] = []
    large = next((job for job in jobs if job[0].leaves < MANY_LEAVES), None)
    small = next((job for job in jobs if job[0].leaves >= MANY_LEAVES), None)
    if large is not None:
        found += _of_large_leaves(*large, limit_rates)
    if small is not None:
        found += _of_small_leaves(*small)
    for shape, summaries in jobs:
        # By default the hosts of one slice write the copy, and each slice needs one of its own.
        writers = limits.plain_writers(shape.hosts_per_slice)
        readers = plain_readers.name_of(shape.process_count)
        size_bytes, copies = shape.state_bytes, shape.slices * shape.state_bytes
        found += _of_storage(shape, summaries, limit_rates, "save", "writers", writers, size_bytes)
        found += _of_storage(shape, summaries, limit_rates, "restore", "readers", readers, copies)
    return found


def _of_large_leaves(
    shape: Shape, summaries: Summaries, limit_rates: Mapping[str, float]
) -> Iterator[Target]:
    job = shape.name
    stall_s = _median(summaries, OURS, "stall")
    yield _at_most(job, "stall: in save, arrays ready, ms", stall_s and stall_s * 1e3, 5.0)
    yield _faster(job, summaries, "stall", EMERGENCY, 20)
    yield _faster(job, summaries, "published", EMERGENCY, 25)
    # Slices 1 to n-1 store; with two, both do.
    copies = shape.slices if shape.slices == 2 else shape.slices - 1
    yield _share_of_limit(
        job, "published, share of the copy with CRC", copies * shape.state_bytes,
        _median(summaries, OURS, "published"), limit_rates, limits.COPY_WITH_CRC,
    )  # fmt: skip
    for other, times in ((EMERGENCY, 15), (P2P, 8)):
        yield _faster(job, summaries, "restore_lost_slice", other, times)
    yield _share_of_limit(
        job, "lost slice restored, share of the loopback", shape.state_bytes,
        _median(summaries, OURS, "restore_lost_slice"), limit_rates, limits.LOOPBACK,
    )  # fmt: skip
    yield _share_of_limit(
        job, "the same, share of TCP into a new ramdisk file", shape.state_bytes,
        _median(summaries, OURS, "restore_lost_slice"), limit_rates, limits.INTO_NEW_FILE,
    )  # fmt: skip
    yield _faster(job, summaries, "restore_nothing_lost", EMERGENCY, 40)
    # Every slice's copy is mapped and checked, by processes that share the machine.
    yield _share_of_limit(
        job, "nothing lost, share of the CRC of a file mapped anew",
        shape.slices * shape.state_bytes,
        _median(summaries, OURS, "restore_nothing_lost"), limit_rates, limits.FIRST_CRC,
    )  # fmt: skip
    first = _median(summaries, OURS, "first_over_later")
    yield _at_most(job, "first save over later ones", first, 2.0)


def _of_small_leaves(shape: Shape, summaries: Summaries) -> Iterator[Target]:
    for key in ("stall", "published", "restore_lost_slice", "restore_nothing_lost"):
        yield _faster(shape.name, summaries, key, EMERGENCY, 10)


def _of_storage(
    shape: Shape,
    summaries: Summaries,
    limit_rates: Mapping[str, float],
    what: str,
    others: str,
    limit: str,
    moved_bytes: int,
) -> Iterator[Target]:
    """Yield the targets of saves to storage, or of restores from it."""
    key, has_small_leaves = f"storage_{what}", shape.leaves >= MANY_LEAVES
    yield _faster(shape.name, summaries, key, PLAIN, 2 if has_small_leaves else 3)
    if not has_small_leaves and limit in limit_rates:
        yield _share_of_limit(
            shape.name, f"storage {what}, share of as many plain {others}", moved_bytes,
            _median(summaries, OURS, key), limit_rates, limit,
        )  # fmt: skip


def _median(summaries: Summaries, contender: str, key: str) -> float | None:
    return summaries[contender][key]["median"] if contender in summaries else None


def _at_most(job: str, title: str, value: float | None, most: float) -> Target:
    measured = "-" if value is None else number(value)
    return Target(
        job, title, f"at most {number(most)}", measured, None if value is None else value <= most
    )


def _faster(job: str, summaries: Summaries, key: str, other: str, times: float) -> Target:
    ours, theirs = (_median(summaries, name, key) for name in (OURS, other))
    ratio = theirs / ours if ours and theirs is not None else None
    return Target(
        job,
        f"{key.replace('_', ' ')}, {other} over {OURS}",
        f"at least {number(times)}x",
        "-" if ratio is None else f"{number(ratio)}x",
        None if ratio is None else ratio >= times,
    )


def _share_of_limit(
    job: str,
    title: str,
    moved_bytes: int,
    seconds: float | None,
    limit_rates: Mapping[str, float],
    limit: str,
) -> Target:
    share = moved_bytes / seconds / 1e9 / limits.best(limit_rates, limit) if seconds else None
    return Target(
        job,
        title,
        "at least 0.6",
        "-" if share is None else number(share),
        None if share is None else share >= 0.6,
    )


def table(found: Sequence[Target]) -> str:
    """Return Markdown with one row for each target."""
    words = {True: "yes", False: "no", None: "not measured"}
    rows = [[t.title, t.job, t.wanted, t.measured, words[t.is_reached]] for t in found]
    return markdown([["target", "job", "wanted", "measured", "reached"], *rows])
