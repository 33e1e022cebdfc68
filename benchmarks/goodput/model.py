"""Designs for the simulation from measured costs. Pure. README.md states the assumptions."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.goodput.closed_form import best_interval_s
from benchmarks.goodput.failure_simulation import (
    Design,
    FailingJob,
    Kind,
    Outcome,
    RamRule,
    TierCosts,
    expected_waste,
    ram_loss_probability,
    simulate,
)

OURS, ORBAX, STORAGE_ONLY = "ours", "orbax-emergency", "storage-only"
DESIGNS = (OURS, ORBAX, STORAGE_ONLY)
_GB = 1e9


@dataclasses.dataclass(frozen=True)
class MeasuredCosts:
    """Measured times of one host for ``host_bytes`` of state.

    ``stall_s`` is assumed to be the same at any size; the transfer from the device is added to it.
    ``save_s`` (first call until complete everywhere) and ``restore_s`` are assumed to grow with it.
    """

    stall_s: float
    save_s: float
    restore_s: float
    host_bytes: float
    source: str

    def __post_init__(self) -> None:
        if not (0 <= self.stall_s <= self.save_s and self.restore_s > 0 and self.host_bytes > 0):
            raise ValueError(f"a save ends after its stall, and sizes are positive: {self}")


def costs_of_comparison(document: Mapping[str, Any], source: str) -> dict[str, MeasuredCosts]:
    """Return the medians of the first job in ``compare.json`` for contenders that are designs.

    Raises KeyError or IndexError when the document has no such figures.
    """
    first = document["jobs"][0]
    job = first["job"]
    return {
        name: MeasuredCosts(
            stall_s=contender["summary"]["stall"]["median"],
            save_s=contender["summary"]["published"]["median"],
            restore_s=contender["summary"]["restore_lost_slice"]["median"],
            host_bytes=job["state_bytes"] / job["hosts_per_slice"],
            source=source,
        )
        for name, contender in first["contenders"].items()
        if name in (OURS, ORBAX)
    }


@dataclasses.dataclass(frozen=True)
class Site:
    """The job and its machines. ``SETTINGS`` in ``__main__`` has each value's meaning."""

    chips_per_host: int
    chips_per_slice: int
    state_gb: float
    device_gb_per_s: float
    network_gb_per_s: float
    storage_gb_per_s: float
    chip_mtbf_h: float
    process_share: float
    host_share: float
    slice_share: float
    down_s: float
    storage_at_least_every_s: float
    slowdown: float
    days: float
    seeds: int

    def job(self, chips: int) -> FailingJob:
        """Return a job of at least two slices of equal size; a few chips may remain unused."""
        slices = max(2, math.ceil(chips / self.chips_per_slice))
        hosts = chips // slices // self.chips_per_host
        if hosts == 0:
            raise ValueError(f"{chips} chips are less than one host in each of {slices} slices")
        shares: tuple[tuple[Kind, float], ...] = (
            ("process", self.process_share),
            ("host", self.host_share),
            ("slice", self.slice_share),
        )
        used = slices * hosts * self.chips_per_host
        return FailingJob(slices, hosts, self.chip_mtbf_h * 3600 / used, shares, self.down_s)

    def chips(self, job: FailingJob) -> int:
        return job.slices * job.hosts_per_slice * self.chips_per_host


def design(name: str, site: Site, job: FailingJob, measured: MeasuredCosts) -> Design:
    """Return one of ``DESIGNS`` with the best interval for its own costs in each tier.

    An interval is never shorter than a save, because saves do not overlap. The interval of storage
    is never longer than the site's limit, however rarely RAM is lost.
    """
    gb = site.state_gb / job.hosts_per_slice
    held_up_s = measured.stall_s + gb / site.device_gb_per_s
    upload_s = site.state_gb / site.storage_gb_per_s
    # Each byte is read from storage once and handed on between slices.
    download_s = upload_s + gb / site.network_gb_per_s + gb / site.device_gb_per_s
    if name == STORAGE_ONLY:
        tier = _tier(held_up_s, upload_s, download_s, job.mtbf_s, math.inf, site.slowdown)
        return Design(name, tier)
    rule = ram_rule(name, job.slices)
    scale = gb * _GB / measured.host_bytes
    local = _tier(
        held_up_s,
        (measured.save_s - measured.stall_s) * scale,
        max(measured.restore_s * scale, gb / site.network_gb_per_s) + gb / site.device_gb_per_s,
        job.mtbf_s,
        math.inf,
        site.slowdown,
    )
    gone = ram_loss_probability(rule, job)
    persistent = _tier(
        held_up_s,
        upload_s,
        download_s,
        job.mtbf_s / gone if gone else math.inf,
        site.storage_at_least_every_s,
        site.slowdown,
    )
    return Design(name, persistent, local, rule)


def ram_rule(name: str, slices: int) -> RamRule:
    """Return the slices that store in RAM and the rules of a restore from them."""
    others = frozenset(range(1, slices))
    if name == ORBAX:
        return RamRule(others, any_shard=False, rebuilds=False)
    # With two slices both store: one copy would be none after a failure.
    both = frozenset({0, 1})
    return RamRule(both if slices == 2 else others, any_shard=True, rebuilds=True)


def _tier(
    held_up_s: float,
    publish_s: float,
    restore_s: float,
    mtbf_s: float,
    at_most_s: float,
    slowdown: float,
) -> TierCosts:
    cost_s = held_up_s + slowdown * publish_s
    best_s = best_interval_s(cost_s, mtbf_s) if math.isfinite(mtbf_s) else math.inf
    interval_s = max(min(best_s, at_most_s), held_up_s + publish_s)
    return TierCosts(interval_s, cost_s, publish_s, restore_s)


@dataclasses.dataclass(frozen=True)
class Result:
    """One design at one size. ``goodput``: mean over the seeds. ``margin``: its 95% interval."""

    chips: int
    slices: int
    mtbf_s: float
    design: Design
    goodput: float
    margin: float
    first_order: float
    failures_per_day: float
    ram_restore_share: float
    lost_chip_hours_per_failure: float


def evaluate(name: str, site: Site, chips: int, measured: MeasuredCosts) -> Result:
    """Simulate ``site.days`` once for each seed."""
    job = site.job(chips)
    chosen = design(name, site, job, measured)
    outcomes = [
        simulate(chosen, job, duration_s=site.days * 86_400, seed=seed)
        for seed in range(site.seeds)
    ]
    goodputs = [outcome.goodput for outcome in outcomes]
    deviation = statistics.stdev(goodputs) if len(goodputs) > 1 else 0.0
    used = site.chips(job)
    failures = sum(o.failures for o in outcomes)
    return Result(
        chips=used,
        slices=job.slices,
        mtbf_s=job.mtbf_s,
        design=chosen,
        goodput=statistics.fmean(goodputs),
        margin=1.96 * deviation / math.sqrt(len(goodputs)),
        first_order=1 - expected_waste(chosen, job),
        failures_per_day=failures / (site.days * site.seeds),
        ram_restore_share=_ram_share(outcomes),
        lost_chip_hours_per_failure=_ratio(sum(o.lost_s for o in outcomes) / 3600 * used, failures),
    )


def _ram_share(outcomes: Sequence[Outcome]) -> float:
    ram = sum(o.ram_restores for o in outcomes)
    return _ratio(ram, ram + sum(o.persistent_restores for o in outcomes))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
