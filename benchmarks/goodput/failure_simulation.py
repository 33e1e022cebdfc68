"""Simulation of training with failures and two tiers of checkpoints.

``closed_form`` covers one tier and one kind of failure. This module draws random failures of
processes, hosts and slices, with RAM that is lost with its host, failures during recovery, and a
second loss before the copies of the first are replaced. Pure: the same seed gives the same result.

Assumptions in addition to those of ``closed_form``:

- A failure stops the whole job, which starts again on the same number of hosts.
- The failure of a process keeps the RAM of its host; the failure of a host or a slice loses it.
- All hosts are equally likely to fail, and so are all slices.
- Saves are due at multiples of the interval, counted in work, whichever step was restored. Their
  cost is spread evenly over the time.
- A save to storage that is incomplete at a failure is lost; storage itself never fails.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Set
from typing import Literal, NamedTuple

from benchmarks.goodput.closed_form import expected_loss_s

Kind = Literal["process", "host", "slice"]
HostId = tuple[int, int]
"""(slice, position in the slice)."""

_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class TierCosts:
    """The times of one tier: the interval between saves, the stall of each, the time from the stall
    until the save is complete, and a restore from the tier.
    """

    interval_s: float
    cost_s: float
    publish_s: float
    restore_s: float

    def __post_init__(self) -> None:
        values = dataclasses.astuple(self)
        if not (all(math.isfinite(v) and v >= 0 for v in values) and self.interval_s > 0):
            raise ValueError(f"costs of a tier must be finite times, 0 or more: {self}")
        if self.cost_s > self.interval_s:
            raise ValueError(f"saves of {self.cost_s} s do not fit in intervals: {self}")


@dataclasses.dataclass(frozen=True)
class RamRule:
    """The losses of RAM that the local tier survives.

    Attributes:
      slices: the slices that store; each stores a whole copy, spread over its hosts.
      any_shard: a shard may come from any slice that has it; otherwise one slice must have all.
      rebuilds: a restore replaces all lost copies; otherwise they are missing until the next save
        is complete.
    """

    slices: frozenset[int]
    any_shard: bool
    rebuilds: bool

    def survives(self, lost: Set[HostId]) -> bool:
        """Return whether a whole state remains when the hosts ``lost`` have no copies."""
        gone = {host for host in lost if host[0] in self.slices}
        if not self.any_shard:
            return len({slice_index for slice_index, _ in gone}) < len(self.slices)
        copies_gone = Counter(position for _, position in gone)
        return max(copies_gone.values(), default=0) < len(self.slices)


@dataclasses.dataclass(frozen=True)
class Design:
    """A checkpointing design. ``local`` and ``ram`` are both None with storage only."""

    name: str
    persistent: TierCosts
    local: TierCosts | None = None
    ram: RamRule | None = None

    def __post_init__(self) -> None:
        if (self.local is None) != (self.ram is None):
            raise ValueError(f"{self.name}: a local tier needs costs and a rule")
        if self.work_rate <= 0:
            raise ValueError(f"{self.name}: saving leaves no time to train")

    @property
    def work_rate(self) -> float:
        """Share of the job's running time that is not spent in saves."""
        tiers = [tier for tier in (self.local, self.persistent) if tier is not None]
        return 1 - sum(tier.cost_s / tier.interval_s for tier in tiers)


@dataclasses.dataclass(frozen=True)
class FailingJob:
    """The job and its failures.

    Attributes:
      mtbf_s: mean time between failures of the job, of all kinds.
      shares: weights of the kinds of failure, with any sum.
      down_s: time from a failure until a restore can begin: detection, replacement, start.
    """

    slices: int
    hosts_per_slice: int
    mtbf_s: float
    shares: tuple[tuple[Kind, float], ...]
    down_s: float

    def __post_init__(self) -> None:
        if min(self.slices, self.hosts_per_slice) < 1:
            raise ValueError("a job has at least one slice of one host")
        if not (math.isfinite(self.mtbf_s) and self.mtbf_s > 0 and self.down_s >= 0):
            raise ValueError(f"mtbf_s must be above 0 and down_s at least 0: {self}")
        weights = [weight for _, weight in self.shares]
        if min(weights, default=-1) < 0 or sum(weights) <= 0:
            raise ValueError(f"shares must be 0 or more, and not all 0: {self.shares}")


class Outcome(NamedTuple):
    """Use of the time. The first four fields add up to ``elapsed_s``."""

    kept_s: float
    stalled_s: float
    lost_s: float
    recovering_s: float
    elapsed_s: float
    failures: int
    ram_restores: int
    persistent_restores: int

    @property
    def goodput(self) -> float:
        """Share of the time that was spent on work that was kept."""
        return self.kept_s / self.elapsed_s


def simulate(design: Design, job: FailingJob, *, duration_s: float, seed: int) -> Outcome:
    """Train for ``duration_s`` simulated seconds. Runs in time proportional to the failures."""
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ValueError(f"duration_s must be above 0, got {duration_s}")
    rng = random.Random(seed)
    return _Run(design, job, duration_s, rng).run()


def expected_waste(design: Design, job: FailingJob) -> float:
    """Return the wasted share of the time, to first order: failures do not follow closely.

    The waste consists of stalls and, for each failure, the time until training continues and the
    lost training. A failure loses the local tier with the probability that it does so alone.
    """
    gone = 1.0 if design.ram is None else ram_loss_probability(design.ram, job)
    waste = 1 - design.work_rate
    for tier, weight in ((design.local, 1 - gone), (design.persistent, gone)):
        if tier is not None:
            loss_s = expected_loss_s(tier.interval_s, publish_s=tier.publish_s)
            waste += weight * (job.down_s + tier.restore_s + loss_s) / job.mtbf_s
    return waste


def ram_loss_probability(rule: RamRule, job: FailingJob) -> float:
    """Return the exact probability that one failure of any kind leaves no whole state in RAM."""
    shares = dict(job.shares)
    everyone = range(job.slices)
    by_host = sum(not rule.survives({(s, 0)}) for s in everyone) / job.slices
    by_slice = sum(not rule.survives(_slice_hosts(s, job)) for s in everyone) / job.slices
    weighted = shares.get("host", 0) * by_host + shares.get("slice", 0) * by_slice
    return weighted / sum(shares.values())


def _slice_hosts(slice_index: int, job: FailingJob) -> frozenset[HostId]:
    return frozenset((slice_index, position) for position in range(job.hosts_per_slice))


class _Run:
    """One simulated run. Positions are work in seconds since the start of training."""

    def __init__(
        self, design: Design, job: FailingJob, duration_s: float, rng: random.Random
    ) -> None:
        self._design = design
        self._job = job
        self._duration_s = duration_s
        self._rng = rng
        self._now_s = 0.0
        self._position_s = 0.0
        self._in_ram_s: float | None = None
        self._in_storage_s = 0.0
        self._without_copies: set[HostId] = set()
        self._kinds = [kind for kind, _ in job.shares]
        self._weights = [weight for _, weight in job.shares]
        self._stalled_s = self._lost_s = self._recovering_s = 0.0
        self._failures = self._ram_restores = self._persistent_restores = 0

    def run(self) -> Outcome:
        while self._train():
            self._fail()
            if not self._recover():
                break
        return Outcome(
            kept_s=self._position_s,
            stalled_s=self._stalled_s,
            lost_s=self._lost_s,
            recovering_s=self._recovering_s,
            elapsed_s=self._now_s,
            failures=self._failures,
            ram_restores=self._ram_restores,
            persistent_restores=self._persistent_restores,
        )

    def _train(self) -> bool:
        """Train until the next failure; return False when the time ends before it."""
        alive_s, failed = self._pass_time(math.inf)
        rate = self._design.work_rate
        start_s = self._position_s
        self._position_s += alive_s * rate
        self._stalled_s += alive_s * (1 - rate)
        stored_s = self._newest_whole(self._design.persistent, start_s, alive_s)
        self._in_storage_s = max(self._in_storage_s, stored_s or 0.0)
        if self._design.local is not None:
            kept_s = self._newest_whole(self._design.local, start_s, alive_s)
            if kept_s is not None:
                self._in_ram_s = kept_s
                self._without_copies.clear()
        return failed

    def _newest_whole(self, tier: TierCosts, start_s: float, alive_s: float) -> float | None:
        """Return the position of the newest save that completed in this life, or None."""
        work_s = tier.interval_s * self._design.work_rate
        saved_before = math.floor(start_s / work_s + _ROUNDING)
        published_s = start_s + (alive_s - tier.publish_s) * self._design.work_rate
        saved = math.floor(published_s / work_s + _ROUNDING)
        return saved * work_s if saved > saved_before else None

    def _fail(self) -> None:
        self._failures += 1
        (kind,) = self._rng.choices(self._kinds, self._weights)
        slice_index = self._rng.randrange(self._job.slices)
        if kind == "slice":
            self._without_copies |= _slice_hosts(slice_index, self._job)
        elif kind == "host":
            position = self._rng.randrange(self._job.hosts_per_slice)
            self._without_copies.add((slice_index, position))

    def _recover(self) -> bool:
        """Recover, also from failures meanwhile; return False when the time ends before."""
        while True:
            ram_s = self._ram_position()
            tier = self._design.persistent if ram_s is None else self._design.local
            assert tier is not None
            spent_s, failed = self._pass_time(self._job.down_s + tier.restore_s)
            self._recovering_s += spent_s
            if failed:
                self._fail()
            else:
                break
        self._go_back(ram_s)
        return self._now_s < self._duration_s

    def _ram_position(self) -> float | None:
        rule = self._design.ram
        if rule is None or self._in_ram_s is None or self._in_ram_s < self._in_storage_s:
            return None
        return self._in_ram_s if rule.survives(self._without_copies) else None

    def _go_back(self, ram_s: float | None) -> None:
        restored_s = self._in_storage_s if ram_s is None else ram_s
        self._lost_s += self._position_s - restored_s
        self._position_s = restored_s
        if ram_s is None:
            self._persistent_restores += 1
            self._in_ram_s = None
            self._without_copies.clear()
        else:
            assert self._design.ram is not None
            self._ram_restores += 1
            if self._design.ram.rebuilds:
                self._without_copies.clear()

    def _pass_time(self, at_most_s: float) -> tuple[float, bool]:
        """Return the seconds until a failure, ``at_most_s`` or the end, and whether it failed."""
        left_s = min(at_most_s, self._duration_s - self._now_s)
        failure_s = self._rng.expovariate(1 / self._job.mtbf_s)
        passed_s = min(left_s, failure_s)
        self._now_s += passed_s
        return passed_s, failure_s < left_s
