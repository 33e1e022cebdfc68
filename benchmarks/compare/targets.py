"""Targets for this checkpointer, compared with the figures of a run. Pure."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common import limits
from benchmarks.common.job import Shape
from benchmarks.common.tables import markdown, number
from benchmarks.compare.report import OURS

EMERGENCY, P2P, PLAIN = "orbax-emergency", "orbax-p2p", "orbax"
MANY_LEAVES = 1000
_LEAST_SHARE = 0.6
"""Least share of a limit of the machine that a rate is to reach."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One target and its result. ``is_reached`` is None when the run has no figure for it."""

    job: str
    title: str
    wanted: str
    measured: str
    is_reached: bool | None


@dataclasses.dataclass(frozen=True)
class _Job:
    """A job with its figures, which its methods compare with what is wanted."""

    shape: Shape
    contenders: Mapping[str, Mapping[str, Any]]
    limit_rates: Mapping[str, float]

    @property
    def has_small_leaves(self) -> bool:
        return self.shape.leaves >= MANY_LEAVES

    def median(self, contender: str, key: str) -> float | None:
        found = self.contenders.get(contender)
        return found["summary"][key]["median"] if found else None

    def at_most(self, title: str, value: float | None, most: float) -> Target:
        is_reached = None if value is None else value <= most
        return Target(self.shape.name, title, f"at most {number(most)}", _shown(value), is_reached)

    def at_least(self, title: str, value: float | None, least: float, unit: str = "") -> Target:
        is_reached = None if value is None else value >= least
        wanted = f"at least {number(least)}{unit}"
        return Target(self.shape.name, title, wanted, _shown(value, unit), is_reached)

    def faster(self, key: str, other: str, times: float) -> Target:
        """Compare a time with the same time of another contender."""
        ours, theirs = self.median(OURS, key), self.median(other, key)
        ratio = theirs / ours if ours and theirs is not None else None
        return self.at_least(f"{key.replace('_', ' ')}, {other} over {OURS}", ratio, times, "x")

    def share_of_limit(self, title: str, moved_bytes: int, key: str, limit: str) -> Target:
        """Compare the rate of moving bytes with a limit of the machine."""
        seconds, share = self.median(OURS, key), None
        if seconds:
            share = moved_bytes / seconds / 1e9 / limits.best(self.limit_rates, limit)
        return self.at_least(title, share, _LEAST_SHARE)


def _shown(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{number(value)}{unit}"


def targets(
    jobs: Iterable[tuple[Shape, Mapping[str, Any]]], limit_rates: Mapping[str, float]
) -> list[Target]:
    """Return targets for the first job with large leaves and the first with many small ones.

    Those of saves to storage and of restores from it are for each job.
    """
    found: list[Target] = []
    all_jobs = [_Job(shape, job["contenders"], limit_rates) for shape, job in jobs]
    for job in [job for job in all_jobs if not job.has_small_leaves][:1]:
        found += _of_large_leaves(job)
    for job in [job for job in all_jobs if job.has_small_leaves][:1]:
        for key in ("stall", "published", "restore_lost_slice", "restore_nothing_lost"):
            found.append(job.faster(key, EMERGENCY, 10))
    for job in all_jobs:
        found += _of_storage(job)
    return found


def _of_large_leaves(job: _Job) -> Iterator[Target]:
    state_bytes, slices = job.shape.state_bytes, job.shape.slices
    stall_s = job.median(OURS, "stall")
    yield job.at_most("stall: in save, arrays ready, ms", stall_s and stall_s * 1e3, 5.0)
    yield job.faster("stall", EMERGENCY, 20)
    yield job.faster("published", EMERGENCY, 25)
    # Slices 1 to n-1 store; with two, both do.
    stored_bytes = (slices if slices == 2 else slices - 1) * state_bytes
    yield job.share_of_limit(
        "published, share of the copy with CRC", stored_bytes, "published", limits.COPY_WITH_CRC
    )
    yield job.faster("restore_lost_slice", EMERGENCY, 15)
    yield job.faster("restore_lost_slice", P2P, 8)
    for title, limit in (
        ("lost slice restored, share of the loopback", limits.LOOPBACK),
        ("the same, share of TCP into a new ramdisk file", limits.INTO_NEW_FILE),
    ):
        yield job.share_of_limit(title, state_bytes, "restore_lost_slice", limit)
    yield job.faster("restore_nothing_lost", EMERGENCY, 40)
    # Every slice's copy is mapped and checked, by processes that share the machine.
    yield job.share_of_limit(
        "nothing lost, share of the CRC of a file mapped anew",
        slices * state_bytes,
        "restore_nothing_lost",
        limits.FIRST_CRC,
    )
    yield job.at_most("first save over later ones", job.median(OURS, "first_over_later"), 2.0)


def _of_storage(job: _Job) -> Iterator[Target]:
    """Yield the targets of saves to storage and of restores from it."""
    # By default the hosts of one slice write the copy, and each slice needs one of its own.
    state_bytes, copies = job.shape.state_bytes, job.shape.slices * job.shape.state_bytes
    writers = limits.plain_writers(job.shape.hosts_per_slice)
    readers = limits.plain_readers(job.shape.process_count)
    for what, others, limit, moved_bytes in (
        ("save", "writers", writers, state_bytes),
        ("restore", "readers", readers, copies),
    ):
        yield job.faster(f"storage_{what}", PLAIN, 2 if job.has_small_leaves else 3)
        if not job.has_small_leaves and limit in job.limit_rates:
            title = f"storage {what}, share of as many plain {others}"
            yield job.share_of_limit(title, moved_bytes, f"storage_{what}", limit)


def table(found: Sequence[Target]) -> str:
    """Return Markdown with one row for each target."""
    words = {True: "yes", False: "no", None: "not measured"}
    rows = [[t.title, t.job, t.wanted, t.measured, words[t.is_reached]] for t in found]
    return markdown([["target", "job", "wanted", "measured", "reached"], *rows])
